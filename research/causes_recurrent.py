"""Recordings of a small recurrent net with known causes of mismatch, made from seeds; for
`research.causes`.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from dcmdp_jax.probe.columns.pairs import TokenPairs, make_pairs

VOCABULARY = 64
HIDDEN = 32
LONGEST = 40
_END = 0


@dataclasses.dataclass(frozen=True)
class Fault:
    """What differs between the stack that samples and the one that trains; the default is nothing.

    Attributes:
        bits: of the engine's weights, a scale for each row; 0 leaves them.
        weights: relative size of Gaussian noise on the engine's weights: other or stale ones.
        noise: standard deviation of Gaussian noise on the engine's logits.
        heavy: the noise has Student's t distribution with 3 degrees of freedom.
        rounding: of the reported log-probs, standard deviation in nats.
        temperature, top_p, top_k, min_p: of the sampling, unknown to the training stack.
        raw: "engine" reports log-probs at temperature 1 without cut or penalty while the training
            stack knows temperature and cut; "both" report so.
        retokenized: share of the completions, at least one, whose tokens are shifted by one from
            their middle on; those of 16 tokens or more.
        prompts: the engine's completions begin in another state of the net.
        flat: the first 4 tokens are nearly uniform, on both sides.
        penalty, presence: repetition and presence penalty of the sampling, unknown to the training
            stack.
        shifted: places by which the training stack's column is late; early if negative.
        shifted_share: share of the completions, the last ones, where it is.
        padded: last tokens of each completion whose log-prob in the engine's column is 0.
        exchanged: share of the completions, two at least, whose rows in the engine's column are
            rotated.
        lags: age of the weights -> their relative noise, a like share of the completions each.
    """

    bits: int = 0
    weights: float = 0.0
    noise: float = 0.0
    heavy: bool = False
    rounding: float = 0.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    raw: str = ""
    retokenized: float = 0.0
    prompts: bool = False
    flat: bool = False
    penalty: float = 1.0
    presence: float = 0.0
    shifted: int = 0
    shifted_share: float = 1.0
    padded: int = 0
    exchanged: float = 0.0
    lags: tuple[tuple[int, float], ...] = ()


class _Net(NamedTuple):
    """h' = tanh(H h + E[y] + R[t]), logits O h'."""

    recurrent: np.ndarray
    embedding: np.ndarray
    output: np.ndarray


def recording(fault: Fault, completions: int, *, seed: int, entropies: bool = True) -> TokenPairs:
    """Sample completions of 1 to 40 tokens and score them by the other stack.

    Args:
        fault: what differs.
        completions: how many.
        seed: of net, prompts and sampling.
        entropies: whether the training stack's are recorded.
    """
    rng = np.random.default_rng(seed)
    net = _Net(
        rng.normal(0, 1.2 / np.sqrt(HIDDEN), (HIDDEN, HIDDEN)),
        rng.normal(0, 1.0, (VOCABULARY, HIDDEN)),
        rng.normal(0, rng.uniform(2.5, 5.0) / np.sqrt(HIDDEN), (VOCABULARY, HIDDEN)),
    )
    ages = np.array([lag for lag, _ in fault.lags] or [0])[
        np.arange(completions) % max(len(fault.lags), 1)
    ]
    start = rng.normal(0, 1, (completions, HIDDEN))
    found = []
    for age in np.unique(ages):
        size = dict(fault.lags).get(int(age), fault.weights)
        found.append(
            _sample(fault, net, _engine(net, fault.bits, size, rng), start[ages == age], rng)
        )
    token, rollout, hidden = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(np.concatenate([np.flatnonzero(ages == age) for age in np.unique(ages)]))
    token = token[order]
    rollout = rollout[order]
    hidden = hidden[order]
    ended = token == _END
    lengths = np.where(ended.any(1), ended.argmax(1) + 1, LONGEST)
    long = np.flatnonzero(lengths >= 16)
    count = max(1, round(fault.retokenized * completions)) if fault.retokenized else 0
    for row in rng.choice(long, min(count, len(long)), replace=False):
        # Two tokens became one at the middle; what follows is one place earlier than the engine's
        # log-probs say.
        middle = lengths[row] // 2
        token[row, middle:-1] = token[row, middle + 1 :]
        token[row, middle] = rng.integers(1, VOCABULARY)
        lengths[row] -= 1
    train, entropy = _score(fault, net, token, start)
    train, rollout = _misplaced(fault, train, rollout, lengths)
    cut = lambda x: [row[:n] for row, n in zip(x, lengths, strict=True)]  # noqa: E731 - used four times below
    return make_pairs(
        cut(token),
        cut(np.minimum(train, 0)),
        cut(np.minimum(rollout, 0)),
        entropies=cut(entropy) if entropies else None,
        lags=[np.full(n, age) for n, age in zip(lengths, ages, strict=True)]
        if fault.lags
        else None,
    )


def _misplaced(fault: Fault, train: np.ndarray, rollout: np.ndarray, lengths: np.ndarray) -> tuple:
    """Both columns [N, T], as a wrong recorder leaves them."""
    if fault.shifted:
        source = np.arange(LONGEST)[None] - fault.shifted
        moved = np.take_along_axis(train, np.clip(source, 0, lengths[:, None] - 1), axis=1)
        last = np.arange(len(lengths))[:, None] >= (1 - fault.shifted_share) * len(lengths)
        train = np.where(last, moved, train)
    if fault.padded:
        rollout = np.where(np.arange(LONGEST) >= lengths[:, None] - fault.padded, 0.0, rollout)
    if fault.exchanged:
        rows = np.argsort(-lengths, kind="stable")[: max(2, round(fault.exchanged * len(lengths)))]
        rollout = rollout.copy()
        rollout[rows] = rollout[np.roll(rows, 1)]
    return train, rollout


def _engine(net: _Net, bits: int, size: float, rng: np.random.Generator) -> _Net:
    weights = [x + size * x.std() * rng.normal(0, 1, x.shape) if size else x for x in net]
    if bits:
        scales = [np.abs(x).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1) for x in weights]
        weights = [np.round(x / scale) * scale for x, scale in zip(weights, scales, strict=True)]
    return _Net(*weights)


def _step(net: _Net, hidden: np.ndarray, token: np.ndarray | None) -> np.ndarray:
    return np.tanh(hidden @ net.recurrent + (0 if token is None else net.embedding[token]))


def _sample(
    fault: Fault, net: _Net, engine: _Net, start: np.ndarray, rng: np.random.Generator
) -> tuple:
    """Tokens [N, T], the engine's log-probs [N, T], and the engine's first state."""
    rows = np.arange(len(start))
    hidden = rng.normal(0, 1, start.shape) if fault.prompts else start
    first = hidden
    token = None
    tokens = []
    logprobs = []
    had = np.zeros((len(start), VOCABULARY), bool)
    for place in range(LONGEST):
        hidden = _step(engine, hidden, token)
        logits = hidden @ engine.output.T * (0.15 if fault.flat and place < 4 else 1.0)
        if fault.noise:
            drawn = (
                rng.standard_t(3, logits.shape) / np.sqrt(3)
                if fault.heavy
                else rng.normal(0, 1, logits.shape)
            )
            logits = logits + fault.noise * drawn
        raw = logits
        if fault.penalty != 1:
            logits = np.where(
                had, np.where(logits > 0, logits / fault.penalty, logits * fault.penalty), logits
            )
        logits = logits - fault.presence * had
        sampled = _processed(logits, fault)
        token = (sampled + rng.gumbel(size=sampled.shape)).argmax(axis=1)
        had[rows, token] = True
        reported = _log_softmax(raw) if fault.raw else sampled
        tokens.append(token)
        logprobs.append(reported[rows, token] + fault.rounding * rng.normal(0, 1, len(rows)))
    return np.stack(tokens, 1), np.stack(logprobs, 1), first


def _score(
    fault: Fault, net: _Net, token: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    hidden = start
    rows = np.arange(len(token))
    logprobs = []
    entropies = []
    for place in range(LONGEST):
        hidden = _step(net, hidden, token[:, place - 1] if place else None)
        logits = hidden @ net.output.T * (0.15 if fault.flat and place < 4 else 1.0)
        known = _processed(logits, fault) if fault.raw == "engine" else _log_softmax(logits)
        logprobs.append(np.maximum(known[rows, token[:, place]], -50.0))
        entropies.append(-(np.exp(known) * np.where(np.isfinite(known), known, 0)).sum(axis=1))
    return np.stack(logprobs, 1), np.stack(entropies, 1)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _processed(logits: np.ndarray, fault: Fault) -> np.ndarray:
    """Log-probs at the temperature, over the fewest tokens that hold `top_p`, at most `top_k` of
    them.

    None of a probability below `min_p` times the largest.
    """
    found = _log_softmax(logits / fault.temperature)
    if fault.min_p:
        found = _log_softmax(
            np.where(
                found >= found.max(axis=1, keepdims=True) + np.log(fault.min_p), found, -np.inf
            )
        )
    if fault.top_p == 1 and not fault.top_k:
        return found
    order = np.argsort(-found, axis=1)
    ranked = np.exp(np.take_along_axis(found, order, axis=1))
    kept = np.cumsum(ranked, axis=1) - ranked < fault.top_p
    if fault.top_k:
        kept[:, fault.top_k :] = False
    mask = np.zeros(found.shape, bool)
    np.put_along_axis(mask, order, kept, axis=1)
    return _log_softmax(np.where(mask, found, -np.inf))

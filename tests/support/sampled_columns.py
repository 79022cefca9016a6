"""Two columns of log-probs of tokens sampled from known distributions, in plain NumPy, with a fault
planted.
"""

import numpy as np

from dcmdp_jax.probe.columns.pairs import make_pairs

VOCABULARY = 50
COMPLETIONS = 40
LENGTH = 40


def _log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def _truncated(logprobs, top_p):
    """Renormalized over the fewest tokens that hold `top_p`."""
    order = np.argsort(-logprobs, axis=-1)
    sorted_p = np.exp(np.take_along_axis(logprobs, order, axis=-1))
    kept = np.cumsum(sorted_p, axis=-1) - sorted_p < top_p
    mask = np.zeros(logprobs.shape, bool)
    np.put_along_axis(mask, order, kept, axis=-1)
    return _log_softmax(np.where(mask, logprobs, -np.inf))


def columns(
    *,
    noise=0.0,
    temperature=1.0,
    top_p=1.0,
    raw=False,
    broken=0,
    entropies=True,
    lags=None,
    start=False,
):
    """Completions of Gaussian logits, standard deviation 2.

    Args:
        noise: standard deviation of what is added to the engine's logits.
        temperature: of sampling; the training stack scores at 1.
        top_p: of sampling.
        raw: the training stack scores as sampled, the engine reports temperature 1 and full
            support.
        broken: number of completions that score other tokens from the middle on.
        entropies: whether they are known.
        lags: steps -> noise; a quarter of the completions for each.
        start: the first 4 tokens are scored under other logits.
    """
    rng = np.random.default_rng(0)
    found = {"ids": [], "train": [], "rollout": [], "entropy": [], "lag": []}
    for row in range(COMPLETIONS):
        logits = rng.normal(0, 2, (LENGTH, VOCABULARY))
        lag = 0 if lags is None else list(lags)[row % len(lags)]
        size = noise if lags is None else lags[lag]
        engine = logits + size * rng.normal(0, 1, logits.shape)
        if start:
            engine[:4] = rng.normal(0, 2, (4, VOCABULARY))
        sampled_from = _truncated(_log_softmax(engine / temperature), top_p)
        train = _log_softmax(logits)
        rollout = sampled_from
        if raw:
            train = _truncated(_log_softmax(logits / temperature), top_p)
            rollout = _log_softmax(engine)
        ids = np.array([rng.choice(VOCABULARY, p=np.exp(row)) for row in sampled_from])
        scored = ids.copy()
        if row < broken:
            scored[LENGTH // 2 :] = rng.integers(0, VOCABULARY, LENGTH - LENGTH // 2)
        place = np.arange(LENGTH)
        found["ids"].append(scored)
        found["train"].append(train[place, scored])
        found["rollout"].append(rollout[place, ids])
        with np.errstate(invalid="ignore"):
            found["entropy"].append(-np.nansum(np.exp(train) * train, axis=-1))
        found["lag"].append(np.full(LENGTH, lag))
    return make_pairs(
        found["ids"],
        found["train"],
        found["rollout"],
        entropies=found["entropy"] if entropies else None,
        lags=None if lags is None else found["lag"],
    )

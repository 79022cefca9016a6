"""An engine that is wrong on known states, a task that can avoid them, and a study of both.

    dcmdp train --config=examples/planted/planted.py         # GRPO
    dcmdp train --config=examples/planted/planted.py:reward,3
        # a penalty inside the reward, lambda = 3

The study, all runs from one policy:

    dcmdp train --config=examples/planted/planted.py --config.training.steps=1 \
        --config.optimizer.learning_rate=1e-12 --config.run_dir=runs/planted_start
    dcmdp convert export runs/planted_start runs/planted_policy --dtype float32
    python -m research.sweep --study=examples/planted/planted.py \
        --kept=research/kept/planted.jsonl.gz --config.model.path=runs/planted_policy

A completion has two characters. The first chooses a way, `C` (clean) or `N` (noisy); the second is
`A` or `B`, both right. After `N` the engine adds 1.5 to the logit of `A` before it samples, and
reports what it sampled with; everywhere else it computes as the trainer does. The noisy way earns
1, the clean one 0.9: does a penalty on the mismatch make the policy go the clean way, at that
price? docs/theory.md has the answer in closed form for a tabular policy, docs/evidence.md what the
trainer does.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from configs import base, demo
from dcmdp_jax.data.arithmetic import build_tokenizer
from dcmdp_jax.data.episode import Episode, single_turn
from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind
from dcmdp_jax.engines.protocol import SamplingParams
from dcmdp_jax.fields import setting
from dcmdp_jax.models import decoder
from dcmdp_jax.models.decoder import Compute
from research.studies.study import Arm, Study

PRICE = 0.1
"""Reward lost by the clean way."""
LEVELS = ("token", "sequence", "reward")
LAMBDAS = (3, 30)
SEEDS = tuple(range(5))


@dataclasses.dataclass(frozen=True)
class Settings:
    shift: float = setting(1.5, "Added to the logit of A after N.", unit="nats")


class PlantedEngine:
    """The trainer's own forward pass, in float32, but for the logits of one state."""

    def __init__(self, arguments: EngineArguments) -> None:
        self._model = arguments.model
        self._shift = arguments.settings.shift
        self._noisy, self._raised = build_tokenizer().convert_tokens_to_ids(["N", "A"])

    def sync_weights(self, params: Any, policy_version: int) -> dict[str, float]:
        self._params = params
        self._version = policy_version
        return {}

    @functools.cached_property
    def _logprobs(self) -> Any:
        def logprobs(params: Any, ids: jax.Array, temperature: jax.Array) -> jax.Array:
            """[N, L, V]: of what follows each token."""
            inputs = decoder.unpacked_inputs(ids)
            hidden = decoder.hidden_states(params, self._model, inputs, Compute())
            logits = hidden @ decoder.output_kernel(params)
            raised = jnp.where(ids[..., None] == self._noisy, self._shift, 0.0)
            logits += raised * (jnp.arange(logits.shape[-1]) == self._raised)
            return jax.nn.log_softmax(logits / temperature)

        return jax.jit(logprobs)

    def _table(self, rows: Sequence[np.ndarray], length: int, temperature: float) -> np.ndarray:
        ids = np.zeros((len(rows), length), np.int32)
        for place, row in enumerate(rows):
            ids[place, : len(row)] = row
        return np.asarray(self._logprobs(self._params, ids, np.float32(temperature or 1.0)))

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        sampling: SamplingParams,
        *,
        seed: int,
        step: int,
        first_prompt: int = 0,
    ) -> Iterator[list[Episode]]:
        size = sampling.group_size
        limit = sampling.max_completion_tokens
        length = max(map(len, prompts)) + limit
        rows = [list(prompt) for prompt in prompts for _ in range(size)]
        logprobs: list[list[float]] = [[] for _ in rows]
        draws = [
            np.random.default_rng([seed, step, first_prompt * size + row])
            for row in range(len(rows))
        ]
        ended = np.zeros(len(rows), bool)
        for _ in range(limit):
            table = self._table(rows, length, sampling.temperature)
            for place in np.flatnonzero(~ended):
                values = table[place, len(rows[place]) - 1]
                noise = draws[place].gumbel(size=len(values)) if sampling.temperature else 0.0
                token = int(np.argmax(values + noise))
                rows[place].append(token)
                logprobs[place].append(float(values[token]))
                ended[place] = token in sampling.stop_token_ids
        for group, prompt in enumerate(prompts):
            yield [
                single_turn(
                    prompt,
                    np.array(rows[row][len(prompt) :], np.int32),
                    np.array(logprobs[row], np.float32),
                    policy_version=self._version,
                    group=group,
                    member=row - group * size,
                    finish_reason="stop" if ended[row] else "length",
                )
                for row in range(group * size, (group + 1) * size)
            ]

    def score(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[np.ndarray],
        *,
        temperature: float,
    ) -> list[np.ndarray]:
        rows = [np.concatenate(pair) for pair in zip(prompts, completions, strict=True)]
        table = self._table(rows, max(map(len, rows)), temperature)
        return [
            np.array(
                [table[place, t - 1, row[t]] for t in range(len(prompts[place]), len(row))],
                np.float32,
            )
            for place, row in enumerate(rows)
        ]

    def release_weights(self) -> None:
        self._params = None

    def close(self) -> None:
        self._params = None


class PlantedKind(EngineKind):
    name = "planted"
    settings = Settings
    precisions = compute_dtypes = ("float32",)
    own_process = False

    def build(self, arguments: EngineArguments) -> PlantedEngine:
        return PlantedEngine(arguments)


ENGINE = PlantedKind()


def score(completions: list[str], **columns: object) -> list[float]:
    """1 for the noisy way, 0.9 for the clean one, 0 for anything else."""
    right = {"NA": 1.0, "NB": 1.0, "CA": 1.0 - PRICE, "CB": 1.0 - PRICE}
    return [right.get(text, 0.0) for text in completions]


def _penalty(level: str, strength: float) -> dict[str, Any]:
    """Settings of a penalty with a fixed lambda."""
    fixed = {"multiplier": float(strength), "multiplier_max": 1e6, "dual_learning_rate": 0.0}
    return {"method": "dc_grpo", "level": level} | fixed


def get_config(arg: str = "") -> ConfigDict:
    """GRPO, or `LEVEL,LAMBDA`: a penalty of that level with a fixed lambda."""
    here = Path(__file__).parent
    config = demo.get_config()
    config.run_dir = "runs/planted"
    config.task.train, config.warmup.task = str(here / "train.jsonl"), str(here / "warmup.jsonl")
    config.warmup.steps, config.warmup.batch_size = 150, 64
    config.rewards.functions = f"{__file__}:score"
    config.rollout.engine, config.rollout.precision = f"{__file__}:ENGINE", "float32"
    config.rollout.max_completion_tokens = 2
    config.rollout.max_rows = config.rollout.min_rows = 64
    config.training.steps, config.mesh.cpu_devices = 100, 1
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = 8
    config.optimizer.learning_rate = 2e-4
    config.evaluation.every_steps = 0
    config.algorithm.tolerance_steps = 0
    config.algorithm.method = "grpo"
    if arg:
        level, _, strength = arg.partition(",")
        config.algorithm.update(_penalty(level, float(strength)))
    return base.with_options(config, "")


def get_study(arg: str = "") -> Study:
    if arg:
        raise ValueError(f"study argument {arg!r}: it takes none")
    quiet = {"checkpoint.every_steps": 100_000, "observe.samples": 0, "warmup.steps": 0}
    quiet |= {"optimizer.learning_rate": 2e-4, "algorithm.method": "grpo"}
    quiet |= {"training.prompts_per_step": 8, "training.prompts_per_mini_batch": 8}
    path = "examples/planted/planted.py"
    arms = {
        "grpo": Arm(path, quiet),
        "grpo_perturbed": Arm(path, quiet | {"algorithm.std_epsilon": 2e-6}),
    }

    def penalized(level: str, strength: int) -> dict[str, object]:
        return quiet | {
            f"algorithm.{name}": value for name, value in _penalty(level, strength).items()
        }

    for level in (*LEVELS, "state"):
        for strength in LAMBDAS:
            arms[f"{level}_{strength}"] = Arm(
                path, penalized(level, strength), past=level not in LEVELS
            )
    for strength in LAMBDAS:
        undivided = penalized("reward", strength) | {"algorithm.normalize_std": False}
        arms[f"reward_undivided_{strength}"] = Arm(path, undivided)
    return Study("A planted mismatch with a way out", arms, "grpo", SEEDS)

"""The benchmark of score centering, with DC-GRPO: Countdown, Qwen3-0.6B, seven mismatches.

    python examples/countdown/task.py && hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B
    dcmdp plan --config=examples/countdown/countdown.py:0.6b --topology=h100:1
    python -m research.studies --study=examples/countdown/countdown.py:0.6b --dry-run
    python -m research.studies --study=examples/countdown/countdown.py:0.6b,int8          # one kind
    of mismatch

`small` in place of `0.6b` is a task of three numbers for a fresh model of 0.3M parameters on a CPU,
which starts from answers half of which are wrong. All its runs begin with one policy:

    python examples/countdown/task.py small
    dcmdp train --config=examples/countdown/countdown.py:small --config.training.steps=1 \
        --config.optimizer.learning_rate=1e-12 --config.run_dir=runs/countdown/start
    dcmdp convert export runs/countdown/start runs/countdown/policy --dtype float32
    python -m research.studies --study=examples/countdown/countdown.py:small \
        --config.model.path=runs/countdown/policy

research/countdown.md says what is equal to the published sweeps and what is not.
"""

from __future__ import annotations

from typing import Any

from ml_collections import ConfigDict

from configs import base, demo
from research.studies.study import Arm, Study

_HERE = "examples/countdown"
_SAMPLER = {"rollout.engine": f"{_HERE}/sampler.py:SAMPLER"}
SIZES = ("0.6b", "small")
MISMATCHES: dict[str, dict[str, Any]] = {
    "int8": {"rollout.precision": "int8", "rollout.kv_cache_dtype": "fp8"},
    "int4": {"rollout.precision": "int4", "rollout.kv_cache_dtype": "fp8"},
    "lag8": {"rollout.lag": 8},
    "lag64": {"rollout.lag": 64},
    "stale64": {**_SAMPLER, "rollout.engine_args": '{"every": 65}'},
    "noise1": {**_SAMPLER, "rollout.engine_args": '{"noise": 0.01}'},
    "noise2": {**_SAMPLER, "rollout.engine_args": '{"noise": 0.02}'},
    "noise5": {**_SAMPLER, "rollout.engine_args": '{"noise": 0.05}'},
}
"""What the engine gets wrong. `stale64` and the noise are the published ones, `int8` is near it;
the rest is ours.
"""
_PAPER = {
    "method": "dc_grpo",
    "multiplier": 0.1,
    "tolerance": 0.0037,
    "dual_learning_rate": 1.0,
    "multiplier_max": 1.0,
}
ARMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "tis": {"corrections": "tis(high=2)"},
    "icepop": {"corrections": "icepop(low=0.5,high=5)"},
    "centered": {"corrections": "score_centering"},
    "tis_centered": {"corrections": "tis(high=2),score_centering"},
    "dc_grpo": _PAPER,
    "dc_logit": _PAPER | {"measure": "logit", "tolerance_steps": 20},
}
"""Arm -> settings of the algorithm. The first five are the published `pg`, `tis`, `mis`, `sc` and
`tis-sc`; c of `dc_logit` is 1.25 times the median of its first 20 steps.
"""
HEAD = 128
"""Top-k tokens of the engine that score centering has, as published; a smaller vocabulary
whole.
"""
_NOISE_STEPS = 300
_STEPS = 1200
_SHAKEN = {"optimizer.learning_rate": 2.002e-4}
"""A learning rate a thousandth larger: what differs from `grpo` is chance."""
_SCORED_EXACTLY = (
    "--config.rollout.engine=local",
    "--config.rollout.precision=float32",
    "--config.rollout.kv_cache_dtype=auto",
    "--config.rollout.max_completion_tokens=32",
    "--config.evaluation.samples=(8,)",
    "--config.evaluation.temperature=1.0",
)
"""Last policies of the small size are scored by an engine that computes as the trainer does,
too.
"""


_ALGORITHM = {"normalize_std": False, "aggregation": "token_mean"}
_OPTIMIZER: dict[str, dict[str, Any]] = {
    # SGD of rate 0.01: AdamW without a first moment, whose second one is nothing beside epsilon,
    # moves a parameter by 20 / 1000 of its gradient. Rewards are 1 and 0 here, 1 and -1 there, so
    # advantages are half as large.
    "0.6b": {"beta1": 0.0, "epsilon": 1000.0, "learning_rate": 20.0, "max_grad_norm": 0.0},
    "small": {"learning_rate": 2e-4},
}
_PROMPTS = {"0.6b": 64, "small": 8}
"""Prompts of a step, which is one update."""


def _shared(config: ConfigDict, prefix: str, size: str) -> None:
    """What both sizes have of the published settings."""
    config.task.train, config.evaluation.task = (
        f"runs/countdown/{prefix}{name}.jsonl" for name in ("train", "held_out")
    )
    config.task.prompt_suffix = ""
    config.rewards.functions = f"{_HERE}/task.py:countdown"
    config.algorithm.method = "grpo"
    config.algorithm.tolerance_steps = 0
    config.algorithm.update(_ALGORITHM)
    config.optimizer.update(_OPTIMIZER[size])
    config.training.prompts_per_step = config.training.prompts_per_mini_batch = _PROMPTS[size]
    config.evaluation.temperature = 1.0
    config.evaluation.samples = (8,)


def _published() -> ConfigDict:
    config = base.get_config()
    _shared(config, "", "0.6b")
    config.run_dir = "runs/countdown/qwen3_0p6b"
    config.model.path = "models/Qwen3-0.6B"
    config.task.chat_template_kwargs = '{"enable_thinking": false}'
    config.task.max_prompt_tokens = 144
    config.rollout.max_completion_tokens = 380
    config.rollout.max_rows = 512
    config.training.steps = _STEPS
    config.evaluation.every_steps = 25
    return config


def _small() -> ConfigDict:
    config = demo.get_config()
    _shared(config, "small_", "small")
    config.run_dir = "runs/countdown/small"
    config.rollout.precision = "float32"
    config.rollout.max_completion_tokens = 32
    config.rollout.max_rows = config.rollout.min_rows = 64
    config.training.steps, config.mesh.cpu_devices = 96, 1
    config.warmup.steps = 1500
    config.warmup.task = "runs/countdown/small_worked.jsonl"
    config.evaluation.every_steps = 32
    return config


def get_config(arg: str = "") -> ConfigDict:
    """GRPO with an engine in the trainer's precision, at one of the sizes."""
    arg = arg or "0.6b"
    if arg not in SIZES:
        raise ValueError(f"config argument {arg!r}: allowed are {', '.join(SIZES)}")
    return _published() if arg == "0.6b" else _small()


def _arms(size: str, mismatch: str) -> dict[str, Arm]:
    """The arms of a mismatch; `exact` has only its lag. The small size adds `grpo_shaken`."""
    engine = MISMATCHES[mismatch] | ({"warmup.steps": 0} if size == "small" else {})
    engine |= {
        f"algorithm.{name}": value for name, value in ({"method": "grpo"} | _ALGORITHM).items()
    }
    engine |= {f"optimizer.{name}": value for name, value in _OPTIMIZER[size].items()}
    engine |= dict.fromkeys(
        ("training.prompts_per_step", "training.prompts_per_mini_batch"), _PROMPTS[size]
    )
    if "noise" in mismatch and size == "0.6b":
        engine |= {"training.steps": _NOISE_STEPS, "evaluation.every_steps": 20}
    found = {}
    for name, algorithm in ARMS.items():
        head = (
            {"rollout.top_logprobs": HEAD if size == "0.6b" else 104} if "centered" in name else {}
        )
        changes = {f"algorithm.{key}": value for key, value in algorithm.items()}
        differs = tuple(_ALGORITHM) if name == "dc_grpo" else ()
        found[f"{mismatch}_{name}"] = Arm(
            f"{_HERE}/countdown.py:{size}", engine | head | changes, differs=differs
        )
    if size == "small":
        found[f"{mismatch}_grpo_shaken"] = Arm(f"{_HERE}/countdown.py:{size}", engine | _SHAKEN)
    if mismatch in ("int8", "lag8", "lag64"):
        exact = {**engine, "rollout.precision": "exact", "rollout.kv_cache_dtype": "auto"}
        found[f"exact_{mismatch}" if "lag" in mismatch else "exact"] = Arm(
            f"{_HERE}/countdown.py:{size}", exact
        )
    return found


def get_study(arg: str = "") -> Study:
    """`SIZE`, or `SIZE,MISMATCH` for one of them."""
    size, _, only = (arg or "0.6b").partition(",")
    if size not in SIZES or only and only not in MISMATCHES:
        allowed = f"{' or '.join(SIZES)}, then one of {', '.join(MISMATCHES)} or none"
        raise ValueError(f"study argument {arg!r}: allowed are {allowed}")
    chosen = [only] if only else list(MISMATCHES)
    arms = {name: arm for mismatch in chosen for name, arm in _arms(size, mismatch).items()}
    title = f"Countdown, {size}{', ' + only if only else ''}"
    if size == "small":
        return Study(title, arms, f"{chosen[0]}_grpo", tuple(range(5)), _SCORED_EXACTLY)
    return Study(title, arms, f"{chosen[0]}_grpo", (0,))

"""The defaults of every setting, as a ConfigDict that experiment files change.

The settings are declared in `dcmdp_jax/config/`; `docs/settings.md` lists them with unit, source
and what is allowed.
"""

import dataclasses
from collections.abc import Iterable

from ml_collections import ConfigDict

from dcmdp_jax.config.settings import Config

OPTIONS = ("grpo", "debug")
PAPER_OPTIONS = ("local", "fp8")


def get_config(arg: str = "") -> ConfigDict:
    """The paper's constants (Qwen3-8B), on a model and data that are still to be named."""
    return with_options(ConfigDict(dataclasses.asdict(Config())), arg)


def paper_config(arg: str, *, model: str, run_dir: str, replicas_of: int = 1) -> ConfigDict:
    """Make what the paper's runs share, with the PAPER_OPTIONS of `arg` applied.

    vLLM samples, with as many replicas as the GPUs hold; completions of a whole step are in flight.

    local  the embedded engine samples.
    fp8    vLLM with FP8 weights and activations (W8A8), on GPUs.

    Args:
        arg: argument of the config file.
        model: name of the directory in models/.
        run_dir: run directory without options.
        replicas_of: GPUs of each replica.
    """
    config = get_config()
    config.run_dir, config.model.path = run_dir, f"models/{model}"
    config.task.train = "BytedTsinghua-SIA/DAPO-Math-17k"
    config.rollout.max_completion_tokens = 8192
    config.rollout.engine = "vllm"
    config.rollout.vllm.replicas = 0
    config.rollout.vllm.tensor_parallel_size = replicas_of
    config.rollout.max_rows = 512
    options = [option for option in arg.split(",") if option]
    if "local" in options and "fp8" in options:
        raise ValueError(
            "config argument 'local,fp8': FP8 weights and activations are vLLM's; choose one of "
            "the two"
        )
    if "local" in options:
        config.run_dir += "_local"
        config.rollout = get_config().rollout
        config.rollout.max_completion_tokens = 8192
    if "fp8" in options:
        config.run_dir += "_fp8"
        config.rollout.precision = "fp8"
    return config


def with_options(config: ConfigDict, arg: str, own: Iterable[str] = ()) -> ConfigDict:
    """Apply the argument of a config file, options joined by commas.

    grpo   the baseline: no penalty, a run directory of its own.
    debug  the same code in a minute on a CPU: a fresh small model, the arithmetic task, two steps.

    Args:
        config: with the file's own options applied.
        arg: all options.
        own: names of the file's own.

    Raises:
        ValueError: for an option that is none of them, naming all.
    """
    options = [option for option in arg.split(",") if option]
    known = (*OPTIONS, *own)
    if unknown := [option for option in options if option not in known]:
        raise ValueError(
            f"config argument {unknown[0]!r}: allowed are {', '.join(known)}, joined by commas"
        )
    if "grpo" in options:
        config.algorithm.method = "grpo"
        config.run_dir += "_grpo"
    if "debug" in options:
        config.run_dir += "_debug"
        config.rollout.vllm.tensor_parallel_size = 1
        config.model.path = config.model.tokenizer = ""
        config.task.train = "arithmetic:difficulty=1,count=64"
        config.task.prompt_suffix = ""
        config.task.max_prompt_tokens = 64
        config.task.verifier_workers = 1
        config.rollout.group_size = 4
        config.rollout.max_completion_tokens = 16
        config.rollout.max_rows = 32
        config.training.steps = 2
        # Too few steps to measure c on.
        config.algorithm.tolerance_steps = 0
        config.training.prompts_per_step = 4
        config.training.prompts_per_mini_batch = 2
        if config.warmup.steps:
            config.warmup.steps = 20
            config.warmup.task = "arithmetic:difficulty=2,count=640,seed=1,error_rate=0.5"
        if config.evaluation.every_steps:
            config.evaluation.task = "arithmetic:difficulty=1,count=8,split=heldout"
            config.evaluation.samples = (2,)
    return config

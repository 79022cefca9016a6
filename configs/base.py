"""The defaults of every setting, as a ConfigDict that experiment files change.

The settings are declared in `dcmdp_jax/config.py` and `config_*.py`; `docs/settings.md` lists them with unit, source
and what is allowed.
"""

import dataclasses

from ml_collections import ConfigDict

from dcmdp_jax.config import Config

OPTIONS = ("grpo", "debug")


def get_config(arg: str = "") -> ConfigDict:
    """The paper's constants (Qwen3-8B), on a model and data that are still to be named."""
    return with_options(ConfigDict(dataclasses.asdict(Config())), arg)


def with_options(config: ConfigDict, arg: str) -> ConfigDict:
    """Apply the argument of a config file, options joined by commas.

    grpo   the baseline: no penalty, a run directory of its own.
    debug  the same code in a minute on a CPU: a fresh small model, the arithmetic task, two steps.

    Raises:
        ValueError: for an option that is neither.
    """
    options = [option for option in arg.split(",") if option]
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"config argument {unknown[0]!r}: allowed are {', '.join(OPTIONS)}, joined by commas")
    if "grpo" in options:
        config.algorithm.method = "grpo"
        config.run_dir += "_grpo"
    if "debug" in options:
        config.run_dir += "_debug"
        config.model.path = config.model.tokenizer = ""
        config.task.train = "arithmetic:difficulty=1,count=64"
        config.task.prompt_suffix = ""
        config.task.max_prompt_tokens = 64
        config.rollout.group_size = 4
        config.rollout.max_completion_tokens = 16
        config.rollout.max_rows = 32
        config.training.steps = 2
        config.training.prompts_per_step = 4
        config.training.prompts_per_mini_batch = 2
        config.training.row_lengths = (80,)
        if config.warmup.steps:
            config.warmup.steps = 20
            config.warmup.task = "arithmetic:difficulty=2,count=640,seed=1,error_rate=0.5"
        if config.evaluation.every_steps:
            config.evaluation.task = "arithmetic:difficulty=1,count=8,split=heldout"
            config.evaluation.samples = 2
    return config

"""Arguments of library code -> the settings that they come from: the one place that translates its messages.

Library code names its own arguments: an `ArgumentError` has one as an attribute, and a message others in back quotes. A
user knows settings.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping

from dcmdp_jax.config.rollout import RolloutSettings
from dcmdp_jax.engines.engine_kind import EngineKind
from dcmdp_jax.engines.registry import ENGINES
from dcmdp_jax.errors import ArgumentError, EngineError, UserError

HOSTS = {name: f"hosts.{name}" for name in ("coordinator", "processes", "process", "timeout_s")}
MESH = {"mesh": "mesh", "completions": "training.prompts_per_mini_batch"}
MESH |= {axis: f"mesh.{axis}" for axis in ("data", "fsdp", "tensor", "expert")}
PACKING = {"limit": "rollout.max_completion_tokens", "max_completion_tokens": "rollout.max_completion_tokens"}
PACKING |= {name: f"training.{name}" for name in ("row_lengths", "segments_per_row")}
PACKING |= {"completions": "training.prompts_per_mini_batch or rollout.group_size"}
EPISODES = {"drop": "rollout.on_non_finite=drop", "routed_experts": "rollout.router_replay"}
EPISODES |= {"top_logprobs": "rollout.top_logprobs"}
EVALUATION = {"task": "evaluation.task", "samples": "evaluation.samples"}
LORA = {"lora_rank": "model.lora_rank", "lora_targets": "model.lora_targets"}
REWARDS = {"memory_gib": "rewards.memory_limit"}


def of_engine(kind: EngineKind) -> dict[str, str]:
    """The settings of a run's engine, by argument."""
    own = f"rollout.{kind.name}" if kind.pushes and kind in ENGINES.values() else "rollout.engine_args"
    names = {"model": "model", "tokenizer": "model.tokenizer", "seed": "training.seed", "mesh": own}
    names |= {"routed_experts": "rollout.router_replay"}
    names |= {"max_total_tokens": "task.max_prompt_tokens and rollout.max_completion_tokens"}
    names |= {field.name: f"rollout.{field.name}" for field in dataclasses.fields(RolloutSettings)}
    return names | {field.name: f"{own}.{field.name}" for field in dataclasses.fields(kind.settings)}


def in_settings(message: str, names: Mapping[str, str]) -> str:
    """A message whose arguments in back quotes are said as settings.

    Args:
        message: text from library code.
        names: argument -> dotted name of the setting.
    """
    for argument, setting in names.items():
        message = message.replace(f"`{argument}`", setting)
    return message


@contextlib.contextmanager
def as_settings(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about arguments leave the block as errors about settings."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in names:
            raise
        setting = names[error.argument]
        raise UserError(f"config.{setting}{error.given}: {in_settings(error.said, names)}") from error
    except (UserError, EngineError, MemoryError) as error:
        if (said := in_settings(str(error), names)) == str(error):
            raise
        raise type(error)(said) from error

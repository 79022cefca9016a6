"""DC-GRPO in JAX: reinforcement learning of language models under a training-inference discrepancy constraint.

The names below are the public ones. Each is imported at its first use, and JAX with it.
"""

# ruff: noqa: F401 - names for type checkers
import importlib
import os
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dcmdp_jax.algorithm.advantages import group_advantages
    from dcmdp_jax.algorithm.dc_grpo import dc_grpo_loss
    from dcmdp_jax.algorithm.discrepancy import token_discrepancy
    from dcmdp_jax.algorithm.dual import dual_update
    from dcmdp_jax.algorithm.losses import importance_ratio
    from dcmdp_jax.algorithm.penalties import penalized_advantages
    from dcmdp_jax.algorithm.remedies import Tokens
    from dcmdp_jax.algorithm.trust_regions import clipped_surrogate
    from dcmdp_jax.commands.flags import load_config
    from dcmdp_jax.commands.train import train
    from dcmdp_jax.config.settings import Config
    from dcmdp_jax.data.episode import Episode
    from dcmdp_jax.engines.protocol import Engine
    from dcmdp_jax.errors import UserError
    from dcmdp_jax.observe.metrics_io import read_metrics
    from dcmdp_jax.observe.report import write_report

__version__ = "0.1.0"
REPOSITORY = ""
"""Address of the public repository; empty as long as there is none. Model cards and the site link to it."""

_MODULES = MappingProxyType(
    {
        "Config": "config.settings",
        "Engine": "engines.protocol",
        "Episode": "data.episode",
        "Tokens": "algorithm.remedies",
        "UserError": "errors",
        "clipped_surrogate": "algorithm.trust_regions",
        "dc_grpo_loss": "algorithm.dc_grpo",
        "dual_update": "algorithm.dual",
        "group_advantages": "algorithm.advantages",
        "importance_ratio": "algorithm.losses",
        "load_config": "commands.flags",
        "penalized_advantages": "algorithm.penalties",
        "read_metrics": "observe.metrics_io",
        "token_discrepancy": "algorithm.discrepancy",
        "train": "commands.train",
        "write_report": "observe.report",
    }
)
__all__ = ["__version__", *_MODULES]

# transformers advises at import that PyTorch is missing; only its tokenizers are used here, and they need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

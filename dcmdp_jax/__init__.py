"""DC-GRPO in JAX: reinforcement learning of language models under a training-inference discrepancy constraint.

    dc_grpo_loss            the loss of a batch (Eq. 9, 10), the next multiplier, and more as a `DcGrpoAux`
    token_discrepancy       delta = |p^Train - p^Inf| of each token (Eq. 3)
    group_advantages        A, rewards relative to their group's (Eq. 8)
    penalized_advantages    A - lambda delta (Eq. 8)
    importance_ratio        gamma = pi_theta / p^Train (below Eq. 1)
    clipped_surrogate       min(gamma A, clip(gamma) A) (Eq. 10)
    dual_update             lambda_{k+1} = clip(lambda_k + eta (mean delta - c)) (Eq. 11)

The first composes the others. `train` runs the whole training of a config (`load_config`); `write_report` and
`read_metrics` read what it wrote. Each name is imported at its first use, and JAX with it.
"""

import difflib
import importlib
import os
from types import MappingProxyType
from typing import Any

from dcmdp_jax.version import __version__

_MODULES = MappingProxyType(
    {
        "Config": "config.settings",
        "DcGrpoAux": "algorithm.dc_grpo",
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
        near = difflib.get_close_matches(name, _MODULES, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(_MODULES)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{'' if name.startswith('_') else hint}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)

"""DC-GRPO in JAX: RL of language models under a constraint on training-inference discrepancy.

    dc_grpo_loss          loss of a batch (Eq. 9, 10), next multiplier and more: a `DcGrpoAux`
    token_discrepancy     delta = |p^Train - p^Inf| of each token (Eq. 3)
    group_advantages      A, rewards relative to their group's (Eq. 8)
    penalized_advantages  A - lambda delta (Eq. 8)
    importance_ratio      gamma = pi_theta / p^Train (below Eq. 1)
    clipped_surrogate     min(gamma A, clip(gamma) A) (Eq. 10)
    dual_update           lambda_{k+1} = clip(lambda_k + eta (mean delta - c)) (Eq. 11)

The first composes the others. `train` runs the whole training of a config (`load_config`);
`write_report` and `read_metrics` read what it wrote. Each name is imported at its first use, and
JAX with it.
"""

import difflib
import importlib
import os
from typing import Any

from dcmdp_jax.version import __version__

_TABLE = """
    DcGrpoAux             algorithm.dc_grpo        aux
    penalized_advantages  algorithm.penalties      penal penalty
    clipped_surrogate     algorithm.trust_regions  clip ppo surrogate
    group_advantages      algorithm.advantages     advantage normaliz statistic
    dc_grpo_loss          algorithm.dc_grpo        loss grpo
    token_discrepancy     algorithm.discrepancy    discrepan delta mismatch kl
    importance_ratio      algorithm.losses         ratio importance tis icepop
    dual_update           algorithm.dual           dual lambda multiplier lagrang toleran budget
    read_metrics          observe.metrics_io       metric
    write_report          observe.report           report plot
    load_config           commands.flags           config preset
    train                 commands.train           train run
    Config                config.settings
    Engine                engines.protocol
    Episode               data.episode
    Tokens                algorithm.remedies
    UserError             errors
"""
"""Public name, its module, and pieces of names that are tried for it; the first one counts."""
_PUBLIC = [line.split() for line in _TABLE.strip().splitlines()]
_MODULES = {name: module for name, module, *_ in _PUBLIC}
__all__ = ["__version__", *sorted(_MODULES)]

# transformers advises at import that PyTorch is missing; only its tokenizers are used here, and
# they need none.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        try:
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        except ModuleNotFoundError as error:
            error.msg += f": {name} needs it; in torch use dcmdp_jax.integrations.dc_grpo_torch"
            raise
    near = []
    for public_name, _, *words in _PUBLIC:
        if any(word in name.lower() for word in words):
            near.append(public_name)
    near += difflib.get_close_matches(name, _MODULES, n=1)
    hint = f"; it has {', '.join(sorted(_MODULES))}"
    if name.startswith("_"):
        hint = ""
    elif near:
        hint = f"; did you mean {near[0]}?"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted(__all__)

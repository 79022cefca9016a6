"""Shapes and dtypes of signatures (`Float[Array, "R L"]`), checked in the tests alone, by
beartype.
"""

from collections.abc import Callable
from typing import Any, get_args

import beartype
import jaxtyping

_MODELS = "dcmdp_jax.models.attention", "dcmdp_jax.models.decoder", "dcmdp_jax.models.logprobs"
CHECKED = "dcmdp_jax.algorithm", "dcmdp_jax.data.packing", "dcmdp_jax.data.row_layout", *_MODELS
"""Modules whose signatures are checked."""

_CONF = beartype.BeartypeConf(is_pep484_tower=True)  # an int is a float


def check_signatures() -> None:
    """Check every call of a function of `CHECKED` that is imported from here on.

    Raises in the call:
        jaxtyping.TypeCheckError: for an argument or a result that is not what the signature says.
    """
    jaxtyping.install_import_hook(CHECKED, f"{__name__}.after_the_call")


def after_the_call(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the arrays of a call when it is over, so that a function's own refusal comes first.

    jaxtyping makes two checks, of the arguments before the call (it returns Any) and of all after
    it. Annotations without a shape are left alone.
    """
    hints = function.__annotations__
    function.__annotations__ = {
        name: hint if _has_shape(hint) else Any for name, hint in hints.items()
    }
    if hints.get("return") is Any or not any(map(_has_shape, hints.values())):
        return function
    return beartype.beartype(function, conf=_CONF)


def _has_shape(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(_has_shape, get_args(hint)))

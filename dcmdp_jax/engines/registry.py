"""The inference engines by name, and one that a user brings."""

import functools
import inspect

from dcmdp_jax.engines import engine_kind, http, local, vllm
from dcmdp_jax.errors import ArgumentError, UserError, shorten, suggestion
from dcmdp_jax.fields import declared
from dcmdp_jax.user_files import is_place, load_object

ENGINES: dict[str, engine_kind.EngineKind] = {
    "local": local.ENGINE,
    "vllm": vllm.ENGINE,
    "http": http.ENGINE,
}


@functools.cache
def find_engine(name: str) -> engine_kind.EngineKind:
    """The kind of an engine: built in, or of `package.module:NAME` or `path/to/file.py:NAME`.

    Raises:
        UserError: in one line, for another name, what can't be imported or is not an `EngineKind`,
            or has an attribute of another type than in the base class.
    """
    if name in ENGINES:
        return ENGINES[name]
    if not is_place(name):
        raise unknown_engine(name, tuple(ENGINES))
    try:
        loaded = load_object(name)
    except UserError as error:
        raise ArgumentError("engine", f"{error}") from error

    kind = loaded
    if inspect.isclass(loaded) and issubclass(loaded, engine_kind.EngineKind):
        kind = loaded()
    if not isinstance(kind, engine_kind.EngineKind):
        raise ArgumentError(
            "engine",
            f"{name} is {shorten(loaded)}, must be a dcmdp_jax.engines.engine_kind.EngineKind",
        )
    for attribute, default in vars(engine_kind.EngineKind).items():
        value = getattr(kind, attribute)
        if inspect.isfunction(default) and not callable(value):
            raise ArgumentError("engine", f"{name}: {attribute}={shorten(value)}, must be a method")
        if isinstance(default, tuple | bool) and type(value) is not type(default):
            type_name = "a tuple" if isinstance(default, tuple) else "True or False"
            raise ArgumentError(
                "engine", f"{name}: {attribute}={shorten(value)}, must be {type_name}"
            )

    try:
        declared(kind.settings)
    except (TypeError, KeyError, NameError) as error:
        raise ArgumentError(
            "engine",
            f"{name}: settings={shorten(kind.settings)}, must be a dataclass whose fields are "
            "declared with dcmdp_jax.fields.setting",
        ) from error
    return kind


def unknown_engine(name: str, allowed: tuple[str, ...]) -> UserError:
    """The error for an unknown engine."""
    servers = ""
    if "http" not in allowed:
        servers = "; http, a server of yours, is for `dcmdp probe` and `dcmdp evaluate` alone"
    return ArgumentError(
        "engine",
        f"got {shorten(name)}, allowed are {', '.join(allowed)}, module:NAME and path.py:NAME"
        f"{servers}{suggestion(name, allowed)}",
    )

"""A vLLM server that somebody else runs, and that holds weights of its own."""

from __future__ import annotations

import dataclasses

from dcmdp_jax.engines.kind import EngineArguments, EngineKind, later
from dcmdp_jax.engines.vllm_limits import TEMPERATURES
from dcmdp_jax.errors import UserError
from dcmdp_jax.fields import setting


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """The server of `dcmdp evaluate --engine=http`.

    Attributes:
        server: http(s)://HOST:PORT, or the path of a Unix socket.
        timeout_s: Longest wait for one completion: 32768 tokens at a few a second, and the server's queue.
    """

    server: str = setting("", free=True)
    timeout_s: float = setting(7200.0, unit="seconds", minimum=1, free=True)


def _check_settings(arguments: EngineArguments) -> None:
    if not arguments.settings.server:
        raise UserError("server: empty; give the engine's server, http(s)://HOST:PORT or a socket's path")


ENGINE = EngineKind(
    name="http",
    build=later("dcmdp_jax.engines.http.engine:build"),
    settings=HttpSettings,
    precisions=(),
    compute_dtypes=(),
    cache_dtypes=(),
    temperatures=TEMPERATURES,
    pushes=False,
    check_settings=_check_settings,
)

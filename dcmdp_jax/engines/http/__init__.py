"""A vLLM server that somebody else runs, and that holds weights of its own."""

import dataclasses
from typing import TYPE_CHECKING

from dcmdp_jax.engines.engine_kind import EngineArguments, EngineKind
from dcmdp_jax.engines.vllm_common import VLLM_TEMPERATURES
from dcmdp_jax.errors import ArgumentError
from dcmdp_jax.fields import setting
from dcmdp_jax.inputs import is_url

if TYPE_CHECKING:
    from dcmdp_jax.engines.protocol import Engine


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """The server of `dcmdp evaluate --config.rollout.engine=http`.

    Attributes:
        server: http(s)://HOST:PORT, or the path of a Unix socket.
        timeout_s: Longest wait for one completion: 32768 tokens at a few a second, and the server's
            queue.
    """

    server: str = setting("", free=True)
    timeout_s: float = setting(7200.0, unit="seconds", minimum=1, free=True)


class HttpKind(EngineKind):
    """A vLLM server, for evaluation and scoring."""

    name = "http"
    settings = HttpSettings
    precisions = ()
    compute_dtypes = ()
    cache_dtypes = ()
    temperatures = VLLM_TEMPERATURES
    takes_weights = False
    most_top_logprobs = 20

    def check(self, arguments: EngineArguments) -> None:
        server = arguments.settings.server
        if not server:
            raise ArgumentError(
                "server", "empty; give the engine's server, http(s)://HOST:PORT or a socket's path"
            )
        if server.startswith("http") and not is_url(server):
            raise ArgumentError(
                "server",
                f"got {server!r}, must be http://host:port (1 to 65535) or https://host",
            )

    def build(self, arguments: EngineArguments) -> "Engine":
        from dcmdp_jax.engines.http.engine import RemoteEngine

        return RemoteEngine(arguments)


ENGINE = HttpKind()

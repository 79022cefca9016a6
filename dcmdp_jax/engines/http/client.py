"""A vLLM server reached over HTTP: completions of token ids, many at a time, with time limits."""

import asyncio
import json
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import httpx

from dcmdp_jax.engines.protocol import EngineError
from dcmdp_jax.engines.sidecar.supervisor import Calls
from dcmdp_jax.engines.vllm_common import unsupported_version
from dcmdp_jax.errors import ArgumentError, UserError, one_line

T = TypeVar("T")
Json = dict[str, Any]
Read = Callable[[int, Json], T]
"""(number of the request, choice of its answer) -> what is wanted of it."""

_KEY_VARIABLE = "VLLM_API_KEY"
_INSPECTION_S = 30.0
_POLL_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
# All fields that shape the distribution: what is left out comes from the model's
# generation_config.json.
_NEUTRAL: Json = {
    "n": 1,
    "stream": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "watermarking": False,
    "ignore_eos": True,
    "add_special_tokens": False,
    "skip_special_tokens": False,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
}

# Errors of reading an answer that is not what was asked for.
_UNUSABLE = (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError)


class VllmHttpClient:
    """Requests to one server, whose model and context length were asked for at the start.

    No connection is held between calls. Requests run in a thread of their own while the caller does
    something else.

    Attributes:
        address: server address, as given.
        model: the name it serves the model under.
        max_model_len: tokens of a prompt with its completion.
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float,
        max_concurrent: int,
        retries: int,
    ) -> None:
        """Ask the server for its model and version. See `RemoteEngine` for arguments and errors."""
        self.address = address
        self._url, self._socket = _parsed_address(address)
        self._headers = _authorization(os.environ.get(_KEY_VARIABLE, ""))
        self.timeout_s = timeout_s
        self._max_concurrent = max_concurrent
        self._retries = retries
        # Reading the certificates takes 40 ms, which a new client would do for each call.
        self._tls = httpx.create_ssl_context()
        self.model, self.max_model_len = asyncio.run(self._inspect())

    def complete(
        self,
        kind: str,
        payloads: Sequence[Json],
        read: Read[T],
    ) -> Calls:
        """Request one completion for each payload, `max_concurrent` at a time.

        The first failure ends them all, with an EngineError in one line that names the request.
        Closed before its end, or interrupted, it cancels what is in flight, on the server too.

        Args:
            kind: begins the name of a request in errors; its number follows.
            payloads: fields of /v1/completions, with "prompt" a list of token ids; what is not
                named is neutral.
            read: (number, the answer's choice) -> what is wanted of it. Its ValueError, KeyError,
                TypeError and IndexError mean an answer that can't be used.

        Returns:
            One call, whose `values` are lists of what `read` returned, as answers come; its result
            is the list of all in the order of the payloads.
        """
        return Calls([lambda calls: asyncio.run(self._complete(kind, payloads, read, calls))])

    async def _complete(
        self,
        kind: str,
        payloads: Sequence[Json],
        read: Read[T],
        calls: Calls,
    ) -> list[T]:
        indices = iter(range(len(payloads)))
        results: dict[int, T] = {}

        async def work(client: httpx.AsyncClient) -> None:
            for index in indices:
                name = f"{kind} {index}"
                body = {"model": self.model, **_NEUTRAL, **payloads[index]}
                response = await self._request(client, name, "/v1/completions", body)
                answer = _json(response, name)
                try:
                    (choice,) = answer["choices"]
                    if choice["prompt_token_ids"] != body["prompt"]:
                        raise ValueError("its prompt_token_ids are not those sent")
                    result = read(index, choice)
                except _UNUSABLE as error:
                    reason = one_line(error, 300)
                    if isinstance(error, KeyError):
                        reason = f"no {error} in it"
                    raise EngineError(
                        f"{name}: the answer of {self.address} can't be used: {reason}"
                    ) from None
                results[index] = result
                calls.put([result])

        async with self._client() as client:
            count = min(self._max_concurrent, len(payloads))
            workers = [asyncio.create_task(work(client)) for _ in range(count)]
            running = set(workers)
            try:
                while running and not calls.stopped.is_set():
                    done, running = await asyncio.wait(
                        running, timeout=_POLL_S, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for worker in done:
                        worker.result()
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return [result for _, result in sorted(results.items())]

    async def _inspect(self) -> tuple[str, int]:
        """The model's name and context length, of a healthy server of a version we know."""
        async with self._client() as client:
            await self._request(client, "health", "/health")
            response = await self._request(client, "version", "/version")
            answer = _json(response, "version")
            response = await self._request(client, "models", "/v1/models")
            models = _json(response, "models")

        version = ""
        if isinstance(answer, dict):
            version = str(answer.get("version", ""))
        supported = unsupported_version(version)
        if supported:
            raise ArgumentError(
                "server",
                f"{self.address} runs vLLM {one_line(version, 300) or 'of no version'}; its "
                f"answers are known for {supported}: start one of those",
            )

        try:
            # Adapters are listed too; their parent is the model.
            card = next(card for card in models["data"] if not card.get("parent"))
            return str(card["id"]), int(card["max_model_len"])
        except (KeyError, TypeError, AttributeError, ValueError, StopIteration):
            raise EngineError(
                f"server: {self.address} names no model with a max_model_len at /v1/models"
            ) from None

    def _client(self) -> httpx.AsyncClient:
        # `_request` keeps the time, and the number of workers bounds that of connections.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._max_concurrent)
        transport = None
        if self._socket is not None:
            transport = httpx.AsyncHTTPTransport(uds=self._socket, verify=self._tls, limits=limits)
        return httpx.AsyncClient(
            base_url=self._url,
            headers=self._headers,
            transport=transport,
            timeout=None,
            verify=self._tls,
            limits=limits,
        )

    async def _request(
        self,
        client: httpx.AsyncClient,
        name: str,
        path: str,
        body: Json | None = None,
    ) -> httpx.Response:
        """GET, or POST of a body; retried with growing pauses after errors that may pass."""
        trouble = ""
        method = "POST"
        limit_s = self.timeout_s
        if body is None:
            method = "GET"
            limit_s = min(self.timeout_s, _INSPECTION_S)
        for attempt in range(self._retries + 1):
            if attempt:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), _LONGEST_PAUSE_S))

            try:
                async with asyncio.timeout(limit_s):
                    response = await client.request(method, path, json=body)
            except TimeoutError:
                trouble = f"no answer within {limit_s:g} s (timeout_s={self.timeout_s:g})"
            except (httpx.RequestError, OSError) as error:
                trouble = f"{type(error).__name__} {one_line(error, 300)}".strip()
            else:
                if response.status_code == 200:
                    return response
                trouble = f"HTTP {response.status_code}: {_message(response)}"
                if response.status_code < 500:
                    hint = ""
                    if response.status_code == 401:
                        hint = f"; set {_KEY_VARIABLE} to the server's key"
                    raise EngineError(
                        f"{name}: {self.address} refused the request, {trouble}{hint}"
                    )

        times = "1 attempt"
        if self._retries:
            times = f"{self._retries + 1} attempts"
        raise EngineError(
            f"{name}: {trouble}, after {times}; is the vLLM server at {self.address} up and well?"
        )


def _parsed_address(address: str) -> tuple[str, str | None]:
    """(base URL, path of the Unix socket or None)."""
    if re.match("https?://", address):
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL as error:
            raise ArgumentError("server", f"got {address!r}, not a URL: {error}") from None
        if url.userinfo:
            raise ArgumentError(
                "server", f"the URL must not hold a user or a password; set {_KEY_VARIABLE} instead"
            )
        if not url.host or url.query or url.fragment:
            raise ArgumentError(
                "server", f"got {address!r}, must be http://host:port or https://host"
            )
        return address.rstrip("/").removesuffix("/v1"), None

    path = address.removeprefix("unix:")
    if not path.startswith("/"):
        raise ArgumentError(
            "server",
            f"got {address!r}, must be http://host:port, https://host or unix:/path/of/socket",
        )
    if not (os.path.exists(path) and stat.S_ISSOCK(Path(path).stat().st_mode)):
        raise ArgumentError(
            "server",
            f"{path} is no Unix socket; start vLLM with --uds {path}, or name the right one",
        )
    return "http://vllm", path


def _authorization(key: str) -> dict[str, str]:
    key = key.strip()
    if not re.fullmatch("[!-~]*", key):
        # Refused here, because the HTTP library's own error would show the key.
        raise UserError(
            f"{_KEY_VARIABLE}: holds a character that is not printable ASCII; set the key alone"
        )
    if not key:
        return {}
    return {"Authorization": f"Bearer {key}"}


def _json(response: httpx.Response, name: str) -> Any:
    try:
        return json.loads(response.content)
    except ValueError:
        raise EngineError(
            f"{name}: the server's answer is not JSON: {one_line(response.text, 300)!r}"
        ) from None


def _message(response: httpx.Response) -> str:
    """The server's own words."""
    try:
        return one_line(json.loads(response.content)["error"]["message"], 300)
    except (ValueError, KeyError, TypeError):
        return one_line(response.text, 300) or response.reason_phrase

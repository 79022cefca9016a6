"""Frames between trainer and sidecar: a msgpack header and raw arrays behind it.

    frame  = magic "DCM1" | header bytes, uint32 | body bytes, uint64 | header | body       little-endian
    header = msgpack map with "op"; "arrays" = [[name, dtype, shape], ...] lists the arrays of the body, in order

No pickle. Weights do not travel in frames, see `segments`. Both sides import this module, so it knows numpy and msgpack
only.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgpack
import numpy as np

PROTOCOL = 7
"""Changes with any change of frames or of what they say; both sides must have the same."""

_MAGIC = b"DCM1"
_PREFIX = struct.Struct("<4sIQ")
_DTYPES = ("uint8", "int16", "int32", "int64", "uint64", "float32")
_MAX_DIMENSIONS = 4


class WireError(ConnectionError):
    """The connection is closed: the other side went away, or sent something else than a frame."""


class Message(NamedTuple):
    """A received frame.

    Attributes:
        header: its fields, "op" among them.
        arrays: name -> array.
    """

    header: dict[str, Any]
    arrays: dict[str, np.ndarray]


class Connection:
    """One end of a Unix socket pair. After any WireError or TimeoutError it is closed: frames have no way to resume."""

    def __init__(self, sock: socket.socket, *, max_header: int = 1 << 24, max_body: int = 1 << 32) -> None:
        """Take over the socket.

        Args:
            sock: a connected Unix stream socket.
            max_header, max_body: bytes; a frame that announces more is refused before anything is allocated.
        """
        self._socket = sock
        self._max_header, self._max_body = max_header, max_body

    def fileno(self) -> int:
        """The descriptor, to be polled; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()

    def send(
        self,
        op: str,
        header: Mapping[str, Any] | None = None,
        arrays: Mapping[str, np.ndarray] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send one frame.

        Args:
            op: name of the request or answer.
            header: further fields: numbers, strings, lists, maps of those.
            arrays: uint8, int16, int32, int64, uint64 or float32, of four dimensions at most.
            timeout_s: limit for the whole frame; None waits without a limit.

        Raises:
            ValueError: for an array that does not travel, or a frame over the limits; nothing is sent.
            TimeoutError: if the other side does not take it in time.
            WireError: if the other side is gone.
        """
        held = {name: np.asarray(value, order="C") for name, value in (arrays or {}).items()}
        fields: dict[str, Any] = {**(header or {}), "op": op}
        fields["arrays"] = [[name, value.dtype.name, list(value.shape)] for name, value in held.items()]
        for name, value in held.items():
            # Not the name alone: big-endian int32 is called int32 too.
            if value.dtype not in _DTYPES or value.ndim > _MAX_DIMENSIONS:
                raise ValueError(
                    f"frame {op!r}: array {name} is {value.dtype} of {value.ndim} dimensions, allowed are "
                    f"{', '.join(_DTYPES)} of {_MAX_DIMENSIONS} at most"
                )
        size = sum(value.nbytes for value in held.values())
        packed = msgpack.packb(fields)
        if len(packed) > self._max_header or size > self._max_body:
            raise ValueError(
                f"frame {op!r}: header of {len(packed)} and arrays of {size} bytes, the limits are {self._max_header} "
                f"and {self._max_body}"
            )
        deadline = _Deadline(timeout_s)
        with self._closing_on_failure(f"sending {op!r}", timeout_s):
            self._send_all(memoryview(_PREFIX.pack(_MAGIC, len(packed), size) + packed), deadline)
            for value in held.values():
                self._send_all(memoryview(value.reshape(-1)).cast("B"), deadline)

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Wait for one frame.

        Raises:
            TimeoutError: if it is not there, whole, in time.
            WireError: if the other side is gone, or sent something else than a frame within the limits.
        """
        deadline = _Deadline(timeout_s)
        with self._closing_on_failure("waiting for a frame", timeout_s):
            magic, header_bytes, body_bytes = _PREFIX.unpack(self._receive_all(_PREFIX.size, deadline))
            if magic != _MAGIC:
                raise WireError(f"not a frame: it begins with {magic!r}")
            if header_bytes > self._max_header or body_bytes > self._max_body:
                raise WireError(
                    f"frame too large: header of {header_bytes} and body of {body_bytes} bytes, the limits are "
                    f"{self._max_header} and {self._max_body}"
                )
            header = _header(bytes(self._receive_all(header_bytes, deadline)))
            specs, size = _specs(header.pop("arrays"))
            if size != body_bytes:
                raise WireError(f"malformed frame: arrays of {size} bytes in a body of {body_bytes}")
            return Message(header, _arrays(self._receive_all(body_bytes, deadline), specs))

    def _send_all(self, data: memoryview, deadline: _Deadline) -> None:
        while data.nbytes:
            self._socket.settimeout(deadline.left())
            data = data[self._socket.send(data) :]

    def _receive_all(self, count: int, deadline: _Deadline) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest.nbytes:
            self._socket.settimeout(deadline.left())
            if not (received := self._socket.recv_into(rest)):
                raise WireError("the other side closed the connection")
            rest = rest[received:]
        return data

    @contextlib.contextmanager
    def _closing_on_failure(self, doing: str, timeout_s: float | None) -> Any:
        try:
            yield
        except TimeoutError:
            self.close()
            raise TimeoutError(f"{doing}: nothing for {timeout_s:g} s") from None
        except WireError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise WireError(f"{doing}: {error.strerror or error}") from error


class _Deadline:
    """Seconds left of a limit, as a socket wants them."""

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds

    def left(self) -> float | None:
        if self._end is None:
            return None
        if (left := self._end - time.monotonic()) <= 0:
            raise TimeoutError
        return left


def _header(data: bytes) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(data)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"malformed frame: the header is not msgpack ({str(error) or type(error).__name__})") from error
    if not isinstance(header, dict) or not isinstance(header.get("op"), str) or "arrays" not in header:
        raise WireError("malformed frame: the header is no map with op and arrays")
    return header


def _specs(listed: Any) -> tuple[list[tuple[str, np.dtype, tuple[int, ...]]], int]:
    """The arrays a header announces, each one that numpy can make, and their bytes together."""
    specs, total = [], 0
    for entry in listed if isinstance(listed, list) else [None]:
        match entry:
            case [str() as name, str() as dtype, [*shape]] if (
                dtype in _DTYPES
                and len(shape) <= _MAX_DIMENSIONS
                and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in shape)
                # An empty array has other dimensions too, and numpy multiplies those.
                and math.prod(n for n in shape if n) * np.dtype(dtype).itemsize < 2**63
            ):
                specs.append((name, np.dtype(dtype), tuple(shape)))
                total += math.prod(shape) * np.dtype(dtype).itemsize
            case _:
                # Not str: it recurses as deep as the entry is nested.
                raise WireError(f"malformed frame: array {reprlib.repr(entry)} is no [name, dtype, shape]")
    return specs, total


def _arrays(buffer: Any, specs: list[tuple[str, np.dtype, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    arrays, start = {}, 0
    for name, dtype, shape in specs:
        count = math.prod(shape)
        arrays[name] = np.frombuffer(buffer, dtype, count=count, offset=start).reshape(shape)
        start += count * dtype.itemsize
    return arrays

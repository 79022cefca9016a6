"""Frames between trainer and sidecar: a length and a msgpack map.

    frame = magic "DCM2" | bytes, uint64 | map       little-endian
    map   = "op", further fields, and "arrays": name -> [dtype, shape, bytes]

No pickle. Weights do not travel in frames, see `segments`. Both sides import this module, so it
knows numpy and msgpack only.
"""

import contextlib
import dataclasses
import select
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy as np

PROTOCOL = 9
"""Changes with any change of frames or of what they say; both sides must have the same."""

# Fields of a frame by name: numbers, strings, lists, maps of those. And its arrays.
Fields = dict[str, Any]
Arrays = dict[str, np.ndarray]

_MAGIC = b"DCM2"
_PREFIX = struct.Struct("<4sQ")
# A frame that announces more is refused before anything is allocated.
_MAX_BYTES = 1 << 32
_DTYPES = ("uint8", "int16", "int32", "int64", "uint64", "float32")


class WireError(ConnectionError):
    """The connection is closed: the other side went away, or sent something else than a frame."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Message:
    """A received frame.

    Attributes:
        header: its fields, "op" among them.
        arrays: name -> array.
    """

    header: Fields
    arrays: Arrays


class Connection:
    """One end of a Unix socket pair. After any WireError or TimeoutError it is closed.

    Frames have no way to resume.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over a connected Unix stream socket."""
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._socket.fileno()

    def wait(self, seconds: float) -> bool:
        """Whether there is something to receive, or the connection's end, within so long."""
        poll = select.poll()
        poll.register(self, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def close(self) -> None:
        """Safe to call twice."""
        self._socket.close()

    def send(
        self,
        op: str,
        header: Fields | None = None,
        arrays: Arrays | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Send one frame.

        Args:
            op: name of the request or answer.
            header: further fields.
            arrays: uint8, int16, int32, int64, uint64 or float32.
            timeout_s: limit for the whole frame; None waits without a limit.

        Raises:
            ValueError: for an array that does not travel, or a frame over the limit; nothing is
                sent.
            TimeoutError: if the other side does not take it in time.
            WireError: if the other side is gone.
        """
        array_fields = {}
        for name, value in (arrays or {}).items():
            # Not the name alone: big-endian int32 is called int32 too.
            if value.dtype not in _DTYPES:
                raise ValueError(
                    f"frame {op!r}: array {name} is {value.dtype}, allowed are {', '.join(_DTYPES)}"
                )
            array_fields[name] = value.dtype.name, value.shape, value.tobytes()
        packed = msgpack.packb({**(header or {}), "op": op, "arrays": array_fields})
        if len(packed) > _MAX_BYTES:
            raise ValueError(f"frame {op!r}: {len(packed)} bytes, the limit is {_MAX_BYTES}")

        with self._closing_on_failure(f"sending {op!r}", timeout_s):
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_PREFIX.pack(_MAGIC, len(packed)) + packed)

    def receive(self, *, timeout_s: float | None = None) -> Message:
        """Wait for one frame.

        Raises:
            TimeoutError: if it is not there, whole, in time.
            WireError: if the other side is gone, or sent something else than a frame within the
                limit.
        """
        with self._closing_on_failure("waiting for a frame", timeout_s) as end:
            magic, size = _PREFIX.unpack(self._receive_all(_PREFIX.size, end))
            if magic != _MAGIC:
                raise WireError(f"not a frame: it begins with {magic!r}")
            if size > _MAX_BYTES:
                raise WireError(f"frame too large: {size} bytes, the limit is {_MAX_BYTES}")
            return _message(self._receive_all(size, end))

    def _receive_all(self, count: int, end: float | None) -> bytearray:
        data = bytearray(count)
        unread = memoryview(data)
        while unread.nbytes:
            self._socket.settimeout(_seconds_until(end))
            num_received = self._socket.recv_into(unread)
            if not num_received:
                raise WireError("the other side closed the connection")
            unread = unread[num_received:]
        return data

    @contextlib.contextmanager
    def _closing_on_failure(self, doing: str, timeout_s: float | None) -> Iterator[float | None]:
        """Give the time at which the limit is over."""
        try:
            yield None if timeout_s is None else time.monotonic() + timeout_s
        except OSError as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise TimeoutError(f"{doing}: nothing for {timeout_s:g} s") from None
            if isinstance(error, WireError):
                raise
            raise WireError(f"{doing}: {error.strerror or error}") from error


def _seconds_until(end: float | None) -> float | None:
    """Seconds until `end`, as a socket takes them; None without a limit."""
    if end is None:
        return None
    seconds = end - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def _message(data: bytearray) -> Message:
    try:
        header = msgpack.unpackb(data)
        arrays = {}
        for name, (dtype, shape, content) in header.pop("arrays").items():
            if dtype not in _DTYPES:
                raise ValueError("an array of another dtype")
            arrays[name] = np.frombuffer(content, dtype).reshape(shape).copy()
        if not isinstance(header["op"], str):
            raise TypeError("op is no text")
    except Exception as error:  # of msgpack and NumPy, whatever the bytes are
        raise WireError(f"malformed frame: {error!r:.200}") from error
    return Message(header=header, arrays=arrays)

"""Numbered messages over a stream socket, between the trainer, a worker process and the child that makes its calls.

A message is 16 bytes, its number and its length, and then JSON. The other end may run a user's code, which can write to
any descriptor: every read is bounded in time and size, and what is no message is told apart.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_HEADER = struct.Struct(">QQ")
_MAX_BYTES = 1 << 32
_CHUNK_BYTES = 1 << 20


class BadMessage(Exception):
    """The bytes on the socket are no message of this protocol."""


class MessageSocket:
    """One end of a connection. Closes the socket with itself.

    Args:
        connection: a stream socket in blocking mode, owned by this object.
        max_bytes: longest message to accept.
    """

    def __init__(self, connection: socket.socket, *, max_bytes: int = _MAX_BYTES) -> None:
        self._socket, self._max_bytes = connection, max_bytes
        self._buffer = bytearray()

    def __enter__(self) -> MessageSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket. Harmless when called again."""
        self._socket.close()

    def send(self, number: int, content: bytes, timeout_s: float | None = None) -> None:
        """Send JSON under a number.

        Raises:
            TimeoutError: if the other end does not take it in time.
            OSError: if the other end is closed.
        """
        self._socket.settimeout(timeout_s)
        self._socket.sendall(_HEADER.pack(number, len(content)))
        self._socket.sendall(content)

    def receive(self, timeout_s: float | None = None) -> tuple[int, Any]:
        """Wait for the next message; its number and content.

        Raises:
            TimeoutError: if it is not there in time, all of it.
            EOFError: if the other end is closed.
            BadMessage: if the bytes are no message.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while (message := self.read(None if end is None else max(end - time.monotonic(), 1e-3))) is None:
            if end is not None and time.monotonic() > end:
                raise TimeoutError
        return message

    def read(self, timeout_s: float | None = None, *, number: int | None = None) -> tuple[int, Any] | None:
        """Read what is there once; the next message, or None while it is incomplete. Raises as `receive`.

        Args:
            timeout_s: longest wait.
            number: the only number to accept, as soon as it is there.
        """
        if (message := self._complete(number)) is not None:
            return message
        self._socket.settimeout(timeout_s)
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            raise EOFError
        self._buffer += chunk
        return self._complete(number)

    def _complete(self, wanted: int | None) -> tuple[int, Any] | None:
        if len(self._buffer) < _HEADER.size:
            return None
        number, length = _HEADER.unpack_from(self._buffer)
        if length > self._max_bytes or wanted not in (None, number):
            raise BadMessage(f"message {number} of {length} bytes")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return None
        content = bytes(self._buffer[_HEADER.size : end])
        del self._buffer[:end]
        try:
            return number, json.loads(content)
        except ValueError as error:
            raise BadMessage("bytes that are no JSON") from error

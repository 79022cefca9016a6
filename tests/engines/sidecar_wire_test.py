"""Frames over real socket pairs: what arrives, and what becomes of a connection whose other end sends no frame."""

import contextlib
import math
import os
import socket
import struct
import threading
import time
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dcmdp_jax.engines.sidecar.wire import Connection, WireError
from tests.support.refusals import refused
from tests.support.waiting import HANGS_S

_DTYPES = ("uint8", "int16", "int32", "int64", "uint64", "float32")
_MIB = 1 << 20


@contextlib.contextmanager
def _pair(**limits):
    left, right = (Connection(sock, **limits) for sock in socket.socketpair())
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextlib.contextmanager
def _raw(**limits):
    """(socket, connection): a peer that may send anything."""
    ours, theirs = socket.socketpair()
    connection = Connection(theirs, **limits)
    try:
        yield ours, connection
    finally:
        ours.close()
        connection.close()


def _descriptors():
    """Number of descriptors this process has open, including the one that lists them."""
    return len(os.listdir("/proc/self/fd"))


def _frame(header, body=b"", *, magic=b"DCM1", body_bytes=None):
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    return struct.pack("<4sIQ", magic, len(packed), len(body) if body_bytes is None else body_bytes) + packed + body


def _refusal(data, kind=WireError, timeout_s=HANGS_S, **limits):
    """The one line that `data` gets; the connection is closed then."""
    with _raw(**limits) as (peer, connection):
        peer.sendall(data)
        before = _descriptors()
        with pytest.raises(kind) as raised:
            connection.receive(timeout_s=timeout_s)
        assert connection.fileno() == -1
        assert _descriptors() == before - 1
        with pytest.raises(WireError):
            connection.receive(timeout_s=timeout_s)
        line = str(raised.value)
        assert line and "\n" not in line and len(line) < 300
        return line


def _strided(draw, array):
    """The array, or a view of one in memory of another order, or with gaps."""
    match draw(st.integers(0, 2)):
        case 0:
            return np.asfortranarray(array)
        case 1 if array.ndim:
            return np.repeat(array, 2, axis=-1)[..., ::2]
    return array


@st.composite
def _arrays(draw):
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
    one = st.sampled_from(_DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
    held = draw(st.dictionaries(st.text(max_size=8), one, max_size=5))
    return {name: _strided(draw, array) for name, array in held.items()}


_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text(), st.binary()
)
_FIELDS = st.dictionaries(
    st.text().filter(lambda name: name not in ("op", "arrays")),
    st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    ),
    max_size=4,
)


@settings(deadline=None)
@given(op=st.text(), header=_FIELDS, arrays=_arrays())
@example("push", {}, {"scalar": np.array(7, np.int32)})  # np.ascontiguousarray would make it [1]
@example("push", {}, {"none": np.empty((0, 3), np.int64)})
def test_what_is_sent_arrives(op, header, arrays):
    """Fields, names, dtypes, shapes and bits, whatever the arrays' order in memory."""
    with _pair() as (left, right):
        left.send(op, header, arrays, timeout_s=HANGS_S)
        message = right.receive(timeout_s=HANGS_S)
    assert message.header == {**header, "op": op}
    assert list(message.arrays) == list(arrays)
    for name, array in arrays.items():
        arrived = message.arrays[name]
        assert arrived.dtype == array.dtype and arrived.shape == array.shape
        assert arrived.tobytes() == array.tobytes()  # bits: NaN too


def test_large_frames_arrive_whole():
    """Much more than a socket's buffer: they go and come in many pieces."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 256, (3, _MIB), np.uint8).view(name).copy() for name in _DTYPES}
    fields = {"text": "x" * _MIB}
    with _pair() as (left, right):
        sender = threading.Thread(target=left.send, args=("big", fields, arrays), kwargs={"timeout_s": HANGS_S})
        sender.start()
        message = right.receive(timeout_s=HANGS_S)
        sender.join()
    assert message.header == {"op": "big", **fields}
    assert {name: array.dtype.name for name, array in message.arrays.items()} == {name: name for name in _DTYPES}
    for name, array in arrays.items():
        assert message.arrays[name].shape == (3, _MIB // array.itemsize)
        assert message.arrays[name].tobytes() == array.tobytes()


def test_frames_that_wait_keep_their_own_arrays():
    with _pair() as (left, right):
        for number in range(4):
            left.send("frame", {"number": number}, {"a": np.full(5, number, np.int32)}, timeout_s=HANGS_S)
        for number in range(4):
            message = right.receive(timeout_s=HANGS_S)
            assert message.header == {"op": "frame", "number": number}
            assert message.arrays["a"].tolist() == [number] * 5


# {"n": 7, "op": "push", "arrays": [["a", "int32", [2]], ["b", "uint8", []]]} by msgpack's specification: 0x80 | n is a
# map of n, 0x90 | n a list, 0xa0 | n a string of n bytes; small numbers are themselves.
# 1 + 3 + 3+5 + 7+1 + 1+2+6+2 + 1+2+6+1 = 41 bytes.
_LISTED = b"\xa6arrays\x92" + b"\x93\xa1a\xa5int32\x91\x02" + b"\x93\xa1b\xa5uint8\x90"
_HAND = b"\x83" + b"\xa1n\x07" + b"\xa2op\xa4push" + _LISTED
# int32 1 and -2, uint8 255.
_HAND_BODY = b"\x01\0\0\0" + b"\xfe\xff\xff\xff" + b"\xff"
_HAND_ARRAYS = {"a": np.array([1, -2], np.int32), "b": np.array(255, np.uint8)}


def test_a_frame_byte_for_byte():
    """The format is fixed: another PROTOCOL if this has to change."""
    expected = b"DCM1" + b"\x29\0\0\0" + b"\x09\0\0\0\0\0\0\0" + _HAND + _HAND_BODY
    assert len(_HAND) == 0x29
    with _raw() as (peer, connection):
        connection.send("push", {"n": 7}, _HAND_ARRAYS, timeout_s=HANGS_S)
        assert peer.recv(1000) == expected
        peer.sendall(expected)
        header, arrays = connection.receive(timeout_s=HANGS_S)
    assert header == {"op": "push", "n": 7}
    assert arrays["a"].tolist() == [1, -2] and arrays["b"].tolist() == 255


def test_a_frame_in_single_bytes():
    """The socket may give as little as a byte at a time."""
    with _raw() as (peer, connection):
        for value in _frame(_HAND, _HAND_BODY):
            peer.sendall(bytes([value]))
        arrays = connection.receive(timeout_s=HANGS_S).arrays
    assert arrays["a"].tolist() == [1, -2] and arrays["b"].tolist() == 255


def _with(*arrays, **fields):
    return {"op": "x", "arrays": list(arrays), **fields}


_NO_ARRAY = "is no [name, dtype, shape]"
_NO_MAP = "malformed frame: the header is no map with op and arrays"
_NOT_MSGPACK = "malformed frame: the header is not msgpack"
_MALFORMED = {
    "another magic": (_frame(_with(), magic=b"DCM2"), "not a frame: it begins with b'DCM2'"),
    "text": (b"HTTP/1.1 200 OK\r\n\r\n", "not a frame: it begins with b'HTTP'"),
    "a large header": (struct.pack("<4sIQ", b"DCM1", (1 << 24) + 1, 0), "header of 16777217 and body of 0 bytes"),
    "no header": (_frame(b""), _NOT_MSGPACK),
    "not msgpack": (_frame(b"\xc1"), _NOT_MSGPACK),
    "msgpack with more behind it": (_frame(msgpack.packb(_with()) + b"\x01"), _NOT_MSGPACK),
    "half of a map": (_frame(msgpack.packb(_with())[:-1]), _NOT_MSGPACK),
    "text that is not UTF-8": (_frame(b"\x81\xa1\xff\x01"), _NOT_MSGPACK),
    "keys that are lists": (_frame(b"\x81\x90\x01"), _NOT_MSGPACK),
    "nested beyond msgpack": (_frame(b"\x91" * 5000), _NOT_MSGPACK),
    "a list": (_frame([1, 2]), _NO_MAP),
    "a number": (_frame(7), _NO_MAP),
    "no op": (_frame({"arrays": []}), _NO_MAP),
    "op is a number": (_frame({"op": 1, "arrays": []}), _NO_MAP),
    "op is bytes": (_frame({"op": b"x", "arrays": []}), _NO_MAP),
    "no arrays": (_frame({"op": "x"}), _NO_MAP),
    "arrays is nothing": (_frame({"op": "x", "arrays": None}), _NO_ARRAY),
    "arrays is a map": (_frame({"op": "x", "arrays": {}}), _NO_ARRAY),
    "an array is text": (_frame(_with("a\nb")), "array 'a\\nb' " + _NO_ARRAY),
    "an array is a long text": (_frame(_with("a" * 10_000)), _NO_ARRAY),
    "an array is too short": (_frame(_with(["a", "uint8"])), _NO_ARRAY),
    "an array is too long": (_frame(_with(["a", "uint8", [0], 0])), _NO_ARRAY),
    # Within msgpack's limit, beyond what str() can show.
    "an array is nested deep": (_frame(b"\x82\xa2op\xa1x\xa6arrays" + b"\x91" * 1000 + b"\x00"), _NO_ARRAY),
    "a name is a number": (_frame(_with([1, "uint8", [0]])), _NO_ARRAY),
    "float64": (_frame(_with(["a", "float64", [1]]), bytes(8)), "array ['a', 'float64', [1]] " + _NO_ARRAY),
    "object": (_frame(_with(["a", "object", [1]]), bytes(8)), _NO_ARRAY),
    "big-endian": (_frame(_with(["a", ">i4", [1]]), bytes(4)), _NO_ARRAY),
    "a dtype is a number": (_frame(_with(["a", 0, [1]]), bytes(4)), _NO_ARRAY),
    "five dimensions": (_frame(_with(["a", "uint8", [1] * 5]), bytes(1)), _NO_ARRAY),
    "shape is a number": (_frame(_with(["a", "uint8", 4]), bytes(4)), _NO_ARRAY),
    "a negative dimension": (_frame(_with(["a", "uint8", [-1]])), _NO_ARRAY),
    "two negative dimensions": (_frame(_with(["a", "uint8", [-2, -2]]), bytes(4)), _NO_ARRAY),
    "a dimension is true": (_frame(_with(["a", "uint8", [True]]), bytes(1)), _NO_ARRAY),
    "a dimension is 1.0": (_frame(_with(["a", "uint8", [1.0]]), bytes(1)), _NO_ARRAY),
    # 2^62 x 2^62 x 4 bytes is 0 in 64 bits, as is the body.
    "dimensions that overflow": (_frame(_with(["a", "int32", [2**62, 2**62]])), _NO_ARRAY),
    "one dimension that overflows": (_frame(_with(["a", "int32", [2**62]])), _NO_ARRAY),
    # No bytes, but no array of numpy's either.
    "overflow beside a 0": (_frame(_with(["a", "int32", [2**62, 2**62, 0]])), _NO_ARRAY),
    "more than an int64 beside a 0": (_frame(_with(["a", "uint8", [0, 2**64 - 1]])), _NO_ARRAY),
    "arrays that overflow together": (
        _frame(_with(*[["a", "uint8", [2**62]]] * 4)),
        f"arrays of {2**64} bytes in a body of 0",
    ),
    "a byte missing": (_frame(_with(["a", "uint8", [4]]), bytes(3)), "arrays of 4 bytes in a body of 3"),
    "a byte more": (_frame(_with(["a", "uint8", [4]]), bytes(5)), "arrays of 4 bytes in a body of 5"),
    "a body without arrays": (_frame(_with(), bytes(1)), "arrays of 0 bytes in a body of 1"),
}


@pytest.mark.parametrize("case", _MALFORMED)
def test_what_is_no_frame_closes_the_connection(case):
    """In one line that says what was wrong; reading on would take some other bytes for a frame."""
    data, line = _MALFORMED[case]
    assert line in _refusal(data)


def test_a_body_over_the_limit_is_refused_before_memory_is_taken():
    """Only the 16 bytes that announce it are there; waiting for more would end in TimeoutError."""
    tracemalloc.start()
    try:
        line = _refusal(struct.pack("<4sIQ", b"DCM1", 10, 2**40))
        assert f"header of 10 and body of {2**40} bytes, the limits are {2**24} and {2**32}" in line
        assert _refusal(struct.pack("<4sIQ", b"DCM1", 2**32 - 1, 0)).startswith("frame too large")
        # Within the limits, but of arrays that don't fill it.
        assert "in a body of 4294967296" in _refusal(_frame(_with(), body_bytes=2**32))
        assert tracemalloc.get_traced_memory()[1] < 8 * _MIB
    finally:
        tracemalloc.stop()


def test_the_limits_themselves_are_allowed():
    small = _with(["a", "uint8", [64]])
    size = len(msgpack.packb(small))
    with _raw(max_header=size, max_body=64) as (peer, connection):
        peer.sendall(_frame(small, bytes(64)))
        assert connection.receive(timeout_s=HANGS_S).arrays["a"].shape == (64,)
    assert "frame too large" in _refusal(_frame(small, bytes(64)), max_header=size - 1, max_body=64)
    assert "frame too large" in _refusal(_frame(small, bytes(64)), max_header=size, max_body=63)


def test_a_frame_cut_short_is_no_frame():
    """At every byte: the other side died while it was sending."""
    whole = _frame(_HAND, _HAND_BODY)
    for cut in range(len(whole)):
        with _raw() as (peer, connection):
            peer.sendall(whole[:cut])
            peer.close()
            with pytest.raises(WireError, match="^the other side closed the connection$"):
                connection.receive(timeout_s=HANGS_S)
            assert connection.fileno() == -1


def test_sending_to_a_peer_that_is_gone():
    for data in (b"", b"unread"):
        with _raw() as (peer, connection):
            connection.send("x", timeout_s=HANGS_S)
            peer.sendall(data)
            peer.close()
            with pytest.raises(WireError, match="^sending 'y': (Broken pipe|Connection reset by peer)$"):
                connection.send("y", timeout_s=HANGS_S)
            assert connection.fileno() == -1
            # Closed for good, and closing it once more is nothing.
            connection.close()
            with pytest.raises(WireError, match="^sending 'z': Bad file descriptor$"):
                connection.send("z", timeout_s=HANGS_S)


@pytest.mark.parametrize("cut", [0, 1, 15, 16, 20, 57, 65])
def test_a_frame_that_does_not_come_is_waited_for_so_long(cut):
    """Nothing, half of the prefix, of the header, of the body: a frame can't be resumed, so the connection is over."""
    whole = _frame(_HAND, _HAND_BODY)
    assert len(whole) == 66
    assert _refusal(whole[:cut], kind=TimeoutError, timeout_s=0.05) == "waiting for a frame: nothing for 0.05 s"


def test_a_peer_that_dribbles_is_not_waited_for_longer():
    """The limit is for the whole frame; restarted at each byte, it would wait minutes for this header."""
    with _raw() as (peer, connection):

        def dribble():
            # Until the other side closes the connection.
            with contextlib.suppress(OSError):
                for value in struct.pack("<4sIQ", b"DCM1", 10_000, 0) + bytes(10_000):
                    peer.sendall(bytes([value]))
                    time.sleep(0.03)

        thread = threading.Thread(target=dribble)
        thread.start()
        with pytest.raises(TimeoutError):
            connection.receive(timeout_s=0.2)
        assert connection.fileno() == -1
        thread.join()


def test_a_peer_that_does_not_read_is_waited_for_so_long():
    before = _descriptors()
    for arguments in ({"arrays": {"a": np.zeros(8 * _MIB, np.uint8)}}, {"header": {"text": "x" * 8 * _MIB}}):
        with _raw() as (_, connection):
            with pytest.raises(TimeoutError, match=r"^sending 'big': nothing for 0\.2 s$"):
                connection.send("big", **arguments, timeout_s=0.2)
            assert connection.fileno() == -1
    assert _descriptors() == before


_REFUSED = {
    "float64": ({"a": np.zeros(3)}, "frame 'x': array a is float64 of 1 dimensions, allowed are uint8, int16, int32"),
    "bool": ({"fine": np.zeros(3, np.int32), "b": np.zeros(3, bool)}, "array b is bool"),
    "objects": ({"a": np.array([None])}, "array a is object"),
    # numpy calls its dtype "int32"; 1 would arrive as 2^24.
    "big-endian": ({"a": np.array([1], ">i4")}, "array a is >i4"),
    "five dimensions": ({"a": np.zeros((1,) * 5, np.int32)}, "array a is int32 of 5 dimensions"),
    # 1 + 3+2 + 7+1 + 1+2+6+1+2 = 26 bytes of header, 129 being two.
    "a large body": ({"a": np.zeros(129, np.uint8)}, "header of 26 and arrays of 129 bytes, the limits are 64 and 128"),
    "arrays large together": ({"a": np.zeros(65, np.uint8), "b": np.zeros(16, np.int32)}, "arrays of 129 bytes"),
    "a large header": ({"a" * 70: np.zeros(1, np.uint8)}, "bytes, the limits are 64 and 128"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_can_not_be_sent_is_refused_whole(case):
    """Not a byte of it goes out, so the connection is as good as before."""
    arrays, line = _REFUSED[case]
    with _pair(max_header=64, max_body=128) as (left, right):
        before = _descriptors()
        assert line in refused(left.send, "x", {}, arrays, timeout_s=HANGS_S)
        assert _descriptors() == before
        left.send("y", {}, {"a": np.arange(3, dtype=np.int32)}, timeout_s=HANGS_S)
        message = right.receive(timeout_s=HANGS_S)
        assert message.header == {"op": "y"} and message.arrays["a"].tolist() == [0, 1, 2]


def _received(data):
    """Result of `receive` for bytes and an end of file; anything but a message, WireError, TimeoutError fails."""
    with _raw() as (peer, connection):
        peer.sendall(data)
        peer.close()
        try:
            return connection.receive(timeout_s=HANGS_S)
        except (WireError, TimeoutError) as error:
            assert connection.fileno() == -1 and "\n" not in str(error)
            return None


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_an_error_of_the_wire(data, framed):
    """A broken sidecar is restarted after a WireError; any other exception would end the run."""
    before = _descriptors()
    assert _received(struct.pack("<4sIQ", b"DCM1", len(data), 0) + data if framed else data) is None
    assert _descriptors() == before


_DIMENSIONS = st.one_of(st.integers(0, 4), st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
_ENTRIES = st.tuples(st.text(max_size=2), st.sampled_from(_DTYPES), st.lists(_DIMENSIONS, max_size=5))


def _bytes(listed):
    """Total bytes of the arrays, if all are arrays and small."""
    if isinstance(listed, list) and all(isinstance(entry, tuple) and len(entry[2]) <= 4 for entry in listed):
        size = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in listed)
        return size if size < 1 << 16 else None
    return None


_ANY = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner), max_leaves=6)


@settings(deadline=None, max_examples=300)
@given(
    listed=st.one_of(st.lists(st.one_of(_ENTRIES, _ANY), max_size=3), st.lists(_ENTRIES, max_size=2), _ANY),
    body=st.one_of(st.none(), st.binary(max_size=64)),
    fits=st.booleans(),
)
def test_a_header_that_lies_is_an_error_of_the_wire(listed, body, fits):
    """Whatever it says of arrays: no overflow, no array out of bounds."""
    size = _bytes(listed) if fits else None
    message = _received(_frame({"op": "x", "arrays": listed}, (body or b"") if size is None else bytes(size)))
    if message is not None:
        expected = {name: (dtype, tuple(shape)) for name, dtype, shape in listed}
        assert {name: (a.dtype.name, a.shape) for name, a in message.arrays.items()} == expected
        assert not fits or not any(array.any() for array in message.arrays.values())

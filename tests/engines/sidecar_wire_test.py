"""Frames over real socket pairs: what arrives, and what becomes of a connection whose other end
sends no frame.
"""

import contextlib
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

from dcmdp_jax.engines.sidecar import wire
from dcmdp_jax.engines.sidecar.wire import Connection, WireError
from tests.support.refusals import refused
from tests.support.waiting import HANGS_S

_DTYPES = ("uint8", "int16", "int32", "int64", "uint64", "float32")
_MIB = 1 << 20


@contextlib.contextmanager
def _pair():
    left, right = map(Connection, socket.socketpair())
    try:
        yield left, right
    finally:
        left.close()
        right.close()


@contextlib.contextmanager
def _raw():
    """(socket, connection): a peer that may send anything."""
    ours, theirs = socket.socketpair()
    connection = Connection(theirs)
    try:
        yield ours, connection
    finally:
        ours.close()
        connection.close()


def _descriptors():
    """Number of descriptors this process has open, including the one that lists them."""
    return len(os.listdir("/proc/self/fd"))


def _frame(fields, *, magic=b"DCM2"):
    packed = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    return struct.pack("<4sQ", magic, len(packed)) + packed


def _refusal(data, kind=WireError, timeout_s=HANGS_S):
    """The one line that `data` gets; the connection is closed then."""
    with _raw() as (peer, connection):
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
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
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
        sender = threading.Thread(
            target=left.send, args=("big", fields, arrays), kwargs={"timeout_s": HANGS_S}
        )
        sender.start()
        message = right.receive(timeout_s=HANGS_S)
        sender.join()
    assert message.header == {"op": "big", **fields}
    assert {name: array.dtype.name for name, array in message.arrays.items()} == {
        name: name for name in _DTYPES
    }
    for name, array in arrays.items():
        assert message.arrays[name].shape == (3, _MIB // array.itemsize)
        assert message.arrays[name].tobytes() == array.tobytes()


def test_frames_that_wait_keep_their_own_arrays():
    with _pair() as (left, right):
        for number in range(4):
            left.send(
                "frame", {"number": number}, {"a": np.full(5, number, np.int32)}, timeout_s=HANGS_S
            )
        for number in range(4):
            message = right.receive(timeout_s=HANGS_S)
            assert message.header == {"op": "frame", "number": number}
            assert message.arrays["a"].tolist() == [number] * 5


# {"n": 7, "op": "push", "arrays": {"a": ["int32", [2], 1 and -2], "b": ["uint8", [], 255]}} by
# msgpack's specification: 0x80 | n is a map of n, 0x90 | n a list, 0xa0 | n a string of n bytes,
# 0xc4 n n bytes; small numbers are themselves. 1 + 3 + 3+5 + 7+1 + 2+1+6+2+2+8 + 2+1+6+1+2+1 = 54
# bytes.
_LISTED = b"\xa6arrays\x82"
_LISTED += b"\xa1a\x93\xa5int32\x91\x02\xc4\x08" + b"\x01\0\0\0" + b"\xfe\xff\xff\xff"
_LISTED += b"\xa1b\x93\xa5uint8\x90\xc4\x01" + b"\xff"
_HAND = b"\x83" + b"\xa1n\x07" + b"\xa2op\xa4push" + _LISTED
_HAND_ARRAYS = {"a": np.array([1, -2], np.int32), "b": np.array(255, np.uint8)}


def test_a_frame_byte_for_byte():
    """The format is fixed: another PROTOCOL if this has to change."""
    expected = b"DCM2" + b"\x36\0\0\0\0\0\0\0" + _HAND
    assert len(_HAND) == 0x36
    with _raw() as (peer, connection):
        connection.send("push", {"n": 7}, _HAND_ARRAYS, timeout_s=HANGS_S)
        assert peer.recv(1000) == expected
        peer.sendall(expected)
        frame = connection.receive(timeout_s=HANGS_S)
        header = frame.header
        arrays = frame.arrays
    assert header == {"op": "push", "n": 7}
    assert arrays["a"].tolist() == [1, -2] and arrays["b"].tolist() == 255


def test_a_frame_in_single_bytes():
    """The socket may give as little as a byte at a time."""
    with _raw() as (peer, connection):
        for value in _frame(_HAND):
            peer.sendall(bytes([value]))
        arrays = connection.receive(timeout_s=HANGS_S).arrays
    assert arrays["a"].tolist() == [1, -2] and arrays["b"].tolist() == 255


def _with(*parts):
    return {"op": "x", "arrays": {"a": list(parts)}}


_MALFORMED = {
    "another magic": (_frame({}, magic=b"DCM1"), "not a frame: it begins with b'DCM1'"),
    "text": (b"HTTP/1.1 200 OK\r\n\r\n", "not a frame: it begins with b'HTTP'"),
    "nothing": (_frame(b""), "malformed frame: "),
    "not msgpack": (_frame(b"\xc1"), "malformed frame: "),
    "msgpack with more behind it": (
        _frame(msgpack.packb({"op": "x", "arrays": {}}) + b"\x01"),
        "ExtraData",
    ),
    "half of a map": (_frame(msgpack.packb({"op": "x", "arrays": {}})[:-1]), "malformed frame: "),
    "text that is not UTF-8": (_frame(b"\x81\xa1\xff\x01"), "UnicodeDecodeError"),
    "nested beyond msgpack": (_frame(b"\x91" * 5000), "malformed frame: "),
    "a list": (_frame([1, 2]), "malformed frame: "),
    "a number": (_frame(7), "malformed frame: "),
    "no op": (_frame({"arrays": {}}), "malformed frame: KeyError('op')"),
    "op is a number": (_frame({"op": 1, "arrays": {}}), "op is no text"),
    "op is bytes": (_frame({"op": b"x", "arrays": {}}), "op is no text"),
    "no arrays": (_frame({"op": "x"}), "malformed frame: KeyError('arrays')"),
    "arrays is nothing": (_frame({"op": "x", "arrays": None}), "malformed frame: "),
    "arrays is a list": (_frame({"op": "x", "arrays": []}), "malformed frame: "),
    "an array is a long text": (
        _frame({"op": "x", "arrays": {"a": "b\n" * 10_000}}),
        "malformed frame: ",
    ),
    "an array is too short": (_frame(_with("uint8", [0])), "malformed frame: "),
    "an array is too long": (_frame(_with("uint8", [0], b"", 0)), "malformed frame: "),
    "float64": (_frame(_with("float64", [1], bytes(8))), "an array of another dtype"),
    "object": (_frame(_with("object", [1], bytes(8))), "an array of another dtype"),
    "big-endian": (_frame(_with(">i4", [1], bytes(4))), "an array of another dtype"),
    "a dtype is a number": (_frame(_with(0, [1], bytes(4))), "an array of another dtype"),
    "a dimension is 1.0": (_frame(_with("uint8", [1.0], bytes(1))), "malformed frame: "),
    # 2^62 x 2^62 x 4 bytes is 0 in 64 bits.
    "dimensions that overflow": (_frame(_with("int32", [2**62, 2**62], b"")), "malformed frame: "),
    "more than an int64 beside a 0": (
        _frame(_with("uint8", [0, 2**64 - 1], b"")),
        "malformed frame: ",
    ),
    "a byte missing": (_frame(_with("uint8", [4], bytes(3))), "cannot reshape array of size 3"),
    "a byte more": (_frame(_with("uint8", [4], bytes(5))), "cannot reshape array of size 5"),
    "half of a number": (_frame(_with("int32", [1], bytes(3))), "malformed frame: "),
}


@pytest.mark.parametrize("case", _MALFORMED)
def test_what_is_no_frame_closes_the_connection(case):
    """In one line that says what was wrong; reading on would take some other bytes for a frame."""
    data, line = _MALFORMED[case]
    assert line in _refusal(data)


def test_a_frame_over_the_limit_is_refused_before_memory_is_taken():
    """Only the 12 bytes that announce it are there; waiting for more would end in TimeoutError."""
    tracemalloc.start()
    try:
        line = _refusal(struct.pack("<4sQ", b"DCM2", 2**40))
        assert line == f"frame too large: {2**40} bytes, the limit is {2**32}"
        assert tracemalloc.get_traced_memory()[1] < 8 * _MIB
    finally:
        tracemalloc.stop()


def test_the_limit_itself_is_allowed(monkeypatch):
    small = _with("uint8", [64], bytes(64))
    size = len(msgpack.packb(small))
    monkeypatch.setattr(wire, "_MAX_BYTES", size)
    with _raw() as (peer, connection):
        peer.sendall(_frame(small))
        assert connection.receive(timeout_s=HANGS_S).arrays["a"].shape == (64,)
    monkeypatch.setattr(wire, "_MAX_BYTES", size - 1)
    assert "frame too large" in _refusal(_frame(small))


def test_a_frame_cut_short_is_no_frame():
    """At every byte: the other side died while it was sending."""
    whole = _frame(_HAND)
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
            with pytest.raises(
                WireError, match="^sending 'y': (Broken pipe|Connection reset by peer)$"
            ):
                connection.send("y", timeout_s=HANGS_S)
            assert connection.fileno() == -1
            # Closed for good, and closing it once more is nothing.
            connection.close()
            with pytest.raises(WireError, match="^sending 'z': Bad file descriptor$"):
                connection.send("z", timeout_s=HANGS_S)


@pytest.mark.parametrize("cut", [0, 1, 11, 12, 20, 57, 65])
def test_a_frame_that_does_not_come_is_waited_for_so_long(cut):
    """Nothing, half of the prefix, of the map: a frame can't be resumed, so the connection is
    over.
    """
    whole = _frame(_HAND)
    assert len(whole) == 66
    assert (
        _refusal(whole[:cut], kind=TimeoutError, timeout_s=0.05)
        == "waiting for a frame: nothing for 0.05 s"
    )


def test_a_peer_that_dribbles_is_not_waited_for_longer():
    """The limit is for the whole frame; restarted at each byte, it would wait minutes for this
    map.
    """
    with _raw() as (peer, connection):

        def dribble():
            # Until the other side closes the connection.
            with contextlib.suppress(OSError):
                for value in struct.pack("<4sQ", b"DCM2", 10_000) + bytes(10_000):
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
    for arguments in (
        {"arrays": {"a": np.zeros(8 * _MIB, np.uint8)}},
        {"header": {"text": "x" * 8 * _MIB}},
    ):
        with _raw() as (_, connection):
            with pytest.raises(TimeoutError, match=r"^sending 'big': nothing for 0\.2 s$"):
                connection.send("big", **arguments, timeout_s=0.2)
            assert connection.fileno() == -1
    assert _descriptors() == before


_REFUSED = {
    "float64": (
        {"a": np.zeros(3)},
        "frame 'x': array a is float64, allowed are uint8, int16, int32",
    ),
    "bool": ({"fine": np.zeros(3, np.int32), "b": np.zeros(3, bool)}, "array b is bool"),
    "objects": ({"a": np.array([None])}, "array a is object"),
    # numpy calls its dtype "int32"; 1 would arrive as 2^24.
    "big-endian": ({"a": np.array([1], ">i4")}, "array a is >i4"),
    # 1 + 3+2 + 7+1 + 2+1+6+1+2 + 2+129 = 157 bytes, 129 being two in the shape.
    "a large array": ({"a": np.zeros(129, np.uint8)}, "frame 'x': 157 bytes, the limit is 128"),
    "arrays large together": (
        {"a": np.zeros(65, np.uint8), "b": np.zeros(16, np.int32)},
        "the limit is 128",
    ),
    "a large name": ({"a" * 130: np.zeros(1, np.uint8)}, "the limit is 128"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_what_can_not_be_sent_is_refused_whole(case, monkeypatch):
    """Not a byte of it goes out, so the connection is as good as before."""
    arrays, line = _REFUSED[case]
    monkeypatch.setattr(wire, "_MAX_BYTES", 128)
    with _pair() as (left, right):
        before = _descriptors()
        assert line in refused(left.send, "x", {}, arrays, timeout_s=HANGS_S)
        assert _descriptors() == before
        left.send("y", {}, {"a": np.arange(3, dtype=np.int32)}, timeout_s=HANGS_S)
        message = right.receive(timeout_s=HANGS_S)
        assert message.header == {"op": "y"} and message.arrays["a"].tolist() == [0, 1, 2]


def _received(data):
    """Result of `receive` for bytes and an end of file; anything but a message, WireError,
    TimeoutError fails.
    """
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
    assert _received(struct.pack("<4sQ", b"DCM2", len(data)) + data if framed else data) is None
    assert _descriptors() == before


_DIMENSIONS = st.one_of(
    st.integers(0, 4), st.sampled_from([2**31, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1])
)
_PARTS = st.tuples(
    st.sampled_from(_DTYPES), st.lists(_DIMENSIONS, max_size=5), st.binary(max_size=64)
)
_ANY = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(
    listed=st.one_of(
        st.dictionaries(st.text(max_size=2), st.one_of(_PARTS, _ANY), max_size=3), _ANY
    )
)
def test_arrays_that_lie_are_an_error_of_the_wire(listed):
    """Whatever a frame says of them: no overflow, no array out of bounds."""
    message = _received(_frame({"op": "x", "arrays": listed}))
    if message is not None:
        assert {name: array.dtype.name for name, array in message.arrays.items()} == {
            n: p[0] for n, p in listed.items()
        }
        assert all(array.tobytes() == listed[name][2] for name, array in message.arrays.items())

"""Frames: messages survive a round trip unchanged, and nothing else is accepted (H5, H20)."""

import pickle
import struct

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.consensus.frames import (
    APPEND_ENTRIES,
    LEDGER_DIGEST_BYTES,
    MAX_ENTRY_BYTES,
    MAX_FRAME_BYTES,
    AnyMessage,
    AppendReply,
    AppendRequest,
    Frame,
    FrameReader,
    FrameRefused,
    Heartbeat,
    ReadReply,
    ReadRequest,
    RemovalNotice,
    SnapshotChunk,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    decode_body,
    encode_frame,
)

CLUSTER = "6f1c0000000000000000000000000000"
numbers = st.integers(0, 1 << 62)
entries = st.lists(st.tuples(numbers, st.binary(min_size=1, max_size=40)), max_size=5)
messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(AppendRequest, numbers, numbers, numbers, numbers, numbers, st.booleans(), entries),
    st.builds(Heartbeat, numbers, numbers, numbers, st.booleans()),
    st.builds(AppendReply, numbers, numbers, numbers, st.booleans(), numbers, numbers),
    st.builds(
        VoteRequest,
        numbers,
        numbers,
        numbers,
        numbers,
        st.booleans(),
        st.booleans(),
        numbers,
        st.binary(max_size=LEDGER_DIGEST_BYTES),
    ),
    st.builds(VoteReply, numbers, numbers, st.booleans(), st.booleans()),
    st.builds(SnapshotChunk, numbers, numbers, numbers, numbers, numbers, numbers, st.binary(max_size=40)),
    st.builds(SnapshotReply, numbers, numbers, numbers, numbers, st.integers(0, 3), numbers, numbers),
    st.builds(ReadRequest, numbers, numbers, st.binary(max_size=40)),
    st.builds(ReadReply, numbers, numbers, numbers),
)


@given(st.lists(messages, max_size=6), st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_frames_split_anywhere_are_decoded_unchanged(said: list[AnyMessage], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(CLUSTER, "r2", message) for message in said)
    reader, at, turn = FrameReader(CLUSTER), 0, 0
    heard: list[Frame] = []
    while at < len(stream):
        step = cuts[turn % len(cuts)]
        heard += reader.feed(stream[at : at + step])
        at, turn = at + step, turn + 1
    assert heard == [Frame("r2", message) for message in said]


@given(st.binary(max_size=200))
def test_h05_other_bytes_are_rejected_without_other_errors(noise: bytes) -> None:
    with pytest.raises(FrameRefused):
        decode_body(CLUSTER, noise)


@given(messages, st.data())
def test_h05_frame_with_a_changed_byte_is_rejected_or_differs(message: AnyMessage, data: st.DataObject) -> None:
    body = bytearray(encode_frame(CLUSTER, "r2", message)[4:])
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        heard = decode_body(CLUSTER, body)
    except FrameRefused:
        return
    assert decode_body(CLUSTER, encode_frame(CLUSTER, heard.sender, heard.message)[4:]) == heard


def test_h05_pickle_is_rejected_and_not_run() -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return exec, ("raise SystemExit('run')",)

    with pytest.raises(FrameRefused):
        decode_body(CLUSTER, pickle.dumps(Attack()))


def test_h05_frame_of_another_cluster_or_version_is_rejected_by_name() -> None:
    body = encode_frame("another", "r2", Heartbeat(1, 1, 0, True))[4:]
    with pytest.raises(FrameRefused, match="'another'"):
        decode_body(CLUSTER, body)
    with pytest.raises(FrameRefused, match="version 2"):
        decode_body(CLUSTER, msgspec.msgpack.encode([2, CLUSTER, "r2", [2, 1, 1, 0, True]]))


@pytest.mark.parametrize(
    "message",
    [
        [99, 1, 1],
        [2, 1, 1, 0, True, "more"],
        [2, -1, 1, 0, True],
        [2, 1 << 63, 1, 0, True],
        [2, 1, 1, 0, 1],
        [2, "1", 1, 0, True],
        [1, 1, 1, 0, 0, 0, True, [[1, b""]]],
        [1, 1, 1, 0, 0, 0, True, [[1, b"x"]] * (APPEND_ENTRIES + 1)],
        [1, 1, 1, 0, 0, 0, True, [[1, b"x" * (MAX_ENTRY_BYTES + 1)]]],
        [7, 1, 1, 1, 1, 4, 0, 0],
        [4, 1, 1, 1, 1, True, False, 1, b"x" * (LEDGER_DIGEST_BYTES + 1)],
    ],
    ids=[
        "kind",
        "length",
        "negative",
        "overflow",
        "bool",
        "text",
        "empty entry",
        "entries",
        "entry",
        "outcome",
        "digest",
    ],
)
def test_h05_message_outside_its_bounds_is_rejected(message: list[object]) -> None:
    with pytest.raises(FrameRefused):
        decode_body(CLUSTER, msgspec.msgpack.encode([1, CLUSTER, "r2", message]))


def test_h05_too_large_announced_length_is_rejected_before_buffering() -> None:
    reader = FrameReader(CLUSTER)
    with pytest.raises(FrameRefused, match="announced"):
        list(reader.feed(struct.pack(">I", MAX_FRAME_BYTES + 1)))


def test_largest_append_request_fits_into_a_frame() -> None:
    full = [(1 << 62, b"x" * 2047)] * 511 + [(1 << 62, b"x" * MAX_ENTRY_BYTES)]
    frame = encode_frame("c" * 64, "n" * 64, AppendRequest(1 << 62, 1 << 62, 1 << 62, 1 << 62, 1 << 62, True, full))
    assert len(frame) <= MAX_FRAME_BYTES + 4


def test_released_encoding_of_every_message_stays_the_same() -> None:
    said: list[tuple[AnyMessage, str]] = [
        (AppendRequest(7, 1, 5, 6, 4, True, [(7, b"\x01a")], [b"s"]), "99010701050604c3919207c402016191c40173"),
        (Heartbeat(7, 2, 4, False), "9502070204c2"),
        (AppendReply(7, 3, 5, True, 4, 6, b"k"), "9803070305c30406c4016b"),
        (VoteRequest(7, 4, 5, 6, True, False, 3, b"d" * 32), "990407040506c3c203c420" + "64" * 32),
        (VoteReply(7, 4, True, False, b"k", b"s"), "97050704c3c2c4016bc40173"),
        (SnapshotChunk(7, 5, 9, 6, 3, 0, b"abc"), "9806070509060300c403616263"),
        (SnapshotReply(7, 5, 9, 6, 2, 3, 9), "980707050906020309"),
        (RemovalNotice(7, 4, 3), "9408070403"),
        (TimeoutNow(7, 6), "93090706"),
        (ReadRequest(7, 8, b"ab"), "940d0708c4026162"),
        (ReadReply(7, 8, 9), "940e070809"),
    ]
    for message, form in said:
        body = bytes.fromhex("9401a163a16e" + form)
        assert encode_frame("c", "n", message)[4:] == body
        assert decode_body("c", body).message == message

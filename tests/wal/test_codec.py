"""Codec: each batch has exactly one encoding, forever; everything else is rejected."""

import itertools
import json
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.replica.messages import features
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.events import FeatureLevelRaised, TornDown
from forebay.replica.messages.features import ReleaseNeeded
from forebay.wal import ENTRY_MAX_BYTES
from forebay.wal.codec import (
    NO_OP,
    CodecError,
    EntryKind,
    WrittenLater,
    batch_of_encoded,
    counted_revision_after,
    decode_batch,
    encode_batch,
    encode_entry,
    kind_of,
    leader_of,
    no_op_of,
    revision_after,
)
from tests.wal import golden_files
from tests.wal.samples import BATCHES, EVENTS, sample_batch, tag_of

GOLDEN = sorted(golden_files.GOLDEN.glob("*.json"))


@settings(max_examples=60, deadline=None)
@given(batch=BATCHES)
def test_decoding_and_encoding_again_gives_the_same_bytes(batch: Batch) -> None:
    data = encode_batch(batch)
    assert decode_batch(data) == batch
    assert encode_batch(decode_batch(data)) == data


@given(batch=BATCHES)
def test_batch_of_encoded_entries_equals_the_encoded_batch(batch: Batch) -> None:
    assert batch_of_encoded(batch.base, batch.at, [encode_entry(entry) for entry in batch.entries]) == encode_batch(
        batch
    )


def test_every_event_has_a_golden_file_and_every_golden_file_an_event() -> None:
    assert {golden_files.path_of(event) for event in EVENTS} == set(GOLDEN)


def test_event_tags_are_unique() -> None:
    assert len({tag_of(event) for event in EVENTS}) == len(EVENTS)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_batch_keeps_its_meaning(path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    batch = decode_batch(bytes.fromhex(golden["bytes"]))
    event = batch.entries[0].events[0]
    assert (type(event).__name__, tag_of(type(event))) == (golden["event"], golden["tag"])
    assert _begins_with(golden_files.plain(batch), golden["batch"])


def _begins_with(now: object, then: object) -> bool:
    """Return whether the records are equal, except for new fields at the end."""
    if isinstance(now, list) and isinstance(then, list):
        return len(now) >= len(then) and all(map(_begins_with, now, then))
    return now == then


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_prefix_or_trailing_byte_is_rejected(event: type[msgspec.Struct]) -> None:
    data = encode_batch(sample_batch(event))
    for length in range(len(data)):
        with pytest.raises(CodecError):
            decode_batch(data[:length])
    for extra in (b"\x00", b"\xc0", b"\x90", data):
        with pytest.raises(CodecError):
            decode_batch(data + extra)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_flipped_bit_is_rejected_or_gives_another_canonical_batch(event: type[msgspec.Struct]) -> None:
    batch = sample_batch(event)
    data = encode_batch(batch)
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        with suppress(CodecError):
            other = decode_batch(bytes(changed))
            # A flipped tag may give another event in its earlier form, which had fewer fields.
            is_another_event = type(other.entries[0].events[0]) is not event
            assert other != batch and (is_another_event or encode_batch(other) == changed), (position, bit)


@given(data=st.binary(max_size=60))
def test_arbitrary_bytes_raise_only_codec_error(data: bytes) -> None:
    for attempt in (data, b"\x01\x01" + data):
        try:
            assert encode_batch(decode_batch(attempt)) == attempt
        except CodecError as error:
            assert str(error)


def _raw(*values: object) -> bytes:
    return b"\x01\x01" + msgspec.msgpack.encode(values)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"", "begins with nothing"),
        (b"\x02", "not a batch"),
        (b"\x7f", "begins with 7f"),
        (b"\xff\x01", "begins with ff"),
        (NO_OP, "not a batch"),
        (NO_OP + b"r" * 129, "whose ID has 129 bytes"),
        (b"\x01", "format none"),
        (b"\x01\x02\x93", "format 02"),
        (_raw(1, 2), "cannot be decoded"),
        (_raw(1, "2", []), "cannot be decoded"),
        (_raw(1, 2, [], "a field of a later release"), "not canonical"),
        (_raw(1, 2, [[b"i", [1, "u"], "submit_job", [[60_000, 1]], None]]), "cannot be decoded"),
        (_raw(1, 2, [[b"i", [99, "u"], "submit_job", [], None]]), "cannot be decoded"),
        (b"\x01\x01\x93\xcc\x01\x02\x90", "not canonical"),  # 1 as two bytes
        (b"\x01\x01\x93\xd3\x00\x00\x00\x00\x00\x00\x00\x01\x02\x90", "not canonical"),
        (b"\x01\x01\xdc\x00\x03\x01\x02\x90", "not canonical"),  # an array of three with a long head
        (b"\x01\x01\x93\x01\x02\xdd\x00\x00\x00\x00", "not canonical"),
        (b"\x01\x01" + b"\x91" * 5000, "cannot be decoded"),
        (b"\x01\x01" + bytes(ENTRY_MAX_BYTES), "the maximum is 1048576"),
    ],
)
def test_non_canonical_encoding_is_rejected_with_a_reason(data: bytes, sentence: str) -> None:
    with pytest.raises(CodecError, match=sentence):
        decode_batch(data)


def test_entry_of_an_earlier_release_without_a_later_field_is_accepted() -> None:
    shorter = _raw(1, 2, [[b"0123456789abcdef", [3, "ann"], "submit_job", []]])
    longer = _raw(1, 2, [[b"0123456789abcdef", [3, "ann"], "submit_job", [], None, b""]])
    assert decode_batch(shorter) == decode_batch(longer)
    assert encode_batch(decode_batch(shorter)) == longer
    with pytest.raises(CodecError, match="not canonical"):
        decode_batch(shorter.replace(b"\x93\x01\x02", b"\x93\xcc\x01\x02"))


def test_batch_larger_than_an_entry_is_not_encoded() -> None:
    batch = sample_batch(EVENTS[0])
    huge = msgspec.structs.replace(batch, entries=batch.entries * 10_000)
    with pytest.raises(CodecError, match="propose smaller batches"):
        encode_batch(huge)


def test_value_without_an_encoding_raises_codec_error() -> None:
    batch = sample_batch(EVENTS[0])
    for wrong in (2**64, "\ud800"):
        with pytest.raises(CodecError, match="cannot be encoded"):
            encode_batch(msgspec.structs.replace(batch, at=wrong))


def test_only_a_batch_with_the_right_base_changes_the_revision() -> None:
    data = encode_batch(sample_batch(EVENTS[0]))
    for after in (revision_after, counted_revision_after):
        assert after(NO_OP, 7) == 7
        assert after(data, 7) == 9
        assert after(data, 8) == 8
    assert kind_of(NO_OP) is EntryKind.NO_OP and kind_of(data) is EntryKind.BATCH


def test_only_a_no_op_names_the_leader() -> None:
    assert leader_of(no_op_of("r1.3")) == "r1.3" and kind_of(no_op_of("r1.3")) is EntryKind.NO_OP
    assert leader_of(NO_OP) == leader_of(encode_batch(sample_batch(EVENTS[0]))) == ""


ABOVE = features.FEATURE_LEVEL_KNOWN + 1
RAISED = [tag_of(FeatureLevelRaised), ABOVE, "9.1.0"]
UNKNOWN = [60_000, 1]


def _of_a_later_release(*entries: list[object]) -> bytes:
    return _raw(7, 2, [[b"i", [2, "op"], "do", list(events), None] for events in entries])


@pytest.mark.parametrize(
    ("entries", "revision", "release"),
    [
        ([[RAISED, UNKNOWN]], 8, "9.1.0"),
        ([[RAISED], [[tag_of(TornDown), 5]], [UNKNOWN]], 10, "9.1.0"),
        ([[[tag_of(TornDown), 5]], [UNKNOWN]], 9, ""),
        ([[[tag_of(FeatureLevelRaised), 1, "1.0.0"]], [UNKNOWN]], 9, ""),
    ],
)
def test_event_of_a_later_release_names_its_revision_and_release(
    entries: list[list[object]], revision: int, release: str
) -> None:
    with pytest.raises(
        WrittenLater,
        match=f"^revision {revision}: the batch cannot be decoded: it has an event with the unknown tag 60000",
    ) as stopped:
        decode_batch(_of_a_later_release(*entries))
    assert isinstance(stopped.value, ReleaseNeeded) and isinstance(stopped.value, CodecError)
    assert (stopped.value.release, stopped.value.revision) == (release, revision)
    assert (f"start release {release} or a later one" if release else "start a later release") in str(stopped.value)


@given(data=st.binary(max_size=40))
def test_undecodable_data_without_an_unknown_event_is_damage(data: bytes) -> None:
    damaged = b"\x01\x01" + data
    with suppress(CodecError):
        decode_batch(damaged)
    for wrong in (
        _raw(1, 2, [[b"i", [1, "u"], "x", [[tag_of(TornDown)]], None]]),
        _raw("1", 2, [[UNKNOWN]]),
        damaged + b"\xc1",
    ):
        with pytest.raises(CodecError) as error:
            decode_batch(wrong)
        assert not isinstance(error.value, ReleaseNeeded)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_batches_are_encoded_byte_for_byte(path: Path) -> None:
    data = bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["bytes"])
    assert encode_batch(decode_batch(data)) == data, "a written record must never change"

"""The codec: one encoding for one batch, for ever; everything else is refused."""

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
def test_what_is_encoded_is_decoded_and_encoded_again_alike(batch: Batch) -> None:
    data = encode_batch(batch)
    assert decode_batch(data) == batch
    assert encode_batch(decode_batch(data)) == data


@given(batch=BATCHES)
def test_a_batch_put_together_from_encoded_entries_has_the_bytes_of_the_whole_one(batch: Batch) -> None:
    assert batch_of_encoded(batch.base, batch.at, [encode_entry(entry) for entry in batch.entries]) == encode_batch(
        batch
    )


def test_every_event_has_a_golden_file_and_every_golden_file_an_event() -> None:
    assert {golden_files.path_of(event) for event in EVENTS} == set(GOLDEN)


def test_event_tags_are_unique() -> None:
    assert len({tag_of(event) for event in EVENTS}) == len(EVENTS)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_batch_means_what_it_meant_when_it_was_written(path: Path) -> None:
    golden = json.loads(path.read_text(encoding="utf-8"))
    batch = decode_batch(bytes.fromhex(golden["bytes"]))
    event = batch.entries[0].events[0]
    assert (type(event).__name__, tag_of(type(event))) == (golden["event"], golden["tag"])
    assert _begins_with(golden_files.plain(batch), golden["batch"])


def _begins_with(now: object, then: object) -> bool:
    """Equal, except that records may have got new fields at their end since."""
    if isinstance(now, list) and isinstance(then, list):
        return len(now) >= len(then) and all(map(_begins_with, now, then))
    return now == then


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_no_prefix_and_no_trailing_byte_of_a_batch_is_accepted(event: type[msgspec.Struct]) -> None:
    data = encode_batch(sample_batch(event))
    for length in range(len(data)):
        with pytest.raises(CodecError):
            decode_batch(data[:length])
    for extra in (b"\x00", b"\xc0", b"\x90", data):
        with pytest.raises(CodecError):
            decode_batch(data + extra)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__)
def test_a_changed_bit_is_refused_or_is_the_one_encoding_of_another_batch(event: type[msgspec.Struct]) -> None:
    batch = sample_batch(event)
    data = encode_batch(batch)
    for position, bit in itertools.product(range(len(data)), range(8)):
        changed = bytearray(data)
        changed[position] ^= 1 << bit
        with suppress(CodecError):
            other = decode_batch(bytes(changed))
            # A changed tag may make another event of it, as an earlier release wrote that, with fewer fields.
            is_another_event = type(other.entries[0].events[0]) is not event
            assert other != batch and (is_another_event or encode_batch(other) == changed), (position, bit)


@given(data=st.binary(max_size=60))
def test_bytes_from_anywhere_raise_nothing_but_codec_error(data: bytes) -> None:
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
def test_what_is_not_the_one_encoding_is_refused_with_a_sentence(data: bytes, sentence: str) -> None:
    with pytest.raises(CodecError, match=sentence):
        decode_batch(data)


def test_an_entry_that_an_earlier_release_wrote_without_a_later_field_is_accepted() -> None:
    shorter = _raw(1, 2, [[b"0123456789abcdef", [3, "ann"], "submit_job", []]])
    longer = _raw(1, 2, [[b"0123456789abcdef", [3, "ann"], "submit_job", [], None, b""]])
    assert decode_batch(shorter) == decode_batch(longer)
    assert encode_batch(decode_batch(shorter)) == longer
    with pytest.raises(CodecError, match="not canonical"):
        decode_batch(shorter.replace(b"\x93\x01\x02", b"\x93\xcc\x01\x02"))


def test_a_batch_beyond_the_bound_of_an_entry_is_not_encoded() -> None:
    batch = sample_batch(EVENTS[0])
    huge = msgspec.structs.replace(batch, entries=batch.entries * 10_000)
    with pytest.raises(CodecError, match="propose smaller batches"):
        encode_batch(huge)


def test_a_value_without_an_encoding_is_a_codec_error() -> None:
    batch = sample_batch(EVENTS[0])
    for wrong in (2**64, "\ud800"):
        with pytest.raises(CodecError, match="cannot be encoded"):
            encode_batch(msgspec.structs.replace(batch, at=wrong))


def test_only_a_batch_with_the_right_base_moves_the_revision() -> None:
    data = encode_batch(sample_batch(EVENTS[0]))
    for after in (revision_after, counted_revision_after):
        assert after(NO_OP, 7) == 7
        assert after(data, 7) == 9
        assert after(data, 8) == 8
    assert kind_of(NO_OP) is EntryKind.NO_OP and kind_of(data) is EntryKind.BATCH


def test_a_no_op_says_who_led_and_nothing_else_does() -> None:
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
def test_an_event_of_a_later_release_stops_with_its_revision_and_the_release_that_the_batch_names(
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
def test_what_cannot_be_decoded_and_holds_no_unknown_event_is_damage_and_not_a_later_release(data: bytes) -> None:
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
def test_what_was_once_written_is_written_again_byte_for_byte(path: Path) -> None:
    data = bytes.fromhex(json.loads(path.read_text(encoding="utf-8"))["bytes"])
    assert encode_batch(decode_batch(data)) == data, "a record that is written must not change"

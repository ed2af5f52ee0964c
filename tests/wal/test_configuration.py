"""Encoding of a configuration: canonical, and rejected if invalid."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.wal.codec import CodecError, EntryKind, decode_batch, kind_of, revision_after
from forebay.wal.configuration import (
    Change,
    ChangeKind,
    Configuration,
    Member,
    decode_configuration,
    encode_configuration,
    identity_of,
    incarnation_of,
    initial,
    is_configuration,
    name_of,
    unknown,
)

GOLDEN = Path(__file__).parent / "golden"
FOUNDERS = tuple(Member(name, f"{name}:7401", f"{name}:7411") for name in ("r1", "r2", "r3"))
CHANGED = Configuration(
    7,
    (*FOUNDERS[:2], Member("r3#5", "r3:7401", "r3:7411")),
    (Member("r4#7", "r4:7401", "r4:7411"),),
    Change(ChangeKind.ADD, "r4#7", "operator admin", 1_760_000_000_000_000, b"\x01" * 16),
)

names = st.from_regex(r"[a-z][a-z0-9]{0,5}", fullmatch=True)


@st.composite
def configurations(draw: st.DrawFn) -> Configuration:
    version = draw(st.integers(1, 1 << 40))
    found = draw(st.lists(names, min_size=1, max_size=8, unique=True))
    members = sorted(
        (
            Member(
                identity_of(name, draw(st.integers(1, version))) if draw(st.booleans()) else name,
                f"{name}:1",
                f"{name}:2",
            )
            for name in found
        ),
        key=lambda member: member.id,
    )
    learners = members[1:][: draw(st.integers(0, min(4, len(members) - 1)))]
    voters = tuple(member for member in members if member not in learners)
    change = Change(
        draw(st.sampled_from(ChangeKind)), draw(st.none() | names), draw(names), draw(st.integers(0, 1 << 60))
    )
    return Configuration(version, voters, tuple(learners), change)


@given(configurations())
def test_configuration_has_one_encoding_and_is_decoded_unchanged(configuration: Configuration) -> None:
    data = encode_configuration(configuration)
    assert decode_configuration(data) == configuration
    assert encode_configuration(decode_configuration(data)) == data
    assert kind_of(data) is EntryKind.CONFIGURATION and is_configuration(data)
    assert revision_after(data, 41) == 41
    with pytest.raises(CodecError):
        decode_batch(data)


@given(configurations(), st.data())
def test_configuration_with_a_changed_or_missing_byte_is_rejected_or_differs(
    configuration: Configuration, draw: st.DataObject
) -> None:
    data = bytearray(encode_configuration(configuration))
    if draw.draw(st.booleans()):
        del data[draw.draw(st.integers(2, len(data) - 1)) :]
    else:
        data[draw.draw(st.integers(1, len(data) - 1))] ^= draw.draw(st.integers(1, 255))
    try:
        read = decode_configuration(bytes(data))
    except CodecError:
        return
    assert read != configuration and encode_configuration(read) == bytes(data)


def test_released_configuration_bytes_stay_the_same() -> None:
    golden = (GOLDEN / "configuration-1.bin").read_bytes()
    assert encode_configuration(CHANGED) == golden
    assert decode_configuration(golden) == CHANGED


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (initial(FOUNDERS), "version 0"),
        (msgspec.structs.replace(CHANGED, version=6), "later version"),
        (msgspec.structs.replace(CHANGED, voters=()), "the configuration has no voters"),
        (msgspec.structs.replace(CHANGED, voters=CHANGED.voters[::-1]), "not sorted"),
        (msgspec.structs.replace(CHANGED, voters=(FOUNDERS[0], FOUNDERS[0])), "one occurs twice"),
        (msgspec.structs.replace(CHANGED, learners=(Member("r1#7"),)), "twice"),
        (msgspec.structs.replace(CHANGED, learners=(Member("r4#0"),)), "not a valid member ID"),
        (msgspec.structs.replace(CHANGED, voters=tuple(Member(f"v{n}") for n in range(10))), "length"),
    ],
)
def test_invalid_configuration_is_neither_encoded_nor_decoded(wrong: Configuration, sentence: str) -> None:
    with pytest.raises(CodecError, match=sentence):
        encode_configuration(wrong)
    raw = bytes([EntryKind.CONFIGURATION, 1]) + msgspec.msgpack.encode(wrong)
    with pytest.raises(CodecError, match=sentence):
        decode_configuration(raw)


def test_unknown_format_or_field_is_rejected_by_name() -> None:
    data = encode_configuration(CHANGED)
    with pytest.raises(CodecError, match="format 02"):
        decode_configuration(data[:1] + b"\x02" + data[2:])
    longer = [*msgspec.msgpack.decode(data[2:]), 1]
    with pytest.raises(CodecError, match="cannot be decoded"):
        decode_configuration(data[:2] + msgspec.msgpack.encode(longer))


def test_member_id_contains_name_and_incarnation_and_a_founder_has_a_bare_name() -> None:
    assert (name_of("r2#6"), incarnation_of("r2#6")) == ("r2", 6)
    assert (name_of("r2"), incarnation_of("r2")) == ("r2", 0)
    assert identity_of("r2", 6) == "r2#6"
    assert not unknown().voters and initial(FOUNDERS[::-1]).voters == FOUNDERS

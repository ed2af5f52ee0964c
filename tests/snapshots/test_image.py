"""Properties of the image: round trip, one canonical form, and no unchecked content."""

from __future__ import annotations

from typing import Any

import immutables
import msgspec
import pytest
from hypothesis import given, settings

from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import features
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.messages.entries import Batch, CachedReply, Session
from forebay.replica.messages.features import ReleaseNeeded
from forebay.replica.model.jobs import Job
from forebay.replica.state.derived import derive
from forebay.replica.state.digest import state_digest
from forebay.replica.state.invariants import find_violations
from forebay.replica.state.session_replies import SessionReplies
from forebay.replica.state.state import EMPTY, TABLES, State, Table
from forebay.replica.values.command_ids import encode_session_command_id, reply_key
from forebay.replica.values.units import Instant, Revision
from forebay.snapshots.image import (
    CAPACITY,
    END,
    HEADER,
    SLICE_BYTES,
    SLICE_RECORDS,
    Image,
    ImageRejected,
    Slice,
    SnapshotHeader,
    to_sections,
)
from forebay.wal.configuration import ConfigurationAt
from tests.snapshots.states import (
    DIGEST,
    MEMBERS,
    MIB,
    from_sections,
    images,
    ledgers,
    many_jobs,
    number_of,
    small_image,
)

_replace = msgspec.structs.replace


def _through(image: Image) -> Image:
    return from_sections((piece.section, piece.payload) for piece in to_sections(image))


def _altered(image: Image, section: int, change: Any) -> list[tuple[int, bytes]]:
    """Return the slices of the image with the decoded content of one section changed."""
    return [
        (piece.section, msgspec.msgpack.encode(change(msgspec.msgpack.decode(piece.payload))))
        if piece.section == section
        else (piece.section, piece.payload)
        for piece in to_sections(image)
    ]


@given(images)
def test_state_survives_a_round_trip_with_the_same_digest(image: Image) -> None:
    assert find_violations(image.state) == []
    back = _through(image)
    assert back == image
    assert state_digest(back.state) == state_digest(image.state)


@given(images)
def test_equal_states_have_equal_bytes_for_any_insertion_order(image: Image) -> None:
    shuffled: dict[str, Any] = {}
    for field in ("pools", "nodes", "jobs", "buffers"):
        filled: immutables.Map[Any, Any] = immutables.Map()
        for key, record in reversed(list(getattr(image.state, field).items())):
            filled = filled.set(key, record)
        shuffled[field] = filled
    other = _replace(image, state=_replace(image.state, **shuffled))
    assert list(to_sections(other)) == list(to_sections(image))


def test_empty_state_survives_a_round_trip() -> None:
    image = Image(EMPTY, 1, 1, DIGEST)
    assert _through(image) == image


@settings(max_examples=60)
@given(ledgers())
def test_image_plus_suffix_equals_the_full_fold_at_every_cut(ledger: list[Batch]) -> None:
    folds = [EMPTY]
    for batch in ledger:
        following = apply_batch(folds[-1], batch)
        assert following is not None
        folds.append(following)
    for cut, state in enumerate(folds):
        resumed: State | None = _through(Image(state, cut + 1, 1, DIGEST)).state
        assert resumed == state
        for batch in ledger[cut:]:
            assert resumed is not None
            resumed = apply_batch(resumed, batch)
        assert resumed == folds[-1]
        assert resumed is not None and state_digest(resumed) == state_digest(folds[-1])


def test_slices_stay_small_and_breathe_follows_each() -> None:
    image = many_jobs(3000)
    breaths = 0

    def breathe() -> None:
        nonlocal breaths
        breaths += 1

    pieces = list(to_sections(image, breathe=breathe))
    assert all(piece.records <= SLICE_RECORDS for piece in pieces)
    assert all(len(piece.payload) < 2 * SLICE_BYTES for piece in pieces)
    assert breaths >= len(pieces) - 2
    assert len(pieces) > 3 * 3000 // SLICE_RECORDS


SMALL = ("jobs", "buffers", "pools", "nodes", "receipts")
"""Tables of which the small image has records."""

DERIVED = frozenset(
    {
        "held_bytes",
        "kept",
        "unfinished",
        "finished",
        "on_node",
        "holders",
        "operations",
        "arrays",
        "named",
        "using",
        "use",
        "moving",
        "destinations",
    }
)
"""Maps of a State that loading computes again."""


def test_every_field_of_state_is_in_the_image_or_derived() -> None:
    maps = {table.field for table in TABLES}
    assert set(State.__struct_fields__) - DERIVED - maps <= set(SnapshotHeader.__struct_fields__)


def test_section_numbers_are_unique() -> None:
    numbers = [HEADER, CAPACITY, END, *(table.section for table in TABLES)]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("table", [table for table in TABLES if table.field in SMALL], ids=lambda table: table.field)
def test_snapshot_with_additional_fields_is_rejected_by_section_name(table: Table) -> None:
    def grown(records: list[Any]) -> list[Any]:
        return [[*record, 1] if table.own_key else [record[0], [*record[1], 1]] for record in records]

    with pytest.raises(ImageRejected, match=rf"^section {table.field} has records with more fields .*newer release"):
        from_sections(_altered(small_image(), table.section, grown))


def test_snapshot_with_missing_fields_is_read_with_their_defaults() -> None:
    image = small_image()
    jobs = _altered(image, number_of("jobs"), lambda jobs: [job[: len(Job.__struct_fields__) - 1] for job in jobs])
    assert from_sections(jobs) == image


def _set(position: int, value: Any) -> Any:
    def change(content: Any) -> Any:
        content[position] = value
        return content

    return change


def _in_first(position: int, value: Any) -> Any:
    def change(content: Any) -> Any:
        content[0][position] = value
        return content

    return change


def counts(jobs: int) -> Any:
    """Return a change that makes the header announce this number of jobs."""
    said = [[number_of(field), jobs if field == "jobs" else 1] for field in SMALL]
    return _set(3, [[section, count] for section, count in said if count])


REFUSED: tuple[tuple[str, int, Any, str], ...] = (
    ("index 0", HEADER, _set(0, 0), "header has a record that cannot be read"),
    ("index too large", HEADER, _set(0, 2**63), "header has a record"),
    ("term 0", HEADER, _set(1, 0), "header has a record"),
    ("short digest", HEADER, _set(2, b"x"), "header has a record"),
    ("counts out of order", HEADER, _set(3, [[40, 1], [10, 1]]), "its header lists the sections"),
    ("many pools", HEADER, _set(3, [[40, 10**6]]), "its header announces 1000000 pools; at most 256"),
    (
        "fewer jobs than said",
        HEADER,
        counts(2),
        "section jobs has 1 records; the header announces 2",
    ),
    (
        "more jobs than said",
        HEADER,
        counts(0),
        "section jobs has more than the 0 records",
    ),
    ("a job twice", number_of("jobs"), lambda jobs: jobs * 2, "section jobs: 1 follows 1, out of order"),
    ("an empty slice", number_of("jobs"), lambda jobs: [], "section jobs has an empty slice"),
    (
        "an unknown job state",
        number_of("jobs"),
        _in_first(2, 99),
        "section jobs has a record .*Invalid enum",
    ),
    ("a long zero", number_of("jobs"), lambda jobs: [[*jobs[0][:3], 1.0, *jobs[0][4:]]], "section jobs has a record"),
    ("not a list", number_of("jobs"), lambda jobs: {"a": 1}, "section jobs has a record that cannot be read"),
    ("a job id over next", HEADER, _set(10, 1), "an invariant is violated: job 1"),
    (
        "free too large",
        CAPACITY,
        _in_first(2, 96 * MIB),
        "pool 'fast'.* says 8388608 bytes held and 100663296",
    ),
    ("held too small", CAPACITY, _in_first(1, 0), "pool 'fast': the snapshot says 0 bytes held"),
    (
        "both, consistent",
        CAPACITY,
        lambda rows: [["fast", 0, 96 * MIB]],
        "'fast'.*its buffers give 8388608 held",
    ),
    ("another pool", CAPACITY, _in_first(0, "slow"), "pool 'slow'"),
    (
        "a buffer in no pool",
        number_of("buffers"),
        _in_first(2, "gone"),
        "8388608 bytes of pool 'gone', which does not",
    ),
    ("a smaller grant", number_of("buffers"), _in_first(3, 0), "pool 'fast'"),
    ("another pool size", number_of("pools"), _in_first(1, 80 * MIB), "pool 'fast'"),
    ("a receipt with no id", number_of("receipts"), _in_first(0, b""), "section receipts"),
    ("the end's count", END, lambda total: total + 1, "the end announces 6 records; the header 5"),
)


@pytest.mark.parametrize(("_", "section", "change", "sentence"), REFUSED, ids=[row[0] for row in REFUSED])
def test_altered_image_is_rejected_by_name(_: str, section: int, change: Any, sentence: str) -> None:
    with pytest.raises(ImageRejected, match=sentence):
        from_sections(_altered(small_image(), section, change))


def test_cached_reply_under_a_wrong_key_is_rejected_by_name() -> None:
    image, actor = small_image(), Actor(ActorRole.USER, "ann")
    session = Session(2, actor, Instant(9), Instant(9), 0, 1, 1)
    answers = SessionReplies([(reply_key(2, 1), CachedReply(Revision(3), 1, None, b"", actor))])
    state = _replace(image.state, sessions=immutables.Map({2: session}), answers=answers)
    image = _replace(image, state=derive(state))
    assert _through(image).state == image.state
    for key in (encode_session_command_id(2, 1, 0), b"", b"r" * 16):
        with pytest.raises(ImageRejected, match="section answers"):
            from_sections(_altered(image, number_of("answers"), _in_first(0, key)))


def test_sections_in_a_wrong_order_are_rejected() -> None:
    pieces = list(to_sections(small_image()))
    assert len(pieces) == len(SMALL) + len((HEADER, CAPACITY, END))
    for first in range(len(pieces)):
        for second in range(first + 1, len(pieces)):
            swapped: list[Slice] = pieces.copy()
            swapped[first], swapped[second] = swapped[second], swapped[first]
            with pytest.raises(ImageRejected):
                from_sections((piece.section, piece.payload) for piece in swapped)
        for wrong in (pieces[:first] + pieces[first + 1 :], [*pieces[: first + 1], *pieces[first:]]):
            with pytest.raises(ImageRejected):
                from_sections((piece.section, piece.payload) for piece in wrong)


def test_unknown_section_is_rejected_as_of_a_newer_release() -> None:
    with pytest.raises(ImageRejected, match="section 99 is unknown: a newer release"):
        from_sections([(99, b"\x90")])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"held_bytes": immutables.Map()}, "pool 'fast': this replica counts 0 bytes held"),
        (
            {"jobs": immutables.Map({5: small_image().state.jobs[1]})},
            "section jobs: the record with key 5 names 1",
        ),
        ({"name": "\ud800"}, "section header has a record that cannot be written"),
        ({"revision": -1}, "section header has a record that cannot be read"),
    ],
)
def test_state_that_could_not_be_read_back_is_not_written(change: dict[str, Any], sentence: str) -> None:
    image = small_image()
    with pytest.raises(ImageRejected, match=sentence):
        list(to_sections(_replace(image, state=_replace(image.state, **change))))


def test_record_too_large_to_be_read_is_not_written() -> None:
    with pytest.raises(ImageRejected, match="section jobs has a record of more than"):
        list(to_sections(many_jobs(1, script_bytes=5 * MIB)))


@pytest.mark.parametrize(
    "placed",
    [
        ConfigurationAt(8, MEMBERS),
        ConfigurationAt(0, MEMBERS),
        ConfigurationAt(1, _replace(MEMBERS, voters=())),
        ConfigurationAt(1, _replace(MEMBERS, version=5)),
    ],
    ids=["of a later entry", "of no entry", "it has no voters", "a member of the future"],
)
def test_impossible_members_are_rejected(placed: ConfigurationAt) -> None:
    with pytest.raises(ImageRejected, match="members are not valid"):
        _through(_replace(small_image(), configuration=placed))


@pytest.mark.parametrize(
    ("release", "remedy"),
    [("9.1.0", "start release 9.1.0 or a later one"), ("", "start a later release")],
)
def test_snapshot_above_the_known_feature_level_names_the_release(release: str, remedy: str) -> None:
    above = features.FEATURE_LEVEL_KNOWN + 1

    def raised(header: list[Any]) -> list[Any]:
        # A later release also wrote unknown tables and fields: the level is checked first.
        return [*header[:3], [*header[3], [999, 1]], *header[4:6], above, release, *header[8:], "more"]

    with pytest.raises(ReleaseNeeded) as stopped:
        from_sections(_altered(small_image(), HEADER, raised))
    assert f"snapshot of entry 7, revision {small_image().state.revision}" in str(stopped.value)
    assert f"feature level {above}" in str(stopped.value) and remedy in str(stopped.value)
    assert (stopped.value.level, stopped.value.release) == (above, release)

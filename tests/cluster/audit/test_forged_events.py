"""For any forged events in a ledger, the audit names the entry and never ends with a traceback."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from forebay.cluster.audit.replay import ReplayFailed, finish_replay, from_nothing
from forebay.cluster.cli.exits import ExitCode
from forebay.replica.messages import ReleaseNeeded
from forebay.replica.state import StateDigestMismatch
from forebay.wal import Environment, LedgerEntry
from forebay.wal.codec import CodecError, EntryKind, counted_revision_after, decode_batch, encode_batch, kind_of
from forebay.wal.journal import Entry, Journal
from forebay.wal.records import GENESIS, chain_digest
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, lived, typed
from tests.cluster.audit.sites import batches as of_a_site

FORGERIES = 1_500
TYPED = 12
"""Number of forgeries that are passed to the commands."""

SEED = 35


class Folded(NamedTuple):
    """What `finish_replay` asks of a ledger, of one that agrees with whatever it leads to."""

    applied_revision: int
    applied_digest: bytes


def history() -> list[bytes]:
    return [*map(encode_batch, lived())]


def plain(data: bytes) -> Any:
    return msgspec.msgpack.decode(data[2:])


def leaves(value: Any, at: tuple[int | str, ...] = ()) -> list[tuple[tuple[int | str, ...], Any]]:
    """Return each value in a record with its path."""
    if isinstance(value, list):
        return [(at, value)] + [found for place, one in enumerate(value) for found in leaves(one, (*at, place))]
    if isinstance(value, dict):
        return [(at, value)] + [found for place, one in value.items() for found in leaves(one, (*at, place))]
    return [(at, value)]


def other(value: Any, draw: random.Random) -> Any:
    """Return a different value of a similar form."""
    match value:
        case bool():
            return not value
        case int():
            return draw.choice([0, 1, value + 1, max(0, value - 1), value ^ 1 << draw.randrange(40), -1, 1 << 62])
        case str():
            return draw.choice(["", "no-such-thing", value + "x", value[:-1]])
        case bytes():
            return draw.choice([b"", bytes(len(value)), value[::-1], value + b"x"])
        case list():
            return draw.choice([[], value[:-1], value + value[-1:], value[::-1]])
        case dict():
            return dict(list(value.items())[1:])
        case _:
            return draw.choice([0, "", "node", []])


def forged(data: bytes, draw: random.Random) -> bytes | None:
    """Return a batch with one changed value in its events, or None if it cannot be decoded."""
    batch = plain(data)
    places = [(at, value) for at, value in leaves(batch) if len(at) > 4 and at[0] == 2 and at[2] == 3]
    if not places:
        return None
    at, value = draw.choice(places)
    changed = other(value, draw)
    if changed == value:
        return None
    holder = batch
    for place in at[:-1]:
        holder = holder[place]
    holder[at[-1]] = changed
    made = data[:2] + msgspec.msgpack.encode(batch)
    try:
        decode_batch(made)
    except CodecError:
        return None
    return made


def forgeries(history: list[bytes], count: int, seed: int) -> list[list[bytes]]:
    draw, found = random.Random(seed), list[list[bytes]]()
    while len(found) < count:
        at = draw.randrange(len(history))
        if kind_of(history[at]) is not EntryKind.BATCH:
            continue
        made = forged(history[at], draw)
        if made is not None:
            found.append([*history[:at], made, *history[at + 1 :]])
    return found


def chained_anew(history: list[bytes]) -> list[LedgerEntry]:
    digest, revision, entries = GENESIS, 0, list[LedgerEntry]()
    for index, data in enumerate(history, start=1):
        digest, before = chain_digest(digest, Entry(index, 1, data)), revision
        revision = counted_revision_after(data, before)
        entries.append(LedgerEntry(index, 1, data, digest, before, revision))
    return entries


def rejection_of(history: list[bytes]) -> str:
    """Fold a history as the audit does; return the failure, or None."""
    entries = chained_anew(history)
    replaying = from_nothing(every_digest=True)
    try:
        for entry in entries:
            replaying.take(entry)
        finish_replay(Folded(entries[-1].revision, entries[-1].digest), replaying)  # type: ignore[arg-type]
    except (ReplayFailed, StateDigestMismatch, ReleaseNeeded) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("of", [history, of_a_site], ids=["of_a_few_jobs", "of_an_hour"])
def test_forged_events_fail_at_their_entry(of: Callable[[], list[bytes]]) -> None:
    honest = of()[:120]
    assert rejection_of(honest) == ""
    refused = [rejection_of(one) for one in forgeries(honest, FORGERIES if of is history else FORGERIES // 10, SEED)]
    assert sum(map(bool, refused)) > len(refused) // 4
    assert any("cannot have been decided" in one for one in refused), "none of them led anywhere"


def written(directory: Path, history: list[bytes]) -> None:
    """Write a ledger that was chained again to its end, whatever its events lead to."""
    with Environment.open(
        directory / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(1, REPLICA)
        entries = chained_anew(history)
        journal.append([Entry(one.index, one.term, one.data) for one in entries])
        journal.set_commit(len(entries))
        for one in entries:
            journal.record_applied(Entry(one.index, one.term, one.data), one.revision)
        journal.flush_hints()


def test_audit_commands_exit_with_verification_failed(tmp_path: Path) -> None:
    honest = history()
    worst = [one for one in forgeries(honest, FORGERIES, SEED) if "cannot have been decided" in rejection_of(one)]
    assert len(worst) >= TYPED
    for number, one in enumerate(worst[:TYPED]):
        written(tmp_path / str(number), one)
        for words in (("verify", "--deep"), ("replay",), ("redecide",)):
            result = typed("audit", *words, "--data", tmp_path / str(number))
            assert result.exit_code == ExitCode.VERIFICATION_FAILED, (words, result.output, result.exception)
            assert "the replay fails at entry" in result.stderr

"""How the golden ledgers of this directory were made: by the release that they are named after, from its own tree.

    git archive COMMIT | tar -x -C TREE     # the release; copy tests/golden/*.py there if it does not have them
    cd TREE && python -m tests.golden.make_ledger --into DIRECTORY

`format-1.tar.gz` is what a release leaves on the disks of three replicas that are all stopped. r1 and r2 have the whole
ledger, each with a snapshot at another entry; r3 was stopped earlier, without a snapshot, and has a tail that is not
applied. `format-1.json` is what the release made of it, `format-1.jsonl` what its `forebay ledger dump` printed,
`format-1-words.json` every record, field, tag and wire number that it can write (tests.golden.words),
`format-1-frames.json` what it says to its peers (tests.golden.spoken), and `format-1-requests.json` what it takes from
clients and agents (tests.golden.asked). Once release 1.0 is out, none of them is ever written again: a promise to
everybody's ledgers (law 12).
"""

import argparse
import asyncio
import json
import tarfile
import tempfile
from pathlib import Path
from typing import get_args

import msgspec

from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.messages.events import Event, EventRecord, StateDigested
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY
from forebay.snapshots.finalize import write_snapshot
from forebay.snapshots.image import Image
from forebay.wal.codec import NO_OP, encode_batch
from forebay.wal.configuration import ConfigurationAt, Member, encode_configuration, initial
from forebay.wal.environment import Environment
from forebay.wal.journal import Entry, Journal
from tests.auditing import audit
from tests.contract.day import Repeated, requests
from tests.golden.asked import bodies
from tests.golden.spoken import frames
from tests.golden.words import vocabulary

CLUSTER = "0123456789abcdef" * 2
REPLICAS = ("r1", "r2", "r3")
MAP_SIZE_BYTES = 64 << 20

TERM_OF_THE_FIRST = 5
"""Entries of term 1; the others are of term 2, whose leader appended a no-op."""

BEHIND = 40
"""Entries that r3 has not applied."""

UNSEEN = 25
"""Entries that r3 does not even have."""


def lived() -> list[Batch]:
    """The batches of the recorded day (tests.contract), in which every event of the first feature level happens."""

    async def day() -> list[Batch]:
        repeated = Repeated()
        for line in requests():
            await repeated.do(line)
        return repeated.replica.ledger

    batches = asyncio.run(day())
    founded, *later = batches
    return _digested([_founded(founded), *later])


def _founded(batch: Batch) -> Batch:
    """The batch that founds the cluster, with the id that the directories have."""
    (entry,) = batch.entries
    founded, drawn = entry.events
    event = msgspec.structs.replace(founded, cluster_id=CLUSTER)
    key = drawn.disclosure_key
    command = c.FoundCluster(CLUSTER, event.name, event.site, event.pools, event.nodes, event.filesystems, key)
    digest = c.command_digest(c.Request(entry.id, entry.actor, command))
    events = (event, drawn)
    return msgspec.structs.replace(batch, entries=(msgspec.structs.replace(entry, events=events, digest=digest),))


def _digested(batches: list[Batch]) -> list[Batch]:
    """The batches with the digests that they record made those of the states that they lead to."""
    recorded = {
        event.revision
        for batch in batches
        for entry in batch.entries
        for event in entry.events
        if isinstance(event, StateDigested)
    }
    state, digests, found = EMPTY, dict[int, bytes](), list[Batch]()
    for batch in batches:
        entries = tuple(_of_states(entry, digests) for entry in batch.entries)
        found.append(msgspec.structs.replace(batch, entries=entries))
        state = apply_batch(state, found[-1]) or state
        if state.revision in recorded:
            digests[state.revision] = state_digest(state)
    return found


def _of_states(entry: Settled, digests: dict[int, bytes]) -> Settled:
    """The entry with those digests, and its own."""
    events = tuple(_of_state(event, digests) for event in entry.events)
    if events == entry.events:
        return entry
    (recorded,) = events
    assert isinstance(recorded, StateDigested)
    command = c.RecordStateDigest(recorded.revision, recorded.state)
    digest = c.command_digest(c.Request(entry.id, entry.actor, command))
    return msgspec.structs.replace(entry, events=events, digest=digest)


def _of_state(event: EventRecord, digests: dict[int, bytes]) -> EventRecord:
    return StateDigested(event.revision, digests[event.revision]) if isinstance(event, StateDigested) else event


def make(root: Path) -> dict[str, object]:
    """Write the directories of the three replicas into `root`; return what they come to."""
    batches = lived()
    members = initial(tuple(Member(name) for name in REPLICAS), version=1)
    data = [encode_configuration(members), *map(encode_batch, batches[:3])]
    # What a deposed leader proposed on a revision that was settled by somebody else in the meantime.
    data += [encode_batch(msgspec.structs.replace(batches[1], at=batches[2].at)), NO_OP]
    data += [encode_batch(batch) for batch in batches[3:]]
    entries = [Entry(index, 1 if index <= TERM_OF_THE_FIRST else 2, one) for index, one in enumerate(data, start=1)]
    states, state = [], EMPTY
    by_data = {encode_batch(batch): batch for batch in batches}
    for entry in entries:
        batch = by_data.get(entry.data)
        state = state if batch is None else apply_batch(state, batch) or state
        states.append(state)
    last = len(entries)
    digest = b""
    for name, (has, applied, snapshot) in {
        "r1": (last, last, last // 2),
        "r2": (last, last, last - 3),
        "r3": (last - UNSEEN, last - BEHIND, 0),
    }.items():
        directory = root / name
        with Environment.open(
            directory / "wal", cluster_id=CLUSTER, replica=name, map_size_bytes=MAP_SIZE_BYTES, create=True
        ) as environment:
            journal = Journal(environment)
            journal.set_term(2, "r1")
            journal.append(entries[:has])
            journal.set_commit(applied)
            for entry, after in zip(entries[:applied], states, strict=False):
                digest = journal.record_applied(entry, after.revision)
                if entry.index == snapshot:
                    image = Image(after, snapshot, entry.term, digest, ConfigurationAt(1, members))
            journal.sync()
            digest = journal.applied_digest if name == "r1" else digest
        if snapshot:
            (directory / "snapshots").mkdir()
            write_snapshot(directory / "snapshots", image)
        if name == "r1":
            happened = {type(event).__name__ for one in batches for row in one.entries for event in row.events}
            found = {
                "entries": last,
                "revision": state.revision,
                "state_digest": state_digest(state).hex(),
                "ledger_digest": digest.hex(),
                "events": sorted(happened),
            }
    return found


def packed(root: Path, archive: Path) -> None:
    """Pack the directories without owners and times; lock files are not part of it."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        if member.name.endswith((".lock", "lock.mdb", "/LOCK")):
            return None
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        member.mode = 0o700 if member.isdir() else 0o600
        return member

    with tarfile.open(archive, "w:gz", compresslevel=9) as tar:
        for name in REPLICAS:
            tar.add(root / name, name, filter=plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True, help="where the three files are written")
    parser.add_argument("--name", default="format-1")
    options = parser.parse_args()
    for suffix in (".tar.gz", ".json", ".jsonl", "-words.json", "-frames.json", "-requests.json"):
        if (options.into / f"{options.name}{suffix}").exists():
            parser.error(f"{options.name}{suffix} is there already, and a golden file is never written again")
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        found = make(root)
        dumped = audit("audit", "dump", "--data", str(root / "r1"))
        assert dumped.exit_code == 0, dumped.output
        packed(root, options.into / f"{options.name}.tar.gz")
    (options.into / f"{options.name}.jsonl").write_text(dumped.stdout, encoding="utf-8")
    (options.into / f"{options.name}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    words = json.dumps(vocabulary(), indent=1, sort_keys=True)
    (options.into / f"{options.name}-words.json").write_text(words + "\n", encoding="utf-8")
    spoken = json.dumps(frames(), indent=1)
    (options.into / f"{options.name}-frames.json").write_text(spoken + "\n", encoding="utf-8")
    taken = json.dumps(bodies(), indent=1, sort_keys=True)
    (options.into / f"{options.name}-requests.json").write_text(taken + "\n", encoding="utf-8")
    missing = {kind.__name__ for kind in get_args(Event)} - set(found["events"])  # type: ignore[call-overload]
    print(f"{found['entries']} entries; events that did not happen: {', '.join(sorted(missing)) or 'none'}")


if __name__ == "__main__":
    main()

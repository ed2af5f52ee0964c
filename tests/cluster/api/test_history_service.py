"""The index by job holds what a walk over all states says, whatever becomes of its files."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import settings
from msgspec.structs import replace

from forebay.cluster.api.history_service.event_pages import EventPages, JobOwner
from forebay.cluster.api.history_service.follower import Follower
from forebay.cluster.api.history_service.frames import (
    REJECTED,
    ChangesQuery,
    ChangesReply,
    CommandEvents,
    EventFilter,
    EventPageQuery,
    EventPageReply,
    JobRecord,
    QueryFailure,
    RecordsQuery,
    WhyQuery,
    WhyReply,
)
from forebay.cluster.api.history_service.queries import HistoryQueries
from forebay.cluster.api.render.jobs import why_view
from forebay.cluster.api.render.reasons import JobVerdicts
from forebay.cluster.schemas.event_kinds import kind_name
from forebay.cluster.schemas.ledger import DiffAnswer
from forebay.replica.fold.apply import apply_entry
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.events import ExternalJobSetUp, JobSubmitted, concerns_cluster, jobs_of
from forebay.replica.model.job_states import JobState
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import verdicts_of
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import NEVER, Instant, Revision
from forebay.replica.values.verdicts import Verdict
from forebay.replica.views.jobs import verdict_of
from forebay.snapshots.finalize import SnapshotName
from forebay.snapshots.image import Image
from forebay.snapshots.store import SnapshotStore
from forebay.wal.codec import NO_OP, decode_batch, encode_batch
from forebay.wal.environment import Environment
from forebay.wal.job_index import NOTHING, Hole, IndexPosition, JobIndex, JobIndexBroken, JobIndexRow
from forebay.wal.journal import Entry, Journal
from forebay.wal.ledger import Ledger, export_history, fill
from tests.cluster.audit.ledgers import lived
from tests.contract.in_memory import records_of
from tests.replica.test_whole_histories import WholeHistories
from tests.replica.world import World

CLUSTER, REPLICA = "0" * 32, "r1"


class Replica:
    """A replica's directory, whose ledger is given entries, and a follower beside it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._open = ExitStack()
        self.environment = self._open.enter_context(
            Environment.open(
                directory / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=64 << 20, create=True
            )
        )
        self.journal = Journal(self.environment)
        self.journal.set_term(1, REPLICA)
        self.state = EMPTY
        self.settled: list[tuple[Batch, State]] = []
        """Each command as a batch of its own, and the state after it."""
        self.ends: list[int] = []
        """For each of them, how many are settled when all that was settled with it is."""
        self.now_s = 0.0
        self.snapshots = SnapshotStore(directory / "snapshots", 3, cluster_id=CLUSTER)
        self.follower = self.restarted()

    def restarted(self) -> Follower:
        """Return a follower as after a SIGKILL: what it has not written is lost."""
        self.jobs = JobIndex(self.directory / "index", map_size_bytes=64 << 20)
        self.follower = Follower(
            Ledger(self.environment),
            snapshots=self.directory / "snapshots",
            index=self.jobs,
            monotonic_s=lambda: self.now_s,
            images=self.directory / "index" / "states",
        )
        return self.follower

    def kill(self) -> None:
        self.jobs.close()

    def close(self) -> None:
        self.jobs.close()
        self.snapshots.close()
        self._open.close()

    def settle(self, batches: Sequence[Batch]) -> None:
        """Have the ledger hold these as one entry, where they are of one moment, else as one each."""
        batch = batches[0]
        if len({one.at for one in batches}) == 1:
            batch = Batch(batch.base, batch.at, tuple(entry for one in batches for entry in one.entries))
            batches = (batch,)
        for one in batches:
            self.append(encode_batch(one), one)

    def append(self, data: bytes, batch: Batch | None = None) -> None:
        entry = Entry(self.journal.last_index + 1, 1, data)
        if batch is not None and batch.base == self.state.revision:
            self.ends += [len(self.settled) + len(batch.entries)] * len(batch.entries)
            for position, command in enumerate(batch.entries):
                alone = Batch(Revision(batch.base + position), batch.at, (command,))
                self.state = apply_entry(self.state, command, batch.at)
                self.settled.append((alone, self.state))
        self.journal.append([entry])
        self.journal.set_commit(entry.index)
        self.journal.record_applied(entry, self.state.revision)
        self.journal.flush_hints()

    def save(self) -> None:
        """Write a snapshot of the present state."""
        index = self.journal.last_index
        self.snapshots.save_in_background(Image(self.state, index, 1, self.journal.applied_digest)).result()

    def expected(self, job: int) -> tuple[JobRecord, ...]:
        concerned = [
            number
            for number, (batch, _) in enumerate(self.settled)
            if any(job in jobs_of(event) for event in batch.entries[0].events)
        ]
        found = []
        for number, following in pairwise([*concerned, len(self.settled)]):
            batch, after = self.settled[number]
            (record,) = records_of(job, batch, after)
            if record.state == JobState.PENDING.name:
                # Why it waited when all that was settled at once was, or just before more happened to it.
                _, then = self.settled[min(following, self.ends[number]) - 1]
                record = replace(record, reason=JobVerdicts(then).reason(job))
            found.append(record)
        return tuple(found)

    def records(self, job: int) -> tuple[JobRecord, ...]:
        return HistoryQueries(self.follower, float).records(RecordsQuery(job, 10_000, False)).records

    def check(self) -> None:
        """Follow to the end; then every job's records are those that a walk over all states gives."""
        follow(self.follower)
        assert self.follower.index == self.journal.last_index
        for job in range(1, int(self.state.next_job) + 1):
            assert self.records(job) == self.expected(job)


def follow(follower: Follower) -> None:
    while follower.step():
        pass


@pytest.fixture
def replica(tmp_path: Path):  # type: ignore[no-untyped-def]
    made = Replica(tmp_path)
    yield made
    made.close()


class Indexed(WholeHistories):
    """Whatever happened, in batches of whatever size, with a follower that is killed now and then."""

    def teardown(self) -> None:
        super().teardown()
        chance = random.Random(len(self.world.ledger))  # a test's, drawn by the history's length
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            patch.setattr("forebay.cluster.api.history_service.follower.IMAGE_REVISIONS", 5)
            patch.setattr("forebay.cluster.api.history_service.follower.IMAGES_BYTES_MAX", 8_000)
            patch.setattr("forebay.cluster.api.history_service.follower.JOBS_PER_REVISION", 100)
            patch.setattr("forebay.cluster.api.history_service.queries.JOBS_PER_REVISION", 100)
            replica = Replica(Path(directory))
            rest = list(self.world.ledger)
            while rest:
                count = chance.choice((1, 1, 2, 5, 40))
                replica.settle(rest[:count])
                del rest[:count]
                match chance.randrange(8):
                    case 0:
                        replica.append(NO_OP)
                    case 1:
                        replica.append(encode_batch(self.world.ledger[0]), self.world.ledger[0])  # void
                    case 2:
                        replica.follower.step()
                        replica.follower.write()
                    case 3:
                        replica.follower.step()
                        replica.kill()
                        replica.restarted()
                    case 4 if replica.state.revision:
                        replica.save()
            replica.check()
            self._check_moments(replica, chance)
            check_stories(replica, chance)
            check_differences(replica, chance)
            replica.kill()
            replica.restarted()
            replica.check()
            replica.close()

    def _check_moments(self, replica: Replica, chance: random.Random) -> None:
        questions = HistoryQueries(replica.follower, float)
        for _, state in chance.sample(replica.settled, min(8, len(replica.settled))):
            assert questions.state_at(int(state.revision)) == state
            for job in list(state.jobs)[:3]:
                found = questions.why(WhyQuery(1, 0, int(state.revision), NEVER, job, None, ""))
                assert isinstance(found, WhyReply)
                assert found.view == why_view(state, job, verdict_of(state, job))
                assert found.user == state.jobs[job].request.user


THINGS = {
    "pool": "pools", "filesystem": "filesystems", "node": "nodes", "partition": "partitions",
    "reservation": "reservations", "buffer": "persistent", "account": "accounts", "qos": "qos",
    "license": "licenses", "scheduler": "schedulers",
}  # fmt: skip


def told(found: CommandEvents) -> list[tuple[int, str, str]]:
    """Return revision, name and owner of what a command came to; a rejection is an event of its own."""
    (entry,) = decode_batch(found.batch).entries
    if entry.rejection is not None:
        return [(found.revision, REJECTED, "")]
    names = [kind_name(type(event)) for event in entry.events]
    return [(found.revision, name, user) for name, user in zip(names, found.users, strict=True)]


def looked_up(replica: Replica, sought: EventFilter, after: int, until: int) -> list[tuple[int, str, str]]:
    """Return what a story must tell, from all that was settled."""
    owners: dict[int, tuple[str, str]] = {}
    found: list[tuple[int, str, str]] = []
    for batch, state in replica.settled:
        (entry,) = batch.entries
        asked, revision = entry.actor.name, int(state.revision)
        for event in entry.events:
            if isinstance(event, JobSubmitted | ExternalJobSetUp):
                owners |= dict.fromkeys(jobs_of(event), (event.request.user, event.request.effective_options.account))
        if not after < revision <= until or sought.actor not in ("", asked):
            continue
        if entry.rejection is not None:
            mine = {sought.user, sought.own} <= {"", asked} and not (sought.job or sought.of or sought.account)
            found += [(revision, REJECTED, "")] if mine and sought.kinds in ((), (REJECTED,)) else []
            continue
        for event in entry.events:
            name, jobs = kind_name(type(event)), jobs_of(event)
            user, account = owners[jobs[0]] if jobs else ("", "")
            about = {"buffer": "persistent"}.get(sought.of, sought.of)
            thing = getattr(event, "name" if sought.of == "buffer" else sought.of, "") if sought.of else ""
            is_meant = (
                (name in sought.kinds if sought.kinds else bool(jobs) or concerns_cluster(type(event)))
                and (not sought.job or sought.job in jobs)
                and sought.user in ("", user, asked)
                and sought.account in ("", account)
                and (not jobs or sought.only in ("", user))
                and (not sought.of or name.startswith(f"{about}_"))
                and sought.name in ("", getattr(thing, "name", thing))
            )
            found += [(revision, name, user)] if is_meant else []
    return found


def check_stories(replica: Replica, chance: random.Random) -> None:
    """Ask for what happened in all ways, in stretches of all lengths: it is what looking at everything finds."""
    questions, last = HistoryQueries(replica.follower, float), int(replica.state.revision)
    entries = [batch.entries[0] for batch, _ in replica.settled]
    kinds = sorted({kind_name(type(event)) for entry in entries for event in entry.events} | {REJECTED})
    users = sorted({entry.actor.name for entry in entries})
    names = [name for table in THINGS.values() for name in getattr(replica.state, table)] or ["none"]
    for sought in (
        EventFilter(),
        EventFilter(job=chance.randint(1, int(replica.state.next_job))),
        EventFilter(user=chance.choice(users)),
        EventFilter(user=chance.choice(users), account="a"),
        EventFilter(actor=chance.choice(users)),
        EventFilter(kinds=(chance.choice(kinds),)),
        EventFilter(kinds=(REJECTED,), own=chance.choice(users)),
        EventFilter(of=chance.choice(sorted(THINGS))),
        EventFilter(of=chance.choice(sorted(THINGS)), name=chance.choice(names)),
        EventFilter(only=chance.choice(users), own=chance.choice(users)),
    ):
        after = chance.randint(0, max(0, last - 1))
        until = chance.choice((0, chance.randint(after, last)))
        expected = looked_up(replica, sought, after, until or last)
        limit, found = chance.choice((1, 3, 100_000)), []
        read, end = after, until or last
        while True:
            story = questions.event_page(EventPageQuery(read, NEVER, end, NEVER, sought, limit))
            assert isinstance(story, EventPageReply) and story.last == end
            found += [row for happened in story.happened for row in told(happened)]
            assert len(story.happened) <= limit and story.read <= end
            if story.read == end:
                break
            assert story.read > read, "each stretch goes on"
            read = story.read
        assert found == expected, sought


def test_a_job_of_which_nobody_knows_whose_it_was_is_no_user_s_to_see(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    for batch in lived():
        replica.settle([batch])
    follow(replica.follower)
    monkeypatch.setattr(EventPages, "_read_owner", lambda *asked: JobOwner())
    last = int(replica.state.revision)

    def about_jobs(sought: EventFilter) -> int:
        story = HistoryQueries(replica.follower, float).event_page(
            EventPageQuery(0, NEVER, last, NEVER, sought, 10_000)
        )
        assert isinstance(story, EventPageReply)
        commands = [entry for one in story.happened for entry in decode_batch(one.batch).entries]
        return sum(bool(jobs_of(event)) for entry in commands for event in entry.events)

    assert about_jobs(EventFilter()) > 0
    assert about_jobs(EventFilter(only="ada", own="ada")) == 0


def check_differences(replica: Replica, chance: random.Random) -> None:
    """Compare two moments: each record that differs is there and no other, with who changed it last."""
    questions = HistoryQueries(replica.follower, float)
    (_, before), (_, after) = sorted(chance.choices(replica.settled, k=2), key=lambda one: one[1].revision)
    asked = ChangesQuery(1, 0, int(before.revision), NEVER, int(after.revision), NEVER, 0, "", "", "", True, 10_000)
    changes = questions.changes(asked)
    assert isinstance(changes, ChangesReply)
    found = {(one.kind, one.name): one for one in msgspec.json.decode(changes.content, type=DiffAnswer).changes}
    differing = {
        ("job", str(job))
        for job in {*before.jobs, *after.jobs}
        if (before.jobs.get(job), before.buffers.get(job)) != (after.jobs.get(job), after.buffers.get(job))
    }
    for kind, table in THINGS.items():
        were, are = getattr(before, table), getattr(after, table)
        differing |= {(kind, name) for name in {*were, *are} if were.get(name) != are.get(name)}
    used = {
        ("pool", name)
        for name in {*before.pools, *after.pools}
        if before.held_bytes.get(name, 0) != after.held_bytes.get(name, 0)
    }
    assert {one for one in found if one[0] in ("job", *THINGS)} == differing | used
    for (kind, name), change in found.items():
        if kind == "job":
            concerning = [
                int(state.revision)
                for batch, state in replica.settled
                if before.revision < state.revision <= after.revision
                and any(int(name) in jobs_of(event) for event in batch.entries[0].events)
            ]
            assert change.revision == (concerning[-1] if concerning else None)
        elif kind in THINGS and (kind, name) in differing:
            table = THINGS[kind]
            last = max(
                int(two.revision)
                for (_, one), (_, two) in pairwise([(None, before), *replica.settled[int(before.revision) :]])
                if two.revision <= after.revision and getattr(one, table).get(name) != getattr(two, table).get(name)
            )
            assert change.revision is not None and change.revision >= last, (kind, name)


TestHistoriesByTheIndex = Indexed.TestCase
TestHistoriesByTheIndex.settings = settings(max_examples=12, stateful_step_count=40, deadline=None)


def test_an_index_goes_on_where_it_was_and_reads_nothing_twice(replica: Replica) -> None:
    batches = lived()
    for batch in batches[:10]:
        replica.settle([batch])
    follow(replica.follower)
    replica.follower.write()
    replica.kill()
    for batch in batches[10:]:
        replica.settle([batch])
    replica.restarted()
    assert replica.jobs.position.index == 10
    replica.check()


def test_an_index_that_was_killed_before_it_wrote_lacks_nothing_afterwards(replica: Replica) -> None:
    for batch in lived():
        replica.settle([batch])
    replica.follower.step()
    replica.kill()
    replica.restarted()
    assert replica.jobs.position == NOTHING
    replica.check()


def test_an_index_that_is_ahead_of_its_ledger_or_of_another_one_is_made_anew(replica: Replica, tmp_path: Path) -> None:
    for batch in lived():
        replica.settle([batch])
    replica.check()
    last = replica.journal.last_index
    for position in (
        IndexPosition(last + 1, int(replica.state.revision), replica.journal.applied_digest),
        IndexPosition(last, int(replica.state.revision), bytes(32)),
    ):
        replica.jobs.add({1: [JobIndexRow(1 << 40, b"no note")]}, position)
        replica.kill()
        replica.restarted()
        assert replica.jobs.position == NOTHING
        replica.check()
        replica.follower.write()


def zeroed(content: bytearray) -> None:
    content[4096 * 2 :] = bytes(len(content) - 4096 * 2)


def cut(content: bytearray) -> None:
    del content[4096 * 3 :]


def foreign(content: bytearray) -> None:
    content[:] = b"not a database of any kind " * 1000


def emptied(content: bytearray) -> None:
    content.clear()


@pytest.mark.parametrize("damage", [zeroed, cut, foreign, emptied])
def test_an_index_whose_file_is_damaged_is_made_anew(replica: Replica, damage: Callable[[bytearray], None]) -> None:
    for batch in lived():
        replica.settle([batch])
    replica.check()
    replica.follower.write()
    replica.kill()
    file = replica.directory / "index" / "data.mdb"
    content = bytearray(file.read_bytes())
    damage(content)
    file.write_bytes(content)
    replica.restarted()
    try:
        replica.check()
    except JobIndexBroken:  # as its process finds out, which then does this
        replica.follower.begin_anew()
        replica.check()


def test_a_row_whose_checksum_does_not_hold_is_never_answered(replica: Replica) -> None:
    for batch in lived():
        replica.settle([batch])
    replica.check()
    replica.follower.write()
    replica.kill()
    file = replica.directory / "index" / "data.mdb"
    content = file.read_bytes()
    assert b"BurstBufferStageIn" in content
    file.write_bytes(content.replace(b"BurstBufferStageIn", b"BurstBufferStageOu"))
    replica.restarted()
    with pytest.raises(JobIndexBroken):
        for job in range(1, 5):
            replica.records(job)


def test_why_jobs_wait_that_were_submitted_at_once_is_asked_once_for_all(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(index: SchedulingIndex, jobs: Sequence[int], at: Instant) -> dict[int, Verdict]:
        asked.append(len(jobs))
        return verdicts_of(index, jobs, at)

    monkeypatch.setattr("forebay.cluster.api.history_service.follower.verdicts_of", counted)
    world = World({"fast": 100})
    world.submit("capacity=100")
    before = len(world.ledger)
    for _ in range(40):
        world.submit("capacity=100")
    for batch in world.ledger[:before]:
        replica.settle([batch])
    follow(replica.follower)
    asked.clear()
    replica.settle(world.ledger[before:])
    replica.check()
    assert asked == [40]


def test_states_are_kept_on_the_disk_for_questions_after_a_restart(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.IMAGE_REVISIONS", 3)
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.IMAGES_BYTES_MAX", 8_000)
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.JOBS_PER_REVISION", 100)
    replica.kill()
    replica.restarted()
    for batch in lived():
        replica.settle([batch])
    replica.check()
    replica.follower.write()
    states = replica.directory / "index" / "states"
    kept = sorted(name.index for one in states.iterdir() if (name := SnapshotName.parse(one.name)))
    assert sum(one.stat().st_size for one in states.iterdir()) <= 8_000
    # Evenly spread, from the first to the newest, whatever was removed in between.
    assert kept[0] == 3 and replica.state.revision - kept[-1] < 6
    assert max(after - before for before, after in itertools.pairwise(kept)) <= 9
    replica.kill()
    # All before the first of them can no longer be decoded: what is asked about behind it does not read it.
    first = min(SnapshotName.parse(one.name) or SnapshotName(0, 0) for one in states.iterdir()).index
    monkeypatch.setattr("forebay.cluster.api.history_service.queries.decode_batch", not_before(replica, first))
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.decode_batch", not_before(replica, first))
    replica.restarted()
    questions = HistoryQueries(replica.follower, float)
    for number, (_, state) in enumerate(replica.settled, start=1):
        if number > first:
            assert questions.state_at(int(state.revision)) == state
    for one in states.iterdir():
        one.write_bytes(one.read_bytes()[:-3])
    monkeypatch.undo()
    replica.kill()
    replica.restarted()
    replica.check()


def test_states_are_thinned_out_where_they_take_room_that_the_journal_needs(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.IMAGE_REVISIONS", 3)
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.JOBS_PER_REVISION", 100)
    states = replica.directory / "index" / "states"

    def kept_bytes() -> int:
        return sum(one.stat().st_size for one in states.iterdir())

    disk_bytes = 24_000

    def room(directory: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=disk_bytes - kept_bytes(), f_frsize=1)

    replica.kill()
    replica.restarted()
    monkeypatch.setattr("forebay.cluster.system.descriptors.os.statvfs", room)
    for batch in lived():
        replica.settle([batch])
    replica.check()
    assert 0 < kept_bytes() <= disk_bytes / 4
    monkeypatch.undo()


def not_before(replica: Replica, index: int) -> Callable[[bytes], Batch]:
    """Return a decoder that refuses what was settled up to an entry."""
    refused = {replica.journal.entry(number).data for number in range(1, index + 1)}

    def decoded(data: bytes) -> Batch:
        assert data not in refused
        return decode_batch(data)

    return decoded


def test_a_moment_is_found_by_its_time(replica: Replica) -> None:
    for batch in lived():
        replica.settle([batch])
    follow(replica.follower)
    questions = HistoryQueries(replica.follower, float)
    for batch, state in replica.settled:
        if 1 not in state.jobs:
            continue
        found = questions.why(WhyQuery(1, 0, 0, batch.at, 1, None, ""))
        assert isinstance(found, WhyReply)
        assert found.view.revision == max(after.revision for one, after in replica.settled if one.at <= batch.at)
    before = questions.why(WhyQuery(1, 0, 0, replica.settled[0][0].at - 1, 1, None, ""))
    assert isinstance(before, QueryFailure) and before.revision == 0


def test_history_that_a_snapshot_replaced_is_a_hole_until_it_is_held_again(tmp_path: Path) -> None:
    source, replica = (Replica(tmp_path / name) for name in ("source", "replica"))
    batches = lived()
    for number, batch in enumerate(batches[:20], start=1):
        source.settle([batch])
        if number <= 5:
            replica.settle([batch])
    follow(replica.follower)
    source.save()
    (snapshot,) = (source.directory / "snapshots").glob("*.fbs")
    (replica.directory / "snapshots" / snapshot.name).write_bytes(snapshot.read_bytes())
    replica.journal.reset_to(20, 1, source.journal.applied_digest, Revision(source.state.revision))
    replica.journal.sync()
    replica.journal.flush_hints()
    replica.state, replica.settled, replica.ends = source.state, list(source.settled), list(source.ends)
    follow(replica.follower)
    assert (replica.follower.index, replica.follower.holes) == (20, (Hole(6, 20),))
    for batch in batches[20:]:
        source.settle([batch])
        replica.settle([batch])
    follow(replica.follower)
    answered = HistoryQueries(replica.follower, float).records(RecordsQuery(1, 10_000, False))
    lacking = {int(after.revision) for _, after in source.settled[5:20]}
    assert not answered.whole
    assert list(answered.records) == [one for one in source.expected(1) if one.revision not in lacking]
    before, last = int(source.settled[4][1].revision), int(source.state.revision)
    for sought in (EventFilter(), EventFilter(job=1), EventFilter(kinds=(REJECTED,)), EventFilter(of="pool")):
        questions = HistoryQueries(replica.follower, float)
        for after, until in ((0, before), (int(source.settled[19][1].revision), last)):
            story = questions.event_page(EventPageQuery(after, NEVER, until, NEVER, sought, 10_000))
            assert isinstance(story, EventPageReply), (sought, story)
        lacking_some = questions.event_page(EventPageQuery(0, NEVER, last, NEVER, sought, 10_000))
        if isinstance(lacking_some, EventPageReply):
            assert lacking_some.read < last and all(one.revision <= before for one in lacking_some.happened)
            query = EventPageQuery(lacking_some.read, NEVER, last, NEVER, sought, 10_000)
            lacking_some = questions.event_page(query)
        assert isinstance(lacking_some, QueryFailure) and "is not available" in lacking_some.sentence, sought
    replica.kill()
    replica.restarted()
    follow(replica.follower)
    ledger = Ledger(source.environment)
    (gap,) = Ledger(replica.environment).gaps()
    assert fill(replica.environment, gap, export_history(ledger, gap.last_index, entries_max=15)) is None
    replica.check()
    assert replica.follower.holes == ()
    for one in (source, replica):
        one.close()


def test_the_states_that_are_kept_are_bounded_and_still_answer_everything(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.POINT_REVISIONS", 1)
    monkeypatch.setattr("forebay.cluster.api.history_service.follower.POINTS_MAX", 8)
    replica.kill()
    replica.restarted()
    for batch in lived():
        replica.settle([batch])
    follow(replica.follower)
    questions = HistoryQueries(replica.follower, float)
    for _, state in replica.settled:
        assert questions.state_at(int(state.revision)) == state
        assert len(replica.follower.points) <= 8 + 1

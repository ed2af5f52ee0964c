"""States built from records, and ledgers built from events, for the properties of snapshots."""

from __future__ import annotations

from collections.abc import Iterable

import immutables
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.messages.entries import Batch, CachedReply, Entry
from forebay.replica.model.buffers import Access, Buffer, BufferState, Transfer, TransferKind
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.jobs import Hold, Job
from forebay.replica.model.nodes import Node
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import BufferRequest, Dependency, DependencyKind, JobRequest
from forebay.replica.model.stages import Stage
from forebay.replica.state.derived import derive
from forebay.replica.state.single_replies import SingleReplies
from forebay.replica.state.state import TABLES, State
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import Instant, Revision
from forebay.snapshots.image import Assembly, Image
from forebay.wal.configuration import Change, ChangeKind, Configuration, ConfigurationAt, Member

MIB = 1024 * 1024
DIGEST = bytes(range(32))

words = st.text(st.characters(codec="utf-8"), max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789-ü漢", min_size=1, max_size=8)
numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**63 - 1))
sizes = st.one_of(st.integers(0, 300), st.integers(0, 2**50))

PAIRS: tuple[tuple[JobState, BufferState], ...] = (
    (JobState.PENDING, BufferState.PENDING),
    (JobState.PENDING, BufferState.STAGING_IN),
    (JobState.PENDING, BufferState.STAGED_IN),
    (JobState.PENDING, BufferState.ALLOC_REVOKE),
    (JobState.CONFIGURING, BufferState.PRE_RUN),
    (JobState.RUNNING, BufferState.RUNNING),
    (JobState.SUSPENDED, BufferState.SUSPENDED),
    (JobState.STAGE_OUT, BufferState.POST_RUN),
    (JobState.STAGE_OUT, BufferState.STAGING_OUT),
    *((state, held) for state in sorted(ENDED) for held in (BufferState.TEARDOWN, BufferState.COMPLETE)),
    (JobState.FAILED, BufferState.TEARDOWN_FAIL),
)

refusals = st.builds(Rejection, st.sampled_from(RejectionCode), words, words, words)
sites = st.builds(
    Site, stage_retries=st.integers(0, 9), allow_root=st.booleans(), sources=st.lists(words, max_size=2).map(tuple)
)
specs = st.builds(
    JobRequest,
    name=words,
    user=words,
    script=st.text("#!/bin/sh\n", max_size=40),
    workdir=words,
    time_limit_s=numbers,
    dependencies=st.lists(st.builds(Dependency, st.sampled_from(DependencyKind), numbers), max_size=2).map(tuple),
    environment=st.lists(st.tuples(words, words), max_size=2).map(tuple),
)
transfers = st.lists(st.builds(Transfer, st.sampled_from(TransferKind), words, words), max_size=2).map(tuple)
requests = st.builds(
    BufferRequest,
    words,
    sizes,
    st.lists(st.sampled_from(Access), max_size=2).map(tuple),
    words,
    transfers,
    transfers,
    words,
)


@st.composite
def states(draw: st.DrawFn) -> State:
    """Draw a State whose invariants hold, with its derived maps."""
    pools = {
        name: Pool(name, draw(sizes), draw(st.integers(1, MIB)), draw(st.booleans()), draw(sizes))
        for name in draw(st.lists(names, max_size=3, unique=True))
    }
    nodes = {
        name: Node(name, draw(numbers), draw(words), draw(words), Instant(draw(numbers)), draw(st.booleans()))
        for name in draw(st.lists(names, max_size=3, unique=True))
    }
    jobs: dict[int, Job] = {}
    buffers: dict[int, Buffer] = {}
    for number in draw(st.lists(st.one_of(st.integers(1, 20), st.integers(1, 2**60)), max_size=8, unique=True)):
        pair = draw(st.sampled_from(PAIRS)) if draw(st.booleans()) else None
        node = draw(names)
        jobs[number] = Job(
            id=number,
            request=replace(draw(specs), buffer=None if pair is None else draw(requests)),
            state=draw(st.sampled_from(JobState)) if pair is None else pair[0],
            hold=draw(st.sampled_from(Hold)),
            message=draw(words),
            node=node,
            exit_code=draw(st.integers(-(2**31), 2**31)),
        )
        if pair is not None:
            pool = draw(st.sampled_from(sorted(pools))) if pools else ""
            buffers[number] = Buffer(
                number,
                pair[1],
                pool,
                draw(sizes) if pool else 0,
                draw(st.sampled_from(["", node])),
            )
    receipts = SingleReplies(
        (revision.to_bytes(16, "big"), CachedReply(Revision(revision), draw(numbers), draw(st.none() | refusals)))
        for revision in sorted(draw(st.sets(st.integers(1, 2**62), max_size=6)))
    )
    return derive(
        State(
            cluster_id=draw(words),
            name=draw(words),
            feature_level=draw(st.integers(0, 1)),
            revision=Revision(draw(numbers)),
            at=Instant(draw(numbers)),
            site=draw(sites),
            next_job=max(jobs, default=0) + draw(st.integers(1, 9)),
            pools=immutables.Map(pools),
            nodes=immutables.Map(nodes),
            jobs=immutables.Map(jobs),
            buffers=immutables.Map(buffers),
            receipts=receipts,
            oldest_receipt=draw(numbers),
            receipts_horizon_ms=draw(st.integers(0, 2**48 - 1)),
            clock_set_back=draw(numbers),
        )
    )


MEMBERS = Configuration(
    6,
    (Member("r1", "r1:7401", "r1:7411"), Member("r2#4", "r2:7401", "r2:7411")),
    (Member("r3#6", "r3:7401", "r3:7411"),),
    Change(ChangeKind.ADD, "r3#6", "operator admin", 99, b"i" * 16),
)

images = st.builds(
    Image,
    states(),
    st.integers(1, 2**63 - 1),
    st.integers(1, 2**63 - 1),
    st.binary(min_size=32, max_size=32),
    st.sampled_from([None, ConfigurationAt(1, MEMBERS)]),
)


def number_of(field: str) -> int:
    """Return the section number of a table."""
    return next(table.section for table in TABLES if table.field == field)


def small_image(index: int = 7, term: int = 2, *, cluster_id: str = "c1") -> Image:
    """Return an image with one record of each kind, well below 1 KiB."""
    request = BufferRequest(
        "", 8 * MIB, (Access.STRIPED,), "scratch", (Transfer(TransferKind.FILE, "/a", "$x"),), (), "#DW"
    )
    job = Job(1, JobRequest("j", "ann", "#!/bin/sh\n", "/w", 60, buffer=request), JobState.RUNNING, node="n1")
    return Image(
        derive(
            State(
                cluster_id=cluster_id,
                name="demo",
                feature_level=1,
                revision=Revision(index),
                at=Instant(99),
                next_job=2,
                pools=immutables.Map({"fast": Pool("fast", 96 * MIB, 8 * MIB, True)}),
                nodes=immutables.Map({"n1": Node("n1", 2, "i", "s")}),
                jobs=immutables.Map({1: job}),
                buffers=immutables.Map({1: Buffer(1, BufferState.RUNNING, "fast", 8 * MIB, "n1")}),
                receipts=SingleReplies(
                    [(b"r" * 16, CachedReply(Revision(3), 1, Rejection(RejectionCode.UNKNOWN_POOL, "no")))]
                ),
            )
        ),
        index,
        term,
        DIGEST,
        ConfigurationAt(1, MEMBERS),
    )


def many_jobs(count: int, *, script_bytes: int = 200) -> Image:
    """Return an image of `count` jobs with buffers and as many receipts (at most 65,536)."""
    request = BufferRequest(
        "fast", MIB, (Access.STRIPED,), "scratch", (Transfer(TransferKind.FILE, "/a", "$b"),), (), "#DW x"
    )
    asked = JobRequest("job", "ann", "x" * script_bytes, "/home/ann", 3600, buffer=request)
    kept = min(count, 65_536)
    state = State(
        cluster_id="c1",
        feature_level=1,
        revision=Revision(count),
        next_job=count + 1,
        pools=immutables.Map({"fast": Pool("fast", 2**50, MIB, True)}),
        jobs=immutables.Map({i: Job(i, asked, JobState.RUNNING, node="n1") for i in range(1, count + 1)}),
        buffers=immutables.Map({i: Buffer(i, BufferState.RUNNING, "fast", MIB, "n1") for i in range(1, count + 1)}),
        receipts=SingleReplies((i.to_bytes(16, "big"), CachedReply(Revision(i), i, None)) for i in range(1, kept + 1)),
    )
    return Image(derive(state), max(count, 1), 1, DIGEST)


def _life(job: int) -> tuple[tuple[e.Event, ...], ...]:
    """Return the events of one job, entry by entry."""
    ended = JobState.COMPLETED
    return (
        (e.BufferAllocated(job, "n1", 1),),
        (e.StageFailed(job, Stage.STAGE_IN, 1, "no such file", Instant(9)),),
        (e.StageRetried(job, Stage.STAGE_IN, 2, "retry"),),
        (e.StagedIn(job, 3, 4096, "d"), e.RunOrdered(job, "n1", 3)),
        (e.RunStarted(job),),
        (e.RunEnded(job, ended, 0, 0, 4),),
        (e.StageOutStarted(job, 5),),
        (e.StagedOut(job, 1, 10), e.TeardownStarted(job, 6, ended, False)),
        (e.TornDown(job),),
        (e.JobPurged(job),),
    )


@st.composite
def ledgers(draw: st.DrawFn) -> list[Batch]:
    """Draw the batches of a ledger: concurrent jobs and rejections, cut into batches anywhere."""
    user, controller = Actor(ActorRole.USER, "ann"), Actor(ActorRole.CONTROLLER, "leader")
    founded = e.ClusterFounded("c1", "demo", Site(), (Pool("fast", 96 * MIB, 8 * MIB, True), Pool("big", 9 * MIB, MIB)))
    entries = [Entry(b"\0" * 15 + b"\1", controller, "found_cluster", (founded, e.NodeRegistered("n1", 4, "i", "s")))]
    lives: list[list[tuple[e.Event, ...]]] = []
    for step in range(draw(st.integers(0, 40))):
        key = draw(st.integers(1, 2**40)).to_bytes(6, "big") + step.to_bytes(10, "big")
        choice = draw(st.integers(-2, len(lives) - 1))
        if choice == -2:
            entries.append(
                Entry(key, user, "submit_job", (), Rejection(RejectionCode.UNKNOWN_POOL, "no", "yes", "line 1"))
            )
        elif choice == -1:
            job = len(lives) + 1
            request = replace(draw(specs), buffer=draw(requests))
            lives.append(list(_life(job)))
            pool = draw(st.sampled_from(["fast", "big"]))
            submitted = e.JobSubmitted(job, request, pool, draw(st.integers(0, 8)) * MIB)
            entries.append(Entry(key, user, "submit_job", (submitted,)))
        elif lives[choice]:
            entries.append(Entry(draw(st.sampled_from([b"", key])), controller, "report", lives[choice].pop(0)))
    batches: list[Batch] = []
    done = 0
    while done < len(entries):
        size = draw(st.integers(1, 6))
        batches.append(Batch(Revision(done), Instant(len(batches)), tuple(entries[done : done + size])))
        done += len(batches[-1].entries)
    return batches


def from_sections(slices: Iterable[tuple[int, bytes]]) -> Image:
    """Return the image of `to_sections`, with its derived maps rebuilt; raise ImageRejected for a bad one."""
    assembly = Assembly()
    for section, payload in slices:
        assembly.add(section, payload)
    return assembly.image()

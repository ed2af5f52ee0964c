"""What the scheduler costs as the queue grows: a pass after one completion, a submit, a new leader's start, memory."""

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterable

import msgspec

from forebay.replica.decide.decide import decide, is_by_key
from forebay.replica.fold.apply import SpeculativeState
from forebay.replica.fold.fold import fold
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.entries import Acceptance, Entry
from forebay.replica.messages.features import FEATURE_LEVEL_KNOWN
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import Dependency, DependencyKind, JobOptions, JobRequest, with_options
from forebay.replica.model.stages import Stage
from forebay.replica.operations.outcomes import active_stage, script_end_events, success_events
from forebay.replica.scheduler.index import SchedulingIndex
from forebay.replica.scheduler.scheduling_cycle import run_cycle, verdicts_of
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import NEVER, Instant, seconds
from forebay.replica.views.orders import orders_for
from forebay.snapshots.image import DIGEST_BYTES, Image, to_sections
from tests.replica.reference.reference_scheduler import plan
from tests.replica.reference.reference_scheduler import run_cycle as reference_events
from tests.snapshots.states import from_sections

PENDING = (10, 1_000, 100_000)
"""Jobs that wait, count: a quiet site, a busy one, the most that Forebay takes."""

PASSES = 200
"""Completions whose passes are measured, count."""

SUBMITS = 500

POOLS, NODES, CPUS = 4, 64, 16
"""A site for the measurement; a pool has room for about eighty requests."""

STAGING_SCRIPT = """#!/bin/sh
#DW jobdw pool={pool} capacity={size} type=scratch access_mode=striped
#DW stage_in type=file source=/in/case-{job}.dat destination=$DW_JOB_STRIPED/in
#DW stage_out type=directory source=$DW_JOB_STRIPED/out destination=/out/case-{job}
srun ./simulate
"""

POOL_BYTES = 10_000
START = Instant(1_750_000_000_000_000)
SCRIPT = "#!/bin/sh\nsrun ./simulate --input $FOREBAY_BUFFER/in\n"


def world(pending: int) -> State:
    """Return a site whose pools and CPUs are taken, with so many jobs waiting for all kinds of things."""
    choose = random.Random(pending)
    site = Site(operations_per_stage_max=128, sources=("/in",), destinations=("/out",))
    pools = tuple(Pool(f"p{number}", POOL_BYTES, 10, is_default=number == 0) for number in range(POOLS))
    state = fold(EMPTY, [e.ClusterFounded("id", "bench", site, pools, FEATURE_LEVEL_KNOWN)], START)
    state = fold(state, [e.NodeRegistered(f"n{number}", CPUS, "i", "s") for number in range(NODES)], START)
    while state.next_job <= pending:
        state = fold(state, _submission(choose, state.next_job, pending), START)
    # Until nothing more can be given: data is staged in at once, and scripts run for ever.
    index = SchedulingIndex(state)
    while events := run_cycle(index, START):
        state = fold(state, events, START)
        index.advance(state, events)
        for event in events:
            follows: tuple[e.Event, ...] = ()
            if isinstance(event, e.BufferAllocated):
                follows = (e.StagedIn(event.job, 1, 1),)
            elif isinstance(event, e.RunOrdered):
                follows = (e.RunStarted(event.job),)
            state = fold(state, follows, START)
            index.advance(state, follows)
    return state


def _submission(choose: random.Random, job: int, pending: int) -> tuple[e.Event, ...]:
    """Return what submits the next job, or an array: half of the jobs have options, a quarter are tasks of arrays."""
    submitted, kind = _submitted(choose, job), choose.random()
    if kind < ARRAYS_PART:
        tasks = range(1, 1 + min(ARRAY_TASKS, 1 + pending - job))
        options = JobOptions(account=f"group{job % 20}")
        outputs = tuple(f"/out/forebay-{job}_{task}.out" for task in tasks)
        array = e.SubmittedTasks(tuple(tasks), choose.choice((0, 4, 16)), outputs)
        request = with_options(submitted.request, options)
        return (msgspec.structs.replace(submitted, request=request, array=array),)
    if kind < 0.5:
        options = JobOptions(account=f"group{job % 20}", singleton=kind > 0.48, comment="" if kind < 0.4 else f"n{job}")
        return (msgspec.structs.replace(submitted, request=with_options(submitted.request, options)),)
    return (submitted,)


ARRAYS_PART, ARRAY_TASKS = 1 / 150, 50


def _submitted(choose: random.Random, job: int) -> e.JobSubmitted:
    kind = choose.random()
    asked = JobRequest(
        name=f"job{job}",
        user=f"user{job % 100}",
        script=SCRIPT,
        workdir="/out",
        time_limit_s=choose.choice((60, 3_600, 86_400)),
        cpus=choose.choice((1, 2, 4, CPUS)),
        priority=choose.randrange(1, 1_000),
        begin_at=Instant(START + seconds(choose.randrange(3_600, 86_400))) if kind < 0.1 else NEVER,
        dependencies=(Dependency(DependencyKind.AFTER_OK, choose.randrange(1, job)),) if job > 1 and kind > 0.9 else (),
        output=f"/out/forebay-{job}.out",
    )
    size = choose.choice((10, 50, 100, 100, 500)) if choose.random() < 0.9 else 0
    pool = f"p{choose.randrange(POOLS)}"
    request = None
    if size and job % 3:
        request = parse_request(SCRIPT, f"pool={pool} capacity={size}")
    elif size:
        # Every third has paths of its own, so that its request is shared with nobody.
        request = parse_request(STAGING_SCRIPT.format(pool=pool, size=size, job=job), "")
    hold = Hold.USER if 0.1 <= kind < 0.2 else Hold.NONE
    return e.JobSubmitted(job, msgspec.structs.replace(asked, buffer=request), pool if size else "", size, hold)


def _over(state: State, job_id: int, at: Instant) -> tuple[State, list[e.Event]]:
    """End a job that runs, with everything that its agent has to report."""
    happened: list[e.Event] = []
    while job_id in state.unfinished:
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        stage = active_stage(job, buffer)
        assert stage is not None
        events = (
            script_end_events(state, job, buffer, JobState.COMPLETED, 0, 0, "")
            if stage is Stage.RUN or buffer is None
            else success_events(state, job, buffer, stage, 1, 1, "")
        )
        state = fold(state, events, at)
        happened += events
    return state, happened


def _running(state: State) -> list[int]:
    return [job for job in sorted(state.unfinished) if state.jobs[job].state is JobState.RUNNING]


def passes(state: State) -> dict[str, float]:
    """Return the median and the 99th percentile of a pass after one completion, and of the check for what is due."""
    index, at, times, checks = SchedulingIndex(state), START, [], []
    run_cycle(index, at)
    running, found = _running(state), 0
    for _ in range(PASSES):
        at = Instant(at + seconds(1))
        if not running:
            running = _running(state)
        if not running:
            break
        state, happened = _over(state, running.pop(0), at)
        started_s = time.perf_counter()
        index.advance(state, happened)
        events = run_cycle(index, at)
        times.append(time.perf_counter() - started_s)
        started_s = time.perf_counter()
        index.next_due(at)
        checks.append(time.perf_counter() - started_s)
        while events:
            found += len(events)
            state = fold(state, events, at)
            index.advance(state, events)
            follows: list[e.Event] = []
            for event in events:
                if isinstance(event, e.BufferAllocated):
                    follows.append(e.StagedIn(event.job, 1, 1))
                elif isinstance(event, e.RunOrdered):
                    follows.append(e.RunStarted(event.job))
            state = fold(state, follows, at)
            index.advance(state, follows)
            events = run_cycle(index, at)
    started_s = time.perf_counter()
    walked = reference_events(state, at)
    walk_s = time.perf_counter() - started_s
    if walked != run_cycle(index, at):
        raise AssertionError("the index decides something else than walking over all jobs")
    times.sort()
    return {
        "completions": len(times),
        "decided": found,
        "pass_ms": _ms(statistics.median(times)),
        "pass_p99_ms": _ms(times[int(len(times) * 0.99)]),
        "next_due_ms": _ms(statistics.median(checks)),
        "walking_ms": _ms(walk_s),
    }


def submits(state: State) -> dict[str, float]:
    """Return the medians of a submit, decided and settled as the proposer does, and of its pass, microseconds.

    The proposer runs one pass for all the submits of a batch.
    """
    index, times, passes_s = SchedulingIndex(state), [], []
    run_cycle(index, START)
    actor = c.Actor(c.ActorRole.USER, "alice")
    buffer = parse_request(SCRIPT, "capacity=100")
    for number in range(SUBMITS):
        asked = JobRequest("job", "alice", SCRIPT, "/out", 60, priority=number % 1_000, buffer=buffer)
        command = c.SubmitJob(asked)
        request = c.Request((START // 1000).to_bytes(6, "big") + number.to_bytes(10, "big"), actor, command)
        assert is_by_key(command)
        gc.disable()
        started_s = time.perf_counter()
        batch = SpeculativeState(state, START)
        outcome = decide(batch.facts, request, START)
        if not isinstance(outcome, Acceptance):
            raise AssertionError(f"a submit was refused: {outcome}")
        entry = Entry(request.id, actor, "submit_job", outcome.events)
        batch.add(entry)
        index.advance(batch.state(), entry.events)
        submitted_s = time.perf_counter()
        events = run_cycle(index, START)
        times.append(submitted_s - started_s)
        passes_s.append(time.perf_counter() - submitted_s)
        batch.add(Entry(b"", c.CONTROLLER, "run_scheduling_cycle", events))
        state = batch.state()
        index.advance(state, events)
        gc.enable()
    return {
        "submit_us": round(statistics.median(times) * 1e6, 1),
        "submit_pass_us": round(statistics.median(passes_s) * 1e6, 1),
    }


def start(state: State) -> dict[str, float]:
    """Return what a new leader's index takes to build, milliseconds."""
    started_s = time.perf_counter()
    index = SchedulingIndex(state)
    run_cycle(index, START)
    return {"build_ms": _ms(time.perf_counter() - started_s)}


def memory(pending: int) -> dict[str, int]:
    """Return the bytes that a job takes in the State and in the index, without its script."""
    gc.collect()
    tracemalloc.start()
    state = _as_from_a_snapshot(world(pending))
    gc.collect()
    in_state = tracemalloc.get_traced_memory()[0]
    index = SchedulingIndex(state)
    index.next_due(START)
    gc.collect()
    in_both = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert index.state is state
    return {
        "state_bytes_per_job": in_state // pending,
        "index_bytes_per_job": (in_both - in_state) // pending,
    }


def _as_from_a_snapshot(state: State) -> State:
    """Return the state as a replica has it that was just started, with one empty script for all jobs."""
    jobs = state.jobs
    with jobs.mutate() as mutation:
        for job_id in list(jobs):
            job = jobs[job_id]
            mutation[job_id] = msgspec.structs.replace(job, request=msgspec.structs.replace(job.request, script=""))
        jobs = mutation.finish()
    bare = msgspec.structs.replace(state, jobs=jobs)
    sections = [(part.section, part.payload) for part in to_sections(Image(bare, 1, 1, bytes(DIGEST_BYTES)))]
    del state, bare, jobs
    return from_sections(sections).state


def questions(state: State) -> dict[str, float]:
    """Return what it takes to answer an agent, to register one again, and to explain why a job waits; microseconds."""
    index, choose = SchedulingIndex(state), random.Random(7)
    index.next_due(START)
    waiting = choose.sample(sorted(state.unfinished), min(QUESTIONS, len(state.unfinished)))
    nodes = sorted(state.nodes)
    orders, registrations, whys = [], [], []
    for number in range(QUESTIONS):
        node = nodes[number % len(nodes)]
        started_s = time.perf_counter()
        orders_for(state, node)
        orders.append(time.perf_counter() - started_s)
        command = c.RegisterNode(node, CPUS, f"again{number}", "s")
        request = c.Request(bytes(16), c.Actor(c.ActorRole.AGENT, node), command)
        started_s = time.perf_counter()
        outcome = decide(state, request, START)
        registrations.append(time.perf_counter() - started_s)
        if not isinstance(outcome, Acceptance) or not outcome.events:
            raise AssertionError(f"a registration was refused: {outcome}")
        job = waiting[number % len(waiting)]
        started_s = time.perf_counter()
        verdicts_of(index, (job,), START)
        whys.append(time.perf_counter() - started_s)
    said = plan(state, START).verdicts
    if verdicts_of(index, waiting, START) != {job: said[job] for job in waiting}:
        raise AssertionError("the index says something else than walking over all jobs")
    return {
        "orders_us": round(statistics.median(orders) * 1e6, 1),
        "register_us": round(statistics.median(registrations) * 1e6, 1),
        "why_us": round(statistics.median(whys) * 1e6, 1),
        "why_worst_us": round(max(whys) * 1e6, 1),
    }


QUESTIONS = 200


def _ms(value_s: float) -> float:
    return round(value_s * 1000, 3)


def report(say: Callable[[str], None], pending: Iterable[int] = PENDING) -> list[dict[str, float]]:
    """Measure with each number of jobs waiting, print one line for each, and return the figures."""
    say("Scheduling: a pass after one completion, a submit with its pass, a new leader's index; no disk, no network")
    say(f"  {POOLS} pools, {NODES} nodes; medians of {PASSES} completions and {SUBMITS} submits")
    found = []
    for count in pending:
        state = world(count)
        figures: dict[str, float] = {"pending": count}
        figures |= passes(state) | submits(_with_room(state)) | start(state) | questions(state)
        if count == max(pending):
            del state
            figures |= memory(count)
        found.append(figures)
        say(f"  {count:>7,} pending  " + "  ".join(f"{name} {value:,}" for name, value in figures.items()))
    return found


def _with_room(state: State) -> State:
    """Return the state with some jobs less, so that submits are not refused."""
    surplus = max(0, len(state.unfinished) + SUBMITS - 100_000)
    held = [job for job in sorted(state.unfinished) if state.jobs[job].hold is not Hold.NONE]
    return fold(state, [e.JobCancelled(job) for job in held[:surplus]], START)

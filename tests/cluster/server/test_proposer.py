"""Laws of the proposer, with a consensus that commits when the test says so."""

import asyncio
import itertools
from typing import NoReturn

import msgspec
import pytest
from msgspec.structs import replace

from forebay.cluster.config.config import Config
from forebay.cluster.consensus import ClockBounds
from forebay.cluster.server.pass_timer import PassTimer
from forebay.cluster.server.pending import (
    STEPS_PER_TURN,
    Answer,
    CannotDecide,
    NotLeading,
    OutcomeUnknown,
    QueueFull,
    Settlement,
)
from forebay.cluster.server.proposer import BATCHES_IN_FLIGHT_MAX, QUEUE_COMMANDS_MAX
from forebay.cluster.system.clock import SystemClock
from forebay.replica.fold.apply import apply_batch
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.messages.entries import Batch, Entry
from forebay.replica.messages.events import Event
from forebay.replica.model.configuration import Site
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.requests import JobRequest
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import State
from forebay.replica.values.errors import RejectionCode
from forebay.replica.values.limits import ARRAY_SIZE_MAX, COMMANDS_PER_BATCH_MAX
from forebay.replica.values.units import Instant, seconds
from forebay.wal.codec import CodecError, decode_batch, encode_batch
from forebay.wal.journal import Entry as LogEntry
from tests.clocks import ManualClock
from tests.cluster.harness import PATIENCE_S, PLAIN, SCRIPT, Harness, story, until

OPERATOR = c.Actor(c.ActorRole.OPERATOR, "operator")
ALICE = c.Actor(c.ActorRole.USER, "alice")
START = Instant(1_750_000_000_000_000)
_numbers = itertools.count(1)


def command_id() -> bytes:
    number = next(_numbers)
    return (START // 1000).to_bytes(6, "big") + b"\x70\x00\x80" + number.to_bytes(7, "big")


def submission(harness: Harness, **changes: object) -> c.SubmitJob:
    workdir = str(harness.config.file.parent / "out")
    fields = {"name": "job", "user": "alice", "script": PLAIN, "workdir": workdir, "time_limit_s": 60, **changes}
    hold = fields.pop("hold", Hold.USER)
    spec = JobRequest(**fields)  # type: ignore[arg-type]
    return c.SubmitJob(replace(spec, buffer=parse_request(spec.script)), hold)  # type: ignore[arg-type]


def submit(harness: Harness, id_: bytes | None = None, **changes: object) -> Answer:
    return harness.controller.submit(c.Request(id_ or command_id(), ALICE, submission(harness, **changes)))


def register(harness: Harness) -> Answer:
    node = c.Actor(c.ActorRole.AGENT, "n1")
    return harness.controller.submit(c.Request(command_id(), node, c.RegisterNode("n1", 2, "instance", "disk")))


def batches(harness: Harness) -> list[Batch]:
    """Return every batch in the journal after the founding one, committed or not."""
    found = []
    for index in range(harness.engine.journal.applied_index + 1, harness.engine.journal.last_index + 1):
        from forebay.wal.codec import decode_batch

        found.append(decode_batch(harness.engine.journal.entry(index).data))
    return found


async def commit(harness: Harness, answer: Answer) -> None:
    """Commit the command of an answer and everything that follows from it."""
    while not answer.done() or harness.engine.uncommitted:
        harness.engine.commit()
        await asyncio.sleep(0)


def manual(config: Config) -> Harness:
    return Harness(config, automatic=False, clock=ManualClock(START))


@story
async def test_four_batches_are_in_flight_and_answers_come_in_order(config: Config) -> None:
    async with manual(config) as harness:
        answers: list[Answer] = []
        for _ in range(BATCHES_IN_FLIGHT_MAX + 2):
            answers.append(submit(harness))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert harness.controller.proposer.batches_in_flight == BATCHES_IN_FLIGHT_MAX
        assert harness.controller.proposer.queued == 2
        bases = [batch.base for batch in batches(harness)]
        assert bases == sorted(bases) and len(set(bases)) == BATCHES_IN_FLIGHT_MAX
        assert not any(answer.done() for answer in answers)
        order: list[int] = []
        for number, answer in enumerate(answers):
            answer.add_done_callback(lambda _, number=number: order.append(number))
        for committed in range(1, BATCHES_IN_FLIGHT_MAX + 1):
            harness.engine.commit(1)
            await asyncio.sleep(0)
            assert [answer.done() for answer in answers[:BATCHES_IN_FLIGHT_MAX]] == [
                number < committed for number in range(BATCHES_IN_FLIGHT_MAX)
            ]
        await until(lambda: harness.controller.proposer.queued == 0)
        harness.engine.commit()
        await asyncio.gather(*answers)
        assert order == sorted(order)
        assert [answer.result().job for answer in answers] == list(range(1, len(answers) + 1))


@story
async def test_concurrent_commands_share_one_batch(config: Config) -> None:
    async with manual(config) as harness:
        answers = [submit(harness) for _ in range(50)]
        await until(lambda: harness.engine.uncommitted == 1)
        (batch,) = batches(harness)
        assert sum(1 for entry in batch.entries if entry.command == "submit_job") == 50
        harness.engine.commit()
        revisions = [(await answer).revision for answer in answers]
        assert revisions == list(range(batch.base + 1, batch.base + 51))


@story
async def test_batch_obeys_its_bounds_of_count_and_bytes(config: Config) -> None:
    async with manual(config) as harness:
        answers = [submit(harness) for _ in range(COMMANDS_PER_BATCH_MAX + 10)]
        big = "#!/bin/sh\n" + "#" * 200_000
        answers += [submit(harness, script=big) for _ in range(12)]
        await until(lambda: harness.controller.proposer.queued == 0 or harness.engine.uncommitted == 4)
        sizes = [len(harness.engine.journal.entry(index).data) for index in range(3, harness.engine.last_index + 1)]
        counts = [len(batch.entries) for batch in batches(harness)]
        assert max(counts) <= COMMANDS_PER_BATCH_MAX + 1  # a scheduling cycle
        assert max(sizes) <= 1024 * 1024
        assert counts[0] >= COMMANDS_PER_BATCH_MAX
        while not all(answer.done() for answer in answers):
            harness.engine.commit()
            await asyncio.sleep(0)
        assert [answer.result().job for answer in answers] == list(range(1, len(answers) + 1))


@story
async def test_rejection_is_an_entry_of_a_batch_and_changes_nothing_else(config: Config) -> None:
    async with manual(config) as harness:
        before = harness.controller.state
        answer = submit(harness, user="bob")
        await until(lambda: harness.engine.uncommitted == 1)
        assert not answer.done()
        (batch,) = batches(harness)
        (entry,) = batch.entries
        assert entry.events == () and entry.rejection is not None
        assert entry.rejection.code is RejectionCode.PERMISSION_DENIED
        harness.engine.commit()
        settled = await answer
        assert settled.rejection == entry.rejection
        after = harness.controller.state
        assert after.revision == before.revision + 1
        assert (after.jobs, after.buffers, after.next_job) == (before.jobs, before.buffers, before.next_job)


@story
async def test_full_queue_rejects_at_once_and_accepts_commands_again_when_drained(config: Config) -> None:
    async with manual(config) as harness:
        taken: list[Answer] = []
        with pytest.raises(QueueFull):
            for _ in range(QUEUE_COMMANDS_MAX + 1):
                taken.append(submit(harness))
        assert len(taken) == QUEUE_COMMANDS_MAX
        assert harness.controller.proposer.counts.queue_full == 1
        while not all(answer.done() for answer in taken):
            harness.engine.commit()
            await asyncio.sleep(0)
        again = submit(harness)
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.commit()
        assert (await again).job == QUEUE_COMMANDS_MAX + 1


@story
async def test_queue_is_bounded_in_bytes_too(config: Config) -> None:
    async with manual(config) as harness:
        big = "#!/bin/sh\n" + "#" * 250_000
        taken = 0
        with pytest.raises(QueueFull):
            for _ in range(QUEUE_COMMANDS_MAX):
                submit(harness, script=big)
                taken += 1
        assert 200 < taken < 300


@story
async def test_bytes_of_a_drained_queue_are_free_again(config: Config) -> None:
    async with manual(config) as harness:
        big = "#!/bin/sh\n" + "#" * 250_000

        def fill() -> list[Answer]:
            taken: list[Answer] = []
            with pytest.raises(QueueFull):
                for _ in range(QUEUE_COMMANDS_MAX):
                    taken.append(submit(harness, script=big))
            return taken

        first = fill()
        while not all(answer.done() for answer in first):
            harness.engine.commit()
            await asyncio.sleep(0)
        assert harness.controller.proposer.queued == 0
        assert len(fill()) == len(first)


@story
async def test_retry_of_a_queued_proposed_or_applied_command_gets_the_first_answer(
    config: Config,
) -> None:
    async with manual(config) as harness:
        id_ = command_id()
        first, twin = submit(harness, id_), submit(harness, id_)
        await until(lambda: harness.engine.uncommitted == 1)
        in_flight = submit(harness, id_)
        await asyncio.sleep(0.01)
        assert harness.engine.uncommitted == 1
        harness.engine.commit()
        late = submit(harness, id_)
        settled = [await answer for answer in (first, twin, in_flight, late)]
        assert {answer.revision for answer in settled} == {settled[0].revision}
        assert {answer.job for answer in settled} == {1}
        assert [answer.fresh for answer in settled] == [True, False, False, False]
        assert harness.engine.uncommitted == 0
        assert len(harness.controller.state.jobs) == 1


@story
async def test_retry_of_a_rejected_command_gets_the_same_rejection(config: Config) -> None:
    async with manual(config) as harness:
        id_ = command_id()
        first = submit(harness, id_, user="bob")
        await until(lambda: harness.engine.uncommitted == 1)
        harness.engine.commit()
        again = submit(harness, id_, user="bob")
        assert (await again).rejection == (await first).rejection
        assert harness.engine.uncommitted == 0


@story
async def test_another_command_with_a_used_id_is_rejected(config: Config) -> None:
    async with manual(config) as harness:
        id_ = command_id()
        first = submit(harness, id_)
        await until(lambda: harness.engine.uncommitted == 1)
        in_flight = submit(harness, id_, name="another")
        harness.engine.commit()
        assert (await first).rejection is None
        for answer in (in_flight, submit(harness, id_, name="another")):
            rejection = (await answer).rejection
            assert rejection is not None and rejection.code is RejectionCode.COMMAND_ID_REUSED
        assert len(harness.controller.state.jobs) == 1


@story
async def test_lost_leadership_leaves_batches_unknown_and_queued_commands_undone(config: Config) -> None:
    async with manual(config) as harness:
        in_flight = []
        for _ in range(BATCHES_IN_FLIGHT_MAX):
            in_flight.append(submit(harness))
            await until(lambda: harness.engine.uncommitted == len(in_flight))
        queued = submit(harness)
        await asyncio.sleep(0.01)
        harness.engine.depose("r2")
        for answer in in_flight:
            with pytest.raises(OutcomeUnknown):
                await answer
        with pytest.raises(NotLeading) as lost:
            await queued
        assert lost.value.leader == "r2"
        with pytest.raises(NotLeading):
            submit(harness)


@story
async def test_resent_command_after_an_unknown_outcome_happens_once(
    config: Config,
) -> None:
    for lose in (True, False):
        async with manual(config) as harness:
            before = len(harness.controller.state.jobs)
            id_ = command_id()
            answer = submit(harness, id_)
            await until(lambda: harness.engine.uncommitted == 1)
            harness.engine.depose(lose=lose)
            with pytest.raises(OutcomeUnknown):
                await answer
            harness.engine.lead()
            again = submit(harness, id_)
            await asyncio.sleep(0.01)
            harness.engine.commit()
            settled = await again
            assert settled.fresh is lose
            assert len(harness.controller.state.jobs) == before + 1
            assert settled.job == before + 1


@story
async def test_batch_has_no_more_array_tasks_than_commands(config: Config) -> None:
    """Deciding and folding an array costs by its tasks, and a batch is one turn of every replica's loop."""
    async with manual(config) as harness:
        tasks = tuple(range(200))
        command = replace(submission(harness), tasks=tasks)
        answers = [harness.controller.submit(c.Request(command_id(), ALICE, command)) for _ in range(8)]
        answers.append(submit(harness))
        await until(lambda: harness.controller.proposer.queued == 0)
        made = [[entry for entry in batch.entries if entry.command == "submit_job"] for batch in batches(harness)]
        assert [len(entries) for entries in made if entries] == [3, 3, 3]
        assert 2 * len(tasks) < COMMANDS_PER_BATCH_MAX <= 3 * len(tasks)
        for answer in answers:
            await commit(harness, answer)


LARGEST = tuple(range(ARRAY_SIZE_MAX))


async def half_decided(harness: Harness, id_: bytes) -> Answer:
    """Submit the largest array; return as soon as a part of it is decided."""
    command = replace(submission(harness), tasks=LARGEST)
    answer = harness.controller.submit(c.Request(id_, ALICE, command))
    turns = 0
    while harness.controller.proposer._draft is None or turns < 2:
        turns += harness.controller.proposer._draft is not None
        await asyncio.sleep(0)
    assert harness.engine.uncommitted == 0 and not answer.done()
    return answer


@story
async def test_leader_deposed_while_deciding_an_array_has_done_nothing(config: Config) -> None:
    async with manual(config) as harness:
        same = command_id()
        answer = await half_decided(harness, same)
        harness.engine.depose("r2")
        with pytest.raises(NotLeading):
            await answer
        assert harness.engine.uncommitted == 0 and harness.controller.state.next_job == 1
        harness.engine.lead()
        for _ in range(2):  # the client's retry, and another one
            again = harness.controller.submit(c.Request(same, ALICE, replace(submission(harness), tasks=LARGEST)))
            await commit(harness, again)
        assert (await again).job == 1
        assert harness.controller.state.next_job == 1 + len(LARGEST)


@story
async def test_commands_during_an_array_are_decided_after_it(config: Config) -> None:
    async with manual(config) as harness:
        same = command_id()
        answer = await half_decided(harness, same)
        retry = harness.controller.submit(c.Request(same, ALICE, replace(submission(harness), tasks=LARGEST)))
        one = submit(harness)
        cancel = harness.controller.submit(c.Request(command_id(), ALICE, c.CancelJob(1)))
        harness.controller.proposer.pass_now()
        for asked in (answer, retry, one, cancel):
            await commit(harness, asked)
        assert [(await asked).job for asked in (answer, retry, one)] == [1, 1, 1 + len(LARGEST)]
        assert (await answer).fresh and not (await retry).fresh
        state = harness.controller.state
        assert state.next_job == 2 + len(LARGEST)
        assert {state.jobs[job].state for job in state.arrays[1].values()} == {JobState.CANCELLED}


@story
async def test_undecidable_array_is_answered_and_harms_no_other_command(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import forebay.replica.fold.jobs as module

    real = module._new_job

    def broken(builder: object, event: object, job_id: int, request: JobRequest) -> None:
        if request.array is not None and request.array.task == 700:
            raise ZeroDivisionError("poison")
        real(builder, event, job_id, request)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_new_job", broken)
    async with manual(config) as harness:
        before = submit(harness)
        array = replace(submission(harness), tasks=LARGEST)
        poison = harness.controller.submit(c.Request(command_id(), ALICE, array))
        after = submit(harness)
        with pytest.raises(CannotDecide):
            await commit(harness, poison)
            await poison
        await commit(harness, after)
        assert [(await answer).job for answer in (before, after)] == [1, 2]


@story
async def test_no_read_sees_a_partly_folded_array_on_a_follower(config: Config) -> None:
    async with manual(config) as harness:
        await half_decided(harness, command_id())
        await until(lambda: harness.engine.uncommitted == 1)
        entry = harness.engine.journal.entry(harness.engine.journal.last_index)
        harness.engine.depose("r2", lose=False)
        before, parts = harness.controller.state, 0
        while harness.controller.apply(entry.index, entry.term, entry.data):
            parts += 1
            assert harness.controller.state is before
            assert harness.engine.journal.applied_index == entry.index - 1
        assert parts >= len(LARGEST) // STEPS_PER_TURN
        batch = decode_batch(entry.data)
        assert harness.controller.state == apply_batch(before, batch)
        assert len(harness.controller.state.arrays[1]) == len(LARGEST)


@story
async def test_another_leaders_entry_at_the_same_index_answers_no_waiter(config: Config) -> None:
    async with manual(config) as harness:
        answer = submit(harness)
        await until(lambda: harness.engine.uncommitted == 1)
        (own,) = batches(harness)
        (entry,) = own.entries
        journal = harness.engine.journal
        index = journal.last_index
        # A new leader's batch on the same revision with as many commands. It is applied before the loss of leadership
        # is reported.
        theirs = replace(own, entries=(replace(entry, id=command_id()),))
        journal.truncate_from(index)
        journal.set_term(journal.term + 1, None)
        journal.append([LogEntry(index, journal.term, encode_batch(theirs))])
        harness.engine.commit()
        assert harness.controller.state.revision == own.base + 1
        with pytest.raises(OutcomeUnknown):
            await answer


@story
async def test_batch_time_never_goes_back_when_the_leaders_clock_does(config: Config) -> None:
    async with manual(config) as harness:
        assert isinstance(harness.clock, ManualClock)
        submit(harness)
        await until(lambda: harness.engine.uncommitted == 1)
        harness.clock.set_wall(Instant(START - seconds(3600)))
        submit(harness)
        await until(lambda: harness.engine.uncommitted == 2)
        first, second = batches(harness)
        assert second.at >= first.at == START
        harness.engine.commit()


@story
async def test_single_batch_gets_its_cycle_in_a_later_entry_and_waits_for_it(
    config: Config,
) -> None:
    async with manual(config) as harness:
        register(harness)
        answer = submit(harness, script=SCRIPT, hold=Hold.NONE)
        await until(lambda: harness.engine.uncommitted == 2)
        decided, passed = batches(harness)
        assert [entry.command for entry in decided.entries] == ["register_node", "submit_job"]
        assert [entry.command for entry in passed.entries] == ["run_scheduling_cycle"]
        assert passed.entries[0].actor == c.CONTROLLER and passed.entries[0].id == b""
        assert passed.base == decided.base + 2
        harness.engine.commit(1)
        await asyncio.sleep(0)
        assert not answer.done(), "the cycle is not committed"
        harness.engine.commit(1)
        assert harness.controller.state.buffers[1].state.word == "staging-in"
        settled = await answer
        assert (settled.revision, settled.state) == (decided.base + 2, harness.controller.state)


@story
async def test_cycle_ends_the_batch_while_others_are_under_way(config: Config) -> None:
    async with manual(config) as harness:
        submit(harness)
        await until(lambda: harness.engine.uncommitted == 1)
        register(harness)
        submit(harness, script=SCRIPT, hold=Hold.NONE)
        await until(lambda: harness.engine.uncommitted == 2)
        batch = batches(harness)[-1]
        assert [entry.command for entry in batch.entries] == ["register_node", "submit_job", "run_scheduling_cycle"]
        harness.engine.commit()
        assert harness.controller.state.buffers[2].state.word == "staging-in"


@story
@pytest.mark.parametrize("finds", [True, False])
async def test_batch_applied_before_its_cycle_is_answered_after_it(config: Config, finds: bool) -> None:
    async with manual(config) as harness:
        await commit(harness, register(harness))
        propose = harness.engine.propose

        def at_once(data: bytes) -> tuple[int, int]:
            # Possible on a replica without peers: the entry is applied before `propose` has returned.
            place = propose(data)
            harness.engine.commit()
            return place

        harness.engine.propose = at_once  # type: ignore[method-assign]
        answer = submit(harness, script=SCRIPT if finds else PLAIN, hold=Hold.NONE if finds else Hold.USER)
        states = []
        answer.add_done_callback(lambda done: states.append(done.result().state))
        await until(lambda: bool(states))
        job = (await answer).job
        assert (job in states[0].buffers) is finds
        assert not finds or states[0].buffers[job].state.word == "staging-in"
        assert not harness.failures


class Told:
    """Receiver that only needs the commit, like the channel's."""

    def __init__(self) -> None:
        self.settled: list[Settlement] = []
        self.errors: list[Exception] = []

    def done(self) -> bool:
        return bool(self.settled or self.errors)

    def cancelled(self) -> bool:
        return False

    def set_result(self, result: Settlement, /) -> None:
        self.settled.append(result)

    def set_exception(self, exception: Exception, /) -> None:
        self.errors.append(exception)


async def hurry(harness: Harness) -> Told:
    """Submit a job whose stage-in the scheduler starts, for a receiver that only needs the commit."""
    await commit(harness, register(harness))
    told = Told()
    harness.controller.queue(c.Request(command_id(), ALICE, submission(harness, script=SCRIPT, hold=Hold.NONE)), told)
    await until(lambda: harness.engine.uncommitted == 1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert harness.engine.uncommitted == 1, "the cycle waits for the answer"
    return told


@story
@pytest.mark.parametrize("reads", [True, False])
async def test_hurried_receiver_is_answered_at_the_commit_and_a_read_sees_the_cycle(
    config: Config, reads: bool
) -> None:
    async with manual(config) as harness:
        told = await hurry(harness)
        harness.engine.commit()
        assert [settled.job for settled in told.settled] == [1]
        assert harness.controller.state.buffers[1].state.word == "pending"
        read = asyncio.ensure_future(harness.controller.current()) if reads else None
        await until(lambda: harness.engine.uncommitted == 1)
        for _ in range(5):
            await asyncio.sleep(0)
        assert read is None or not read.done(), "the cycle is not committed"
        harness.engine.commit()
        state = harness.controller.state if read is None else await read
        assert state.buffers[1].state.word == "staging-in"
        assert len(told.settled) == 1


@story
async def test_next_command_brings_the_cycle_of_a_hurried_decision(config: Config) -> None:
    async with manual(config) as harness:
        told = await hurry(harness)
        answer = submit(harness)
        await until(lambda: harness.engine.uncommitted == 3)
        assert [batch.entries[0].command for batch in batches(harness)] == [
            "submit_job",
            "run_scheduling_cycle",
            "submit_job",
        ]
        assert not told.done()
        harness.engine.commit(1)
        assert len(told.settled) == 1
        await commit(harness, answer)
        assert harness.controller.state.buffers[1].state.word == "staging-in"


@story
async def test_read_does_not_wait_for_a_cycle_lost_with_the_leadership(config: Config) -> None:
    async with manual(config) as harness:
        told = await hurry(harness)
        submit(harness)
        await until(lambda: harness.engine.uncommitted == 3)
        harness.engine.depose()
        assert [type(error) for error in told.errors] == [OutcomeUnknown]
        harness.engine.lead()
        async with asyncio.timeout(PATIENCE_S):
            assert not (await harness.controller.current()).jobs


@story
@pytest.mark.parametrize("goes_on", [True, False])
async def test_commit_during_a_transfer_is_answered_without_its_cycle(config: Config, goes_on: bool) -> None:
    async with manual(config) as harness:
        await commit(harness, register(harness))
        propose = harness.engine.propose

        def last(data: bytes) -> tuple[int, int]:
            harness.engine.ready = False  # it is transferring leadership, and proposes no more
            return propose(data)

        harness.engine.propose = last  # type: ignore[method-assign]
        answer = submit(harness, script=SCRIPT, hold=Hold.NONE)
        await until(lambda: harness.engine.uncommitted == 1)
        for _ in range(3):
            await asyncio.sleep(0)
        harness.engine.commit()
        assert (await answer).job == 1
        harness.engine.propose = propose  # type: ignore[method-assign]
        if goes_on:
            harness.engine.ready = True
            harness.engine.on_change()
        else:
            harness.engine.depose("r2")
            harness.engine.lead()
        await until(lambda: harness.engine.uncommitted == 1)
        harness.engine.commit()
        assert harness.controller.state.buffers[1].state.word == "staging-in"


@story
async def test_leadership_lost_between_batch_and_cycle_leaves_the_outcome_unknown(config: Config) -> None:
    async with manual(config) as harness:
        propose = harness.engine.propose

        def last(data: bytes) -> tuple[int, int]:
            place = propose(data)
            asyncio.get_running_loop().call_soon(harness.engine.depose)
            return place

        harness.engine.propose = last  # type: ignore[method-assign]
        answer = submit(harness)
        with pytest.raises(OutcomeUnknown):
            await answer
        assert harness.controller.proposer.batches_in_flight == 0
        harness.engine.propose = propose  # type: ignore[method-assign]
        harness.engine.lead()
        again = submit(harness)
        await commit(harness, again)
        assert not harness.failures


@story
async def test_idle_leader_proposes_nothing(config: Config) -> None:
    async with manual(config) as harness:
        last = harness.engine.last_index
        harness.controller.proposer.schedule()
        await asyncio.sleep(0.05)
        assert harness.engine.last_index == last


@story
async def test_work_due_by_time_is_done_at_its_time(config: Config) -> None:
    async with Harness(config, automatic=True) as harness:
        node = c.Actor(c.ActorRole.AGENT, "n1")
        id_ = bytes.fromhex(harness.new_id())
        await harness.controller.submit(c.Request(id_, node, c.RegisterNode("n1", 2, "instance", "disk")))
        begin_at = Instant(harness.clock.now() + 300_000)
        answer = harness.controller.submit(
            c.Request(
                bytes.fromhex(harness.new_id()),
                ALICE,
                submission(harness, script=SCRIPT, hold=Hold.NONE, begin_at=begin_at),
            )
        )
        job = (await answer).job
        assert harness.controller.state.buffers[job].state.word == "pending"
        await until(lambda: harness.controller.state.buffers[job].state.word == "staging-in")
        assert harness.controller.state.at >= begin_at


@story
async def test_undecidable_command_is_answered_and_the_replica_continues(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poison command must not stop one leader after another (another form of hazard H6)."""
    import forebay.cluster.server.proposer as module

    real = module.decide

    def decide(state: object, request: c.Request, at: Instant) -> object:
        if isinstance(request.command, c.HoldJob):
            raise ZeroDivisionError("poison")
        return real(state, request, at)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "decide", decide)
    async with manual(config) as harness:
        poison = harness.controller.submit(c.Request(command_id(), ALICE, c.HoldJob(1)))
        good = submit(harness)
        with pytest.raises(CannotDecide):
            await poison
        harness.engine.commit()
        assert (await good).job == 1


@story
async def test_command_that_cannot_be_encoded_is_answered_and_harms_no_other(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    import forebay.cluster.server.proposer as module

    def encode(entry: Entry) -> bytes:
        if b"cannot" in real(entry):
            raise CodecError("no bytes for it")
        return real(entry)

    real = module.encode_entry
    async with manual(config) as harness:
        monkeypatch.setattr(module, "encode_entry", encode)
        bad, good = submit(harness, script="#!/bin/sh\n# cannot\n"), submit(harness)
        with pytest.raises(CannotDecide):
            await bad
        await until(lambda: harness.engine.uncommitted == 1)
        harness.engine.commit()
        assert (await good).job == 1
        assert not harness.failures


@story
async def test_fault_in_the_proposer_stops_the_replica(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    import forebay.cluster.server.proposer as module

    def encode(*parts: object) -> bytes:
        raise MemoryError("no room")

    async with manual(config) as harness:
        monkeypatch.setattr(module, "batch_of_encoded", encode)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        submit(harness)
        await until(lambda: bool(harness.failures))
        (error,) = harness.failures
        assert isinstance(error, MemoryError)
        harness.failures.clear()


@story
async def test_configured_policy_founds_the_cluster_once(config: Config) -> None:
    async with Harness(config) as harness:
        state = harness.controller.state
        assert state.cluster_id == config.cluster.id
        assert state.site == config.policy != Site()
        assert sorted(state.pools) == ["fast", "wide"]
        revision = state.revision
        await harness.restart()
        assert harness.controller.state.revision == revision


@story
async def test_first_batch_waits_for_a_majoritys_time(config: Config) -> None:
    """Regression: polling the empty queue once took the leader's own wall clock as the agreed time."""
    harness = manual(config)
    harness.bounds = ClockBounds(None, None)
    await harness.open(founded=False)
    harness.controller.proposer.schedule()
    for _ in range(5):
        await asyncio.sleep(0)
        harness.engine.on_change()
    assert harness.engine.uncommitted == 0, "the cluster was founded by one replica's clock"
    hour_ago = Instant(START - seconds(3600))
    harness.engine.bounds = ClockBounds(hour_ago, hour_ago)
    harness.engine.on_change()
    await until(lambda: harness.engine.uncommitted > 0)
    harness.engine.commit()
    assert harness.controller.state.at == hour_ago
    await harness.close()


@story
async def test_earlier_due_check_does_not_slow_down_consecutive_cycles() -> None:
    woken: list[None] = []

    def fail(error: BaseException) -> NoReturn:
        raise error

    pass_timer = PassTimer(
        next_due=lambda _: None, idle=lambda: True, wake=lambda: woken.append(None), clock=SystemClock(), fail=fail
    )
    pass_timer.rest()
    pass_timer.passed(Instant(1), cost_s=0.0, found=True, decided=False)
    await until(lambda: bool(woken))
    assert pass_timer.due and not pass_timer.sleeping
    pass_timer.stop()


@story
async def test_scheduler_that_never_settles_is_slowed_down(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    from forebay.replica.messages.events import NodeResumed

    async with Harness(config) as harness:
        node = c.Actor(c.ActorRole.AGENT, "n1")
        id_ = bytes.fromhex(harness.new_id())
        await harness.controller.submit(c.Request(id_, node, c.RegisterNode("n1", 2, "instance", "disk")))
        monkeypatch.setattr("forebay.cluster.server.pass_timer.PASSES_IN_A_ROW_MAX", 5)
        monkeypatch.setattr("forebay.cluster.server.planner.run_cycle", lambda index, at: (NodeResumed("n1"),))
        before = harness.engine.last_index
        harness.controller.proposer.schedule()
        await until(lambda: harness.controller.proposer.pass_timer.sleeping)
        assert 5 <= harness.engine.last_index - before <= 7
        # A command is carried out nevertheless.
        assert (await harness.submit(hold=True)).status == 201


@story
async def test_after_an_expensive_cycle_commands_proceed_without_one_during_the_rest(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.replica.scheduler.index import SchedulingIndex
    from forebay.replica.scheduler.scheduling_cycle import run_cycle as real

    passes = 0

    async with manual(config) as harness:
        assert isinstance(harness.clock, ManualClock)
        clock = harness.clock

        def run_cycle(index: SchedulingIndex, at: Instant) -> tuple[Event, ...]:
            nonlocal passes
            passes += 1
            clock.advance(0.05)
            return real(index, at)

        monkeypatch.setattr("forebay.cluster.server.pass_timer.PASS_CHEAP_S", 0.0002)
        monkeypatch.setattr("forebay.cluster.server.planner.run_cycle", run_cycle)
        for number in range(1, 4):
            answer = submit(harness)
            await until(lambda: harness.engine.uncommitted > 0)
            harness.engine.commit()
            assert (await answer).job == number
        assert passes == 1
        await until(lambda: passes == 2)


@story
async def test_precomputed_state_equals_the_folded_one(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    async with manual(config) as harness:
        proposer, compared = harness.controller.proposer, 0
        foresee = proposer.precomputed

        def compare(before: State, data: bytes) -> tuple[Batch, State] | None:
            nonlocal compared
            precomputed = foresee(before, data)
            if precomputed is not None:
                batch, after = precomputed
                decoded = decode_batch(data)
                settled = apply_batch(before, decoded)
                assert decoded == batch
                assert settled == after
                assert settled is not None and state_digest(settled) == state_digest(after)
                compared += 1
            return precomputed

        monkeypatch.setattr(proposer, "precomputed", compare)
        answers = [submit(harness, script=SCRIPT, hold=Hold.NONE) for _ in range(9)]
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.commit()
        answers += [harness.controller.submit(c.Request(command_id(), ALICE, c.CancelJob(job))) for job in (1, 2, 77)]
        while not all(answer.done() for answer in answers):
            await until(lambda: harness.engine.uncommitted > 0)
            harness.engine.commit()
        assert compared >= 2


@story
async def test_nothing_is_precomputed_for_other_bytes_or_another_state(config: Config) -> None:
    async with manual(config) as harness:
        answer = submit(harness)
        await until(lambda: harness.engine.uncommitted == 1)
        proposer, before = harness.controller.proposer, harness.controller.state
        data = harness.engine.journal.entry(harness.engine.last_index).data
        assert proposer.precomputed(before, data) is not None
        assert proposer.precomputed(before, data + b"\0") is None
        assert proposer.precomputed(msgspec.structs.replace(before), data) is None
        harness.engine.commit()
        assert proposer.precomputed(before, data) is None
        assert (await answer).job == 1

"""Simulated world that repeats a window with a virtual clock, real decisions, and recorded service times.

Theory of operation
===================

External input keeps its recorded time and order. A *work* is the next task of an agent, or of an external job's
scheduler (`services`). A work that starts with the same entry as in the ledger is *in place*: its reports keep their
positions in the ledger. Any other work is *moved*: its reports come from the event queue after the recorded spans,
between the moments of the ledger. So an unchanged world makes the same decisions at the same moments, and a changed
world does so until the change has its first effect.

A scheduling cycle runs wherever the ledger has a cycle. Without a known difference there are no other cycles, because
further cycles of the leader had no effect. After the first difference, a cycle also follows every settled command and
every due time, unless the ledger has a cycle within `PASS_LAG_US`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from forebay.cluster.audit.report import Window
from forebay.cluster.audit.whatif.changes import ChangeRejected, ScenarioChanges
from forebay.cluster.audit.whatif.observed import WindowFigures
from forebay.cluster.audit.whatif.recorded import PASS, ItemKind, Moment, RecordedItem
from forebay.cluster.audit.whatif.services import (
    CANCEL_US,
    INTERRUPTED_US,
    Answer,
    Lane,
    RecordedService,
    Services,
    Work,
    answer_in,
    is_end,
    touched_by,
    works_of,
)
from forebay.cluster.server import jobs_under_way
from forebay.replica.decide import decide, is_by_key
from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import CONTROLLER, Actor, Command, Entry, Event, Request, jobs_of, kind_of
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import Dependency, JobState, Stage, agent_of
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state import State
from forebay.replica.values import (
    MAILS_SETTLED_MAX,
    MICROSECONDS_PER_SECOND,
    RESTARTED_MAX,
    Instant,
    LedgerViolation,
    Rejection,
)

PASS_LAG_US: Final = MICROSECONDS_PER_SECOND // 4
"""Delay within which a cycle of the ledger replaces a simulated cycle, microseconds.

A leader's delay is mostly a millisecond; under load, cycles pause for up to 0.1 s.
"""

PASSES_IN_A_ROW_MAX: Final = 64
"""Maximum number of consecutive scheduling cycles at one moment, as in a leader; the next cycle waits for an event."""

FOREVER: Final = 1 << 62
"""Time later than any other."""


def apply_changes(state: State, at: Instant, changes: ScenarioChanges) -> SpeculativeState:
    """Return a state with the changes applied, as an open batch.

    Raises:
        ChangeRejected: A change is impossible.
    """
    growing = SpeculativeState(state, Instant(max(state.at, at)))
    for actor, command in changes.commands(state):
        facts = growing.facts if is_by_key(command) else growing.state()
        decision = decide(facts, Request(b"", actor, command), growing.at)
        if isinstance(decision, Rejection):
            raise ChangeRejected(decision)
        growing.add(Entry(b"", actor, kind_of(command), decision.events))
    return growing


class _Due(NamedTuple):
    """Scheduled report with its time; reports at one time keep the order of the ledger."""

    at: int
    entry: int
    answer: Answer


class _Operation:
    """Work in progress in this world."""

    def __init__(self, work: Work, service: RecordedService | None, *, in_place: bool) -> None:
        self.work, self.service, self.in_place = work, service, in_place
        self.due: deque[_Due] = deque()
        """Remaining reports."""
        self.said = 0
        """Number of the service's reports that kept their positions in the ledger."""
        self.token = 0
        """Token of the valid entries in the event queue; entries with other tokens are void."""
        self.suspended_at = 0
        self.is_cut = False

    @property
    def stage(self) -> int:
        """Return the stage of the work."""
        return self.work[0]


class Replaying:
    """Simulated world in a window."""

    def __init__(
        self,
        state: State,
        services: Services,
        window: Window,
        changes: ScenarioChanges | None = None,
        *,
        by_times: bool = False,
    ) -> None:
        """Start in `state`, at the start of the window.

        With `by_times`, all works that start in the window are moved, even without a difference.

        Raises:
            ChangeRejected: A change is impossible in that state.
        """
        self.state = state
        self.decisions = self.same = 0
        """Number of ledger decisions repeated at their positions, and the number with the same outcome."""
        self._services, self._changes = services, changes
        self._index = SchedulingIndex(state)
        self.observed = WindowFigures(state, window, self._index, samples=not by_times)
        self._noted = 0
        self._doing: dict[Lane, _Operation] = {}
        self._taken: dict[Lane, dict[int, int]] = {}
        """Completed services, count by stage."""
        self._event_queue: list[tuple[int, int, int, int, Lane]] = []
        """Time, corresponding ledger entry, order, token, and lane."""
        self._sequence = self._tokens = 0
        self._silent: dict[Lane, None] = {}
        """Works with a due report whose agent is down or whose script is suspended."""
        self._by_times = self._differs = by_times
        """True once this world is known to differ from the ledger."""
        self._is_unsettled = False
        self._in_a_row = 0
        self._passed_at = Instant(state.at)
        self._here: dict[int, int] = {}
        """Job ID in the ledger -> different ID in this world, or 0 if the job was rejected in this world."""
        self._there: dict[int, int] = {}
        self._restarts: tuple[int, list[int]] = (0, [])
        """Term of the leader, and the jobs whose operations the leader still has to restart."""
        self._begin(touched=sorted(state.unfinished), index=0, at=window.from_us)
        if changes is not None:
            self._differs = True
            self._close(apply_changes(state, Instant(window.from_us), changes), None)

    # Moments ----------------------------------------------------------------------------------------------------------

    def show(self, moment: Moment, pass_at: int) -> None:
        """Simulate a moment of the ledger; `pass_at`: time of the ledger's next scheduling cycle after it."""
        self._go_on((moment.at, moment.entry + 1), pass_at)
        self.observed.sample(moment.at)
        growing = SpeculativeState(self.state, Instant(max(moment.at, self.state.at)))
        for item in moment.items:
            self._take(growing, moment, item)
        self._close(growing, moment.entry)

    def finish(self, to_us: int) -> None:
        """Continue to the end of the window, beyond the ledger's record of scheduling cycles."""
        self._differs = self._differs or to_us - self.state.at > PASS_LAG_US
        self._go_on((to_us, FOREVER), FOREVER)

    def _go_on(self, until: tuple[int, int], ledger_at: int) -> None:
        """Simulate up to a moment; skip a cycle that is due shortly before a cycle of the ledger."""
        while True:
            following = self._event_queue[0][:2] if self._event_queue else (FOREVER, FOREVER)
            pass_at = self._pass_at()
            if ledger_at - pass_at <= PASS_LAG_US:
                pass_at = FOREVER
            if min(following, (pass_at, 0)) >= until:
                return
            if pass_at <= following[0]:
                self._pass(pass_at)
            else:
                self._report(following)

    def _pass_at(self) -> int:
        """Return the time of the next scheduling cycle that the ledger lacks."""
        if not self._differs:
            return FOREVER
        if self._is_unsettled and self._in_a_row < PASSES_IN_A_ROW_MAX:
            return self.state.at
        due = self._index.next_due(self._passed_at)
        return FOREVER if due is None else max(due, self.state.at)

    def _pass(self, at: int) -> None:
        self.observed.sample(at)
        growing = SpeculativeState(self.state, Instant(at))
        events = self._events_of_pass(growing)
        if events:
            growing.add(Entry(b"", CONTROLLER, PASS, events))
        self._in_a_row = self._in_a_row + 1 if events else 0
        self._close(growing, None)

    def _events_of_pass(self, growing: SpeculativeState) -> tuple[Event, ...]:
        self._follow(growing)
        self._passed_at = growing.at
        self._is_unsettled = False
        return run_cycle(self._index, growing.at)

    def _follow(self, growing: SpeculativeState) -> None:
        """Update the index to the state of a batch."""
        state = growing.state()
        self._index.advance(state, (event for entry in growing.entries[self._noted :] for event in entry.events))
        self._noted = len(growing.entries)

    def _close(self, growing: SpeculativeState, index: int | None) -> None:
        """Close a batch; `index`: its entry in the ledger, None if it has none."""
        if not growing.entries:
            return
        self._follow(growing)
        self._noted = 0
        self.state = growing.state()
        events = [event for entry in growing.entries for event in entry.events]
        if not events:
            return
        self._is_unsettled = True
        if any(entry.command != PASS for entry in growing.entries):
            self._in_a_row = 0
        for event in events:
            self._react(event, growing.at)
        self._begin(touched_by(events), index, growing.at)
        self.observed.saw(growing.at, events, self.state)

    # The event queue --------------------------------------------------------------------------------------------------

    def _begin(self, touched: Iterable[int], index: int | None, at: int) -> None:
        """Start the works that are newly due, and drop those no longer due."""
        for lane, work in works_of(self.state, touched):
            doing = self._doing.get(lane)
            if doing is not None and doing.work == work:
                continue
            if doing is not None:
                del self._doing[lane]
                self._silent.pop(lane, None)
            if work is not None:
                self._doing[lane] = self._begun(lane, work, index, at)
            elif lane.job not in self.state.unfinished:
                self._taken.pop(lane, None)

    def _begun(self, lane: Lane, work: Work, index: int | None, at: int) -> _Operation:
        stage = work[0]
        known = self._known(lane, stage)
        behind = self._taken.setdefault(lane, {})
        taken = behind.get(stage, 0)
        is_kept = index == 0 or not self._by_times
        place = next((n for n, one in enumerate(known) if n >= taken and is_kept and one.index == index), None)
        if place is not None:
            behind[stage] = place + 1
            doing = _Operation(work, known[place], in_place=True)
            if not known[place].is_ended and known[place].cut_us < 0:
                # The ledger interrupted this work. Without the interruption, it ends some time later.
                self._assume(lane, doing, at)
            return doing
        service = known[taken] if taken < len(known) else next((one for one in reversed(known) if one.has_worked), None)
        behind[stage] = min(taken + 1, len(known))
        doing = _Operation(work, service, in_place=False)
        if service is not None and service.is_ended:
            doing.due.extend(_Due(at + us, entry, answer) for entry, us, answer in service.answers)
            self._plan(lane, doing)
        else:
            self._assume(lane, doing, at)
        return doing

    def _known(self, lane: Lane, stage: int) -> list[RecordedService]:
        """Return the recorded services of a job's stage, in order."""
        of_job = self._services.by_job.get(self._there.get(lane.job, lane.job), ())
        return [one for one in of_job if one.stage == stage]

    def _assume(self, lane: Lane, doing: _Operation, at: int) -> None:
        """Schedule the end of a work without a recorded end, after the duration of its next service or the usual one.

        The end is never before the recorded duration.
        """
        if lane.is_scheduler:
            return
        stage, service, job = doing.stage, doing.service, self.state.jobs[lane.job]
        least_us = 0 if service is None else service.lasted_us + INTERRUPTED_US
        was_seen = service is not None and service.lasted_us > 0
        worked = next((one.lasted_us for one in self._known(lane, stage) if one.has_worked), None)
        usual_us = self._services.usual_us(stage, job, was_seen=was_seen) if worked is None else worked
        takes_us = max(least_us, usual_us)
        if not doing.in_place and service is not None:
            doing.due.extend(_Due(at + us, entry, one) for entry, us, one in service.answers if not is_end(one))
        if stage == Stage.RUN:
            limit_us = self._services.limit_us(job)
            if not doing.in_place and (service is None or service.begun_us is None):
                begins_us = min(self._services.usual_begin_us, takes_us)
                doing.due.append(_Due(at + begins_us, FOREVER, c.ScriptStarted()))
            is_late = 0 < limit_us <= takes_us
            end = c.ScriptEnded(JobState.TIMEOUT if is_late else JobState.COMPLETED)
            doing.due.append(_Due(at + takes_us, FOREVER, end))
        else:
            doing.due.append(_Due(at + takes_us, FOREVER, c.OperationDone()))
        self._plan(lane, doing)

    def _plan(self, lane: Lane, doing: _Operation) -> None:
        """Put the next report of a work into the event queue."""
        self._tokens += 1
        doing.token = self._tokens
        if doing.due:
            self._sequence += 1
            at = max(doing.due[0].at, self.state.at)
            heapq.heappush(self._event_queue, (at, doing.due[0].entry, self._sequence, doing.token, lane))

    def _report(self, until: tuple[int, int]) -> None:
        """Take the next reports from the event queue that have the same time and ledger entry."""
        self.observed.sample(until[0])
        growing = SpeculativeState(self.state, Instant(max(until[0], self.state.at)))
        while self._event_queue and self._event_queue[0][:2] <= until:
            _, _, _, token, lane = heapq.heappop(self._event_queue)
            doing = self._doing.get(lane)
            if doing is None or doing.token != token:
                continue
            if self._is_silent(growing, lane, doing):
                self._silent[lane] = None
                continue
            self._say(growing, lane, doing, doing.due.popleft().answer)
            if doing.due:
                self._plan(lane, doing)
        self._close(growing, None)

    def _is_silent(self, growing: SpeculativeState, lane: Lane, doing: _Operation) -> bool:
        if lane.is_scheduler:
            return False
        job = growing.facts.jobs.get(lane.job)
        if job is None:
            return False
        if doing.suspended_at and is_end(doing.due[0].answer):
            return True
        node = growing.facts.nodes.get(agent_of(job, growing.facts.buffers.get(lane.job)))
        return node is not None and node.down

    def _say(self, growing: SpeculativeState, lane: Lane, doing: _Operation, answer: Answer) -> tuple[Event, ...]:
        """Submit a report of an agent or an external job's scheduler; return the resulting events."""
        job = growing.facts.jobs.get(lane.job)
        if job is None:
            return ()
        if not isinstance(answer, c.OperationResult):
            name = "" if job.external_job is None else job.external_job.scheduler
            return self._settle(growing, Actor(c.ActorRole.SCHEDULER, name), answer)
        node = agent_of(job, growing.facts.buffers.get(lane.job))
        report = c.ReportOperation(node, lane.job, doing.work[1], Stage(doing.stage), answer)
        return self._settle(growing, Actor(c.ActorRole.AGENT, node), report)

    def _settle(self, growing: SpeculativeState, actor: Actor, command: Command) -> tuple[Event, ...]:
        try:
            facts = growing.facts if is_by_key(command) else growing.state()
            decision = decide(facts, Request(b"", actor, command), growing.at)
            if isinstance(decision, Rejection):
                return ()
            growing.add(Entry(b"", actor, kind_of(command), decision.events))
        except Exception:
            # Like a leader, which answers such a command and continues.
            return ()
        return decision.events

    def _react(self, event: Event, at: int) -> None:
        """Let agents react to an event: end or suspend a script, or resume reporting."""
        match event:
            case e.CancelRequested() | e.RequeueRequested():
                self._cut(Lane(event.job, False), at)
            case e.JobSuspended():
                doing = self._doing.get(Lane(event.job, False))
                if doing is not None:
                    doing.suspended_at = at
            case e.JobResumed():
                self._resumed(Lane(event.job, False), at)
            case e.NodeCameBack() | e.NodeRegistered():
                for lane in [lane for lane in self._silent if not self._doing[lane].suspended_at]:
                    del self._silent[lane]
                    self._plan(lane, self._doing[lane])
            case e.ClockSet():
                self._set_clock(event.at - at)
            case _:
                pass

    def _cut(self, lane: Lane, at: int) -> None:
        """End a script on request, after the recorded delay."""
        doing = self._doing.get(lane)
        if doing is None or doing.stage != Stage.RUN or doing.is_cut:
            return
        service = doing.service
        doing.is_cut = True
        was_cut = service is not None and service.cut_us >= 0
        if doing.in_place and was_cut:
            return
        doing.in_place = False
        after_us = CANCEL_US
        if service is not None and was_cut and service.answers and is_end(service.answers[-1][2]):
            after_us = max(0, service.lasted_us - service.cut_us)
        end = _Due(at + after_us, FOREVER, c.ScriptEnded(JobState.CANCELLED))
        started = [due for due in doing.due if not is_end(due.answer) and due.at <= end.at]
        doing.due = deque([*started, end])
        doing.suspended_at = 0
        self._silent.pop(lane, None)
        self._plan(lane, doing)

    def _resumed(self, lane: Lane, at: int) -> None:
        doing = self._doing.get(lane)
        if doing is None or not doing.suspended_at:
            return
        later_us = at - doing.suspended_at
        doing.suspended_at = 0
        doing.due = deque(due._replace(at=due.at + later_us) for due in doing.due)
        self._silent.pop(lane, None)
        self._plan(lane, doing)

    def _set_clock(self, by_us: int) -> None:
        """Shift scheduled reports by the change of the clock."""
        for doing in self._doing.values():
            doing.due = deque(due._replace(at=due.at + by_us) for due in doing.due)
            doing.suspended_at += by_us if doing.suspended_at else 0
        self._event_queue = [
            (at + by_us, entry, number, token, lane) for at, entry, number, token, lane in self._event_queue
        ]
        self._passed_at = Instant(0)

    # Items of the ledger ----------------------------------------------------------------------------------------------

    def _take(self, growing: SpeculativeState, moment: Moment, item: RecordedItem) -> None:
        """Process one item of the ledger."""
        match item.kind:
            case ItemKind.PASS:
                events = self._events_of_pass(growing)
                if events:
                    growing.add(Entry(b"", CONTROLLER, PASS, events))
                self._compare(item, events)
            case ItemKind.FACT:
                with suppress(LookupError, LedgerViolation):  # the object may not exist in this world
                    growing.add(Entry(b"", item.entry.actor, item.entry.command, item.entry.events))
            case ItemKind.REPORT:
                self._take_report(growing, moment, item)
            case ItemKind.EXTERNAL_JOB:
                self._take_external_job_step(growing, moment, item)
            case ItemKind.COMMAND:
                self._take_command(growing, moment, item)

    def _compare(self, item: RecordedItem, events: Sequence[Event]) -> None:
        self.decisions += 1
        if tuple(events) == item.entry.events:
            self.same += 1
        else:
            self._differs = True

    def _is_in_place(self, moment: Moment, doing: _Operation) -> bool:
        """Return whether the recorded report of this moment is the next report of this work; if so, count it."""
        if not doing.in_place or doing.service is None:
            return False
        answers = doing.service.answers
        if doing.said >= len(answers) or answers[doing.said][0] != moment.entry:
            return False
        doing.said += 1
        return True

    def _take_report(self, growing: SpeculativeState, moment: Moment, item: RecordedItem) -> None:
        lane = Lane(self._here.get(item.job, item.job), False)
        doing = self._doing.get(lane)
        answer = None if doing is None else answer_in(doing.stage, item.entry.events)
        if doing is not None and answer is not None and self._is_in_place(moment, doing):
            self._compare(item, self._say(growing, lane, doing, answer))

    def _take_external_job_step(self, growing: SpeculativeState, moment: Moment, item: RecordedItem) -> None:
        lane = Lane(self._here.get(item.job, item.job), True)
        doing = self._doing.get(lane)
        if doing is not None and item.command is not None and self._is_in_place(moment, doing):
            self._compare(item, self._settle(growing, item.entry.actor, item.command))

    def _take_command(self, growing: SpeculativeState, moment: Moment, item: RecordedItem) -> None:
        command = self._adapted(growing, moment, item)
        if command is not None and self._changes is not None:
            command = self._changes.adjusted(command)
        if command is None:
            return
        events = self._settle(growing, item.entry.actor, command)
        self._compare(item, events)
        if not events:
            self.observed.refused += 1
        self._number(item.entry.events, events)

    def _adapted(self, growing: SpeculativeState, moment: Moment, item: RecordedItem) -> Command | None:
        """Return a command with this world's job IDs and changes; None if nothing remains of the command."""
        command = item.command
        if isinstance(command, c.AdvanceSinks):
            return None  # the receivers were sent the recorded events, and this world has other revisions
        if not self._differs:
            return command
        match command:
            case c.SettleMails():
                return c.SettleMails(tuple(sorted(growing.facts.mails))[:MAILS_SETTLED_MAX])
            case c.RestartOperations():
                if self._restarts[0] != moment.term:
                    self._restarts = moment.term, jobs_under_way(growing.state())
                jobs = self._restarts[1]
                portion, jobs[:RESTARTED_MAX] = tuple(jobs[:RESTARTED_MAX]), []
                return c.RestartOperations(portion) if portion else None
            case c.ConfigureSite():
                return msgspec.structs.replace(command, expected_revision=None)
            case _:
                return command if command is None or not self._here else self._renumbered(command)

    def _renumbered(self, command: Command) -> Command | None:
        """Return a command with this world's job IDs, without rejected jobs; None if its own job was rejected."""
        changes: dict[str, object] = {}
        if isinstance(command, c.SubmitJob):
            dependencies = self._dependencies(command.request.dependencies)
            changes["request"] = msgspec.structs.replace(command.request, dependencies=dependencies)
        elif isinstance(command, c.UpdateJob) and command.change.dependencies is not None:
            dependencies = self._dependencies(command.change.dependencies)
            changes["change"] = msgspec.structs.replace(command.change, dependencies=dependencies)
        if isinstance(command, c.SubmitJob | c.UpdateJob):
            numbered = ((one, self._here.get(one.array, one.array)) for one in command.after_tasks)
            changes["after_tasks"] = tuple(
                msgspec.structs.replace(one, array=array) for one, array in numbered if array
            )
        job = getattr(command, "job", 0)
        if isinstance(job, int) and job:  # external jobs have names
            if not (number := self._here.get(job, job)):
                return None
            changes["job"] = number
        return msgspec.structs.replace(command, **changes) if changes else command

    def _dependencies(self, recorded: Sequence[Dependency]) -> tuple[Dependency, ...]:
        numbered = ((one, self._here.get(one.job, one.job)) for one in recorded)
        return tuple(msgspec.structs.replace(one, job=job) for one, job in numbered if job)

    def _number(self, recorded: Sequence[Event], events: Sequence[Event]) -> None:
        """Record which jobs of the ledger correspond to the jobs created here."""
        there, here = _made(recorded), _made(events)
        if there == here:
            return
        for place, job in enumerate(there):
            self._here[job] = here[place] if place < len(here) else 0
            if place < len(here):
                self._there[here[place]] = job

    def number_there(self, job: int) -> int:
        """Return the ledger ID of a job of this world."""
        return self._there.get(job, job)


def _made(events: Sequence[Event]) -> list[int]:
    return [job for one in events if isinstance(one, e.JobSubmitted | e.ExternalJobSetUp) for job in jobs_of(one)]

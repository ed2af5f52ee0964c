"""The scheduling pass: who may have space and CPUs now, and what is due by time alone.

One function, `plan`, both decides (its events) and explains (its verdicts), over a State and an instant. Candidates go
by priority, then by number. Per pool, the first request that does not fit reserves: smaller ones may pass it if they
will have given back before its expected start, if they fit beside it even then, or a configured number of times
(SPUR.md, 3). Per node, a staged job that waits for CPUs keeps later ones off that node.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from replica import events as e
from replica.buffers import HOLDING, Buffer, BufferState
from replica.jobs import ENDED, Hold, Job, JobState
from replica.limits import EVENTS_PER_PASS_MAX
from replica.pending import Reason, Verdict, buffer_gate, early_gate, later_reason
from replica.pools import free_bytes
from replica.staging import active_stage, failed, timeout_at, timeout_s, waiting_stage
from replica.state import State
from replica.units import NEVER, Instant, format_size, seconds

REPLAN_S = 30
"""How often a pass is repeated while a job waits for space, seconds: expected starts move with time alone."""

DRAIN_TIME_S = 60
"""What stage-out and teardown are expected to take in estimates of a start, seconds, until transfer rates are
measured.
"""


class Plan(msgspec.Struct, frozen=True):
    """What a pass would do at once, and what it says of every job that is not over."""

    events: tuple[e.Event, ...]
    verdicts: Mapping[int, Verdict]


def plan(state: State, at: Instant) -> Plan:
    """Return the pass over `state` at `at`. Pure: the same arguments give the same plan."""
    return _Pass(state, at, explain=True).run()


def events_of_pass(state: State, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of `plan` alone; figures that only people read are not computed."""
    return _Pass(state, at, explain=False).run().events


def next_due(state: State, after: Instant) -> Instant | None:
    """Return the earliest instant after `after` at which a pass could do something by time alone, or None."""
    due: list[int] = []
    for job_id in state.unfinished:
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        due.append(job.retry_at)
        due.append(timeout_at(state.policy, job, buffer))
        if job.state is JobState.PENDING:
            due.append(job.spec.begin_at)
            if job.spec.deadline != NEVER and not job.late:
                due.append(job.spec.deadline - seconds(job.spec.time_limit_s) + 1)
            if job.hold and state.policy.staged_hold_time_s:
                due.append(job.held_at + seconds(state.policy.staged_hold_time_s))
            if buffer is not None and buffer.state is BufferState.PENDING and not job.hold:
                due.append(after + seconds(REPLAN_S))
    later = [instant for instant in due if instant > after]
    return Instant(min(later)) if later else None


class _Pass:
    def __init__(self, state: State, at: Instant, *, explain: bool) -> None:
        self.state = state
        self.at = at
        self.explain = explain
        self.events: list[e.Event] = []
        self.verdicts: dict[int, Verdict] = {}
        self.held = dict(state.held_bytes)
        self.cpus_free = {name: node.cpus for name, node in state.nodes.items() if node.state.name == "UP"}
        self.assigned = dict.fromkeys(self.cpus_free, 0)
        self.heads: dict[str, _Head] = {}
        self.waiting_nodes: dict[str, int] = {}
        self.waiting_anywhere = 0
        self.staging = 0

    def run(self) -> Plan:
        state = self.state
        candidates: list[Job] = []
        for job_id in sorted(state.unfinished):
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            self._account(job, buffer)
            if self._timed(job, buffer):
                # The operation is ordered again or has failed in this very pass: what follows is for the next one.
                self.verdicts[job_id] = self._still(job, buffer)
                continue
            if job.state is JobState.PENDING:
                candidates.append(job)
            else:
                self.verdicts[job_id] = later_reason(job, buffer)
        candidates.sort(key=lambda job: (-job.priority, job.id))
        for job in candidates:
            self.verdicts[job.id] = self._judge(job, state.buffers.get(job.id))
        self._purge()
        return Plan(tuple(self.events), self.verdicts)

    def _account(self, job: Job, buffer: Buffer | None) -> None:
        if job.node in self.assigned:
            self.assigned[job.node] += 1
        on_cpus = job.state in (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)
        if buffer is not None:
            on_cpus = on_cpus or buffer.state is BufferState.POST_RUN
            self.staging += buffer.state is BufferState.STAGING_IN
        if on_cpus and job.node in self.cpus_free:
            self.cpus_free[job.node] -= job.spec.cpus

    def _still(self, job: Job, buffer: Buffer | None) -> Verdict:
        if job.state is not JobState.PENDING:
            return later_reason(job, buffer)
        return (
            early_gate(self.state, job)
            or buffer_gate(buffer, job)
            or Verdict(Reason.NONE, "nothing holds the job back")
        )

    def _timed(self, job: Job, buffer: Buffer | None) -> bool:
        """Do what is due by time alone; return whether something was."""
        state, at = self.state, self.at
        if len(self.events) >= EVENTS_PER_PASS_MAX:
            return False
        if job.state is JobState.PENDING:
            if job.eligible_at == NEVER and job.spec.begin_at <= at:
                self.events.append(e.JobBecameEligible(job.id))
                return True
            if job.spec.deadline != NEVER and not job.late and at + seconds(job.spec.time_limit_s) > job.spec.deadline:
                self.events.append(e.DeadlineMissed(job.id))
                return True
        node = state.nodes.get(job.node)
        if buffer is None or (node is not None and node.down):
            # The clocks of operations stand still while their agent cannot be heard.
            return False
        if job.retry_at != NEVER and job.retry_at <= at:
            stage = waiting_stage(job, buffer)
            assert stage is not None
            self.events.append(
                e.StageRetried(job.id, stage, job.attempt + 1, f"retry {job.failures} of {state.policy.stage_retries}")
            )
            return True
        late_at = timeout_at(state.policy, job, buffer)
        if late_at != NEVER and late_at <= at:
            stage = active_stage(job, buffer)
            assert stage is not None
            self.events.extend(failed(state, job, stage, f"Timeout @ {timeout_s(state.policy, stage) * 1000} msec", at))
            return True
        reason = self._revocation(job, buffer)
        if reason:
            self.events.append(e.AllocationRevoked(job.id, job.attempt, reason))
            self.events.append(e.TeardownStarted(job.id, job.attempt + 1, JobState.PENDING, True, reason))
            return True
        return False

    def _revocation(self, job: Job, buffer: Buffer) -> str:
        """Return why a pending job's staged buffer is taken back, or the empty string."""
        if job.state is not JobState.PENDING or buffer.state not in (BufferState.STAGING_IN, BufferState.STAGED_IN):
            return ""
        node = self.state.nodes.get(job.node)
        if node is not None and node.drained and not node.down:
            return f"node {job.node} is drained"
        if node is not None and not node.down and node.cpus < job.spec.cpus:
            return f"node {job.node} has only {node.cpus} CPUs now"
        limit_s = self.state.policy.staged_hold_time_s
        if limit_s and job.hold is not Hold.NONE and self.at >= job.held_at + seconds(limit_s):
            return f"held for longer than StagedHoldTime, {limit_s} s"
        return ""

    def _judge(self, job: Job, buffer: Buffer | None) -> Verdict:
        verdict = early_gate(self.state, job)
        if verdict is not None:
            return verdict
        verdict = buffer_gate(buffer, job)
        if verdict is None:
            return self._place(job, buffer)
        if buffer is not None and buffer.state is BufferState.PENDING:
            return self._reserve(job, buffer, verdict)
        return verdict

    # Space -----------------------------------------------------------------------------------------------------

    def _reserve(self, job: Job, buffer: Buffer, verdict: Verdict) -> Verdict:
        node = self._node_for_stage_in(job)
        pool = self.state.pools.get(buffer.pool)
        free = 0 if pool is None else free_bytes(pool, self.held.get(pool.name, 0))
        figures: list[tuple[str, str]] = []
        if self.explain:
            figures += [
                ("asked", format_size(buffer.granted_bytes)),
                ("pool", buffer.pool or "-"),
                ("free", format_size(free)),
            ]
        head = self.heads.get(buffer.pool) if buffer.granted_bytes else None
        if head is not None:
            figures.append(("first_in_line", str(head.job)))
        counted = False
        if self.staging >= self.state.policy.operations_per_stage_max:
            sentence = f"{self.staging} stage-ins are under way, and no more may be"
        elif not node:
            # Before it can become the first in line: who cannot be placed must not keep others from the pool.
            sentence = "no node that is up could hold the job"
        elif buffer.granted_bytes > free:
            sentence = "its pool has not enough free space"
            if head is None:
                head = self._head(job, buffer, free)
                self.heads[buffer.pool] = head
                if head.start_at != NEVER:
                    figures.append(("expected_start_us", str(head.start_at)))
        elif head is not None and not self._may_pass(job, buffer, head):
            sentence = f"job {head.job} is first in line for the pool and has been passed {head.passed} times"
        elif len(self.events) >= EVENTS_PER_PASS_MAX:
            sentence = "the job may have its space in the next pass"
        else:
            if head is not None:
                counted = not head.harmless
                head.passed += counted
            self.held[buffer.pool] = self.held.get(buffer.pool, 0) + buffer.granted_bytes
            self.assigned[node] += 1
            self.staging += 1
            allocated = e.BufferAllocated(job.id, node, job.attempt + 1)
            if head is not None:
                allocated = e.BufferAllocated(job.id, node, job.attempt + 1, head.job, counted, head.start_at)
            self.events.append(allocated)
            sentence = "the job may have its space now"
        return Verdict(verdict.reason, sentence, tuple(figures))

    def _node_for_stage_in(self, job: Job) -> str:
        """Return the node with the fewest jobs that could run this one, or the empty string."""
        fitting = [name for name in self.cpus_free if self.state.nodes[name].cpus >= job.spec.cpus]
        return min(fitting, key=lambda name: (self.assigned[name], name), default="")

    def _head(self, job: Job, buffer: Buffer, free: int) -> _Head:
        """Return the first in line for a pool, with when it should get its space if every holder uses its time."""
        releases: list[tuple[int, int]] = []
        for other in self.state.unfinished:
            holder = self.state.buffers.get(other)
            if holder is not None and holder.pool == buffer.pool and holder.state in HOLDING:
                releases.append((self._release_at(self.state.jobs[other], holder), holder.granted_bytes))
        for event in self.events:
            if isinstance(event, e.BufferAllocated) and self.state.buffers[event.job].pool == buffer.pool:
                releases.append(
                    (self._expected_end(self.state.jobs[event.job]), self.state.buffers[event.job].granted_bytes)
                )
        for release_at, size in sorted(releases):
            free += size
            if free >= buffer.granted_bytes:
                start_at = release_at if job.promised_at == NEVER else min(release_at, job.promised_at)
                return _Head(job.id, job.passed, Instant(start_at), free - buffer.granted_bytes)
        return _Head(job.id, job.passed, NEVER, 0)

    def _release_at(self, job: Job, buffer: Buffer) -> int:
        if job.state in ENDED or job.state is JobState.STAGE_OUT:
            return self.at + seconds(DRAIN_TIME_S)
        # A job that has not started counts from its last step, not from now: else its end would move with every pass.
        since = job.started_at if job.started_at != NEVER else buffer.changed_at
        return max(self.at, since + seconds(job.spec.time_limit_s)) + seconds(DRAIN_TIME_S)

    def _expected_end(self, job: Job) -> int:
        return self.at + seconds(job.spec.time_limit_s) + seconds(DRAIN_TIME_S)

    def _may_pass(self, job: Job, buffer: Buffer, head: _Head) -> bool:
        # Estimates move, because holders start later than expected. What was expected at the first pass does not, so
        # that passes which are not counted come to an end.
        head.harmless = True
        if head.start_at != NEVER and self.at < head.start_at:
            if self._expected_end(job) <= head.start_at:
                return True
            if buffer.granted_bytes <= head.spare_bytes:
                head.spare_bytes -= buffer.granted_bytes
                return True
        head.harmless = False
        return head.passed < self.state.policy.max_passes

    # CPUs ------------------------------------------------------------------------------------------------------

    def _place(self, job: Job, buffer: Buffer | None) -> Verdict:
        cpus = job.spec.cpus
        if buffer is None:
            nodes = sorted(
                name for name, free in self.cpus_free.items() if free >= cpus and name not in self.waiting_nodes
            )
            nodes.sort(key=lambda name: -self.cpus_free[name])
        else:
            node = self.state.nodes.get(job.node)
            if node is not None and node.down:
                return Verdict(
                    Reason.NODE_DOWN, f"the job's data is on node {job.node}, which is down", (("node", job.node),)
                )
            fits = self.cpus_free.get(job.node, 0) >= cpus and job.node not in self.waiting_nodes
            nodes = [job.node] if fits else []
        if nodes and not self.waiting_anywhere:
            if len(self.events) >= EVENTS_PER_PASS_MAX:
                return Verdict(Reason.NONE, "the job runs in the next pass")
            self.cpus_free[nodes[0]] -= cpus
            self.events.append(e.RunOrdered(job.id, nodes[0], job.attempt + 1))
            return Verdict(Reason.NONE, "nothing holds the job back")
        if not self._could_run_on(job.node if buffer is not None else "", cpus):
            # It waits for a node to come, not for CPUs to become free: nobody is kept back for it.
            return Verdict(Reason.REQ_NODE_NOT_AVAIL, "no node that is up has so many CPUs", (("cpus", str(cpus)),))
        first = self.waiting_anywhere or (self.waiting_nodes.get(job.node, 0) if buffer is not None else 0)
        if first:
            return Verdict(Reason.PRIORITY, f"job {first} has priority", (("first_in_line", str(first)),))
        if buffer is None:
            self.waiting_anywhere = job.id
        else:
            self.waiting_nodes[job.node] = job.id
        figures = (
            ("cpus", str(cpus)),
            ("free_cpus", ",".join(f"{name}:{free}" for name, free in sorted(self.cpus_free.items()))),
        )
        return Verdict(Reason.RESOURCES, "no node has enough free CPUs for the job", figures)

    def _could_run_on(self, node: str, cpus: int) -> bool:
        """Return whether the node, or any node if it is empty, is up and has so many CPUs in all."""
        names = [node] if node else list(self.cpus_free)
        return any(name in self.cpus_free and self.state.nodes[name].cpus >= cpus for name in names)

    # ---------------------------------------------------------------------------------------------------------------

    def _purge(self) -> None:
        surplus = len(self.state.finished) - self.state.policy.finished_jobs_kept
        if surplus <= 0:
            return
        waited_for = {
            dependency.job
            for job_id in self.state.unfinished
            for dependency in self.state.jobs[job_id].spec.dependencies
        }
        oldest = [job_id for job_id in sorted(self.state.finished) if job_id not in waited_for]
        for job_id in oldest[: max(0, min(surplus, EVENTS_PER_PASS_MAX - len(self.events)))]:
            self.events.append(e.JobPurged(job_id))


class _Head:
    """The first request in line for a pool."""

    def __init__(self, job: int, passed: int, start_at: Instant, spare_bytes: int) -> None:
        self.job = job
        self.passed = passed
        self.start_at = start_at
        self.spare_bytes = spare_bytes
        self.harmless = False
        """Whether the last one let past does not delay this one."""

"""The scheduling pass: who may have space and CPUs now, and what is due by time alone.

One function, `plan`, both decides (its events) and explains (its verdicts), over a State and an instant. Candidates go
by priority, then by number. Per pool, the first request that does not fit reserves: smaller ones may pass it if they
will have given back before its expected start, if they fit beside it even then, or a configured number of times
(SPUR.md, 3). Per node, a staged job that waits for CPUs keeps later ones off that node.

It walks over all jobs that are not over. The leader decides with `agenda`, which gives the same events without that.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from replica import events as e
from replica.buffers import HOLDING, Buffer, BufferState
from replica.due import due_at, due_events
from replica.jobs import Job, JobState
from replica.limits import CANDIDATES_BEHIND_MAX, EVENTS_PER_PASS_MAX
from replica.line import Head, expected_end, release_at, run_until, start_of
from replica.pending import Reason, Verdict, buffer_gate, early_gate, later_reason
from replica.pools import free_bytes
from replica.state import State
from replica.units import NEVER, Instant, format_size, seconds

REPLAN_S = 30
"""How often a pass is repeated while a job waits for space, seconds: expected starts move with time alone."""


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
        due.append(due_at(state, job, buffer))
        if waits_for_space(job, buffer) and early_gate(state, job) is None:
            due.append(after + seconds(REPLAN_S))
    return Instant(min(later)) if (later := [instant for instant in due if instant > after]) else None


def waits_for_space(job: Job, buffer: Buffer | None) -> bool:
    """Whether a job that no early gate keeps back is a candidate for space in its pool."""
    return job.state is JobState.PENDING and buffer is not None and buffer.state is BufferState.PENDING


def takes_cpus(job: Job, buffer: Buffer | None) -> bool:
    """Whether CPUs of the job's node are taken: from the order to run to the end of post-run."""
    return job.state in _ON_CPUS or (buffer is not None and buffer.state is BufferState.POST_RUN)


_ON_CPUS = (JobState.CONFIGURING, JobState.RUNNING, JobState.SUSPENDED)


class _Pass:
    def __init__(self, state: State, at: Instant, *, explain: bool) -> None:
        self.state = state
        self.at = at
        self.explain = explain
        self.events: list[e.Event] = []
        self.verdicts: dict[int, Verdict] = {}
        self.held = dict(state.held_bytes)
        self.cpus_free = {name: node.cpus for name, node in state.nodes.items() if node.state.name == "UP"}
        self.cpus_max = max((state.nodes[name].cpus for name in self.cpus_free), default=0)
        self.assigned = dict.fromkeys(self.cpus_free, 0)
        self.heads: dict[str, Head] = {}
        self.waiting_nodes: dict[str, int] = {}
        self.waiting_anywhere = 0
        self.staging = 0

    def run(self) -> Plan:
        state = self.state
        due: list[tuple[int, int]] = []
        for job_id in sorted(state.unfinished):
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            self._account(job, buffer)
            instant = due_at(state, job, buffer)
            if instant != NEVER and instant <= self.at:
                due.append((instant, job_id))
        for _, job_id in sorted(due):
            if len(self.events) >= EVENTS_PER_PASS_MAX:
                break
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            # The operation is ordered again or has failed in this very pass: what follows is for the next one.
            self.events.extend(due_events(state, job, buffer, self.at))
            self.verdicts[job_id] = self._still(job, buffer)
        candidates: list[Job] = []
        for job_id in state.unfinished:
            job = state.jobs[job_id]
            if job_id in self.verdicts:
                continue
            if job.state is JobState.PENDING:
                candidates.append(job)
            else:
                self.verdicts[job_id] = later_reason(job, state.buffers.get(job_id))
        candidates.sort(key=lambda job: (-job.priority, job.id))
        for job in candidates:
            self.verdicts[job.id] = self._judge(job, state.buffers.get(job.id))
        self._purge()
        return Plan(tuple(self.events), self.verdicts)

    def _account(self, job: Job, buffer: Buffer | None) -> None:
        if job.node in self.assigned:
            self.assigned[job.node] += 1
        self.staging += buffer is not None and buffer.state is BufferState.STAGING_IN
        if job.node in self.cpus_free and takes_cpus(job, buffer):
            self.cpus_free[job.node] -= job.spec.cpus

    def _still(self, job: Job, buffer: Buffer | None) -> Verdict:
        if job.state is not JobState.PENDING:
            return later_reason(job, buffer)
        return (
            early_gate(self.state, job)
            or buffer_gate(buffer, job)
            or Verdict(Reason.NONE, "nothing holds the job back")
        )

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
        placeable = job.spec.cpus <= self.cpus_max
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
        counted, looked = False, head
        if self.staging >= self.state.policy.operations_per_stage_max:
            sentence = f"{self.staging} stage-ins are under way, and no more may be"
        elif not placeable:
            # Before it can become the first in line: who cannot be placed must not keep others from the pool.
            sentence = "no node that is up could hold the job"
        elif head is not None and head.behind >= CANDIDATES_BEHIND_MAX:
            sentence = f"{head.behind} jobs are between it and job {head.job}, which is first in line for the pool"
        elif buffer.granted_bytes > free:
            sentence = "its pool has not enough free space"
            if head is None:
                head = self._head(job, buffer, free)
                self.heads[buffer.pool] = head
                if self.explain and head.start_at != NEVER:
                    figures.append(("expected_start_us", str(head.start_at)))
        elif head is not None and not head.may_be_passed(
            buffer.granted_bytes, expected_end(job, self.at), self.at, self.state.policy.max_passes
        ):
            sentence = f"job {head.job} is first in line for the pool and has been passed {head.passed} times"
        elif len(self.events) >= EVENTS_PER_PASS_MAX:
            sentence = "the job may have its space in the next pass"
        else:
            if head is not None:
                counted = not head.harmless
                head.passed += counted
            self.held[buffer.pool] = self.held.get(buffer.pool, 0) + buffer.granted_bytes
            node = self._node_for_stage_in(job)
            self.assigned[node] += 1
            self.staging += 1
            allocated = e.BufferAllocated(job.id, node, job.attempt + 1)
            if head is not None:
                allocated = e.BufferAllocated(job.id, node, job.attempt + 1, head.job, counted, head.start_at)
            self.events.append(allocated)
            sentence = "the job may have its space now"
        if looked is not None and placeable:
            looked.behind += 1
        return Verdict(verdict.reason, sentence, tuple(figures))

    def _node_for_stage_in(self, job: Job) -> str:
        """Return the node with the fewest jobs that could run this one; there must be one."""
        fitting = [name for name in self.cpus_free if self.state.nodes[name].cpus >= job.spec.cpus]
        return min(fitting, key=lambda name: (self.assigned[name], name))

    def _head(self, job: Job, buffer: Buffer, free: int) -> Head:
        """Return the first in line for a pool, with when it should get its space if every holder uses its time."""
        given = [event.job for event in self.events if isinstance(event, e.BufferAllocated)]

        def estimate() -> tuple[Instant, int]:
            releases: list[tuple[int, int]] = []
            for other in self.state.unfinished:
                holder = self.state.buffers.get(other)
                if holder is not None and holder.pool == buffer.pool and holder.state in HOLDING:
                    until = run_until(self.state.jobs[other], holder)
                    releases.append((release_at(until, self.at), holder.granted_bytes))
            for other in given:
                holder = self.state.buffers[other]
                if holder.pool == buffer.pool:
                    releases.append((expected_end(self.state.jobs[other], self.at), holder.granted_bytes))
            return start_of(sorted(releases), free, buffer.granted_bytes)

        return Head(job, estimate)

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

"""A scheduling pass over an agenda: who gets what now, at the cost of what it gives.

The queues are merged by (-priority, id), and one is left as soon as nothing further back in it can get anything. What
the pass gives to nodes is put into the agenda on trial, and noted, so that it can be taken back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, auto
from heapq import heapify, heappop, heappush, heapreplace, merge
from itertools import takewhile

from replica.messages import events as e
from replica.model import QUEUED_STAGES, AnyNode, Job, Stage, Standing, free_bytes, place_name
from replica.operations import Turns, due_events, reservations_due, turns_given, with_turns
from replica.scheduler.admission import (
    Place,
    SpaceAnswer,
    Wish,
    available,
    end_of,
    given_of,
    nodes_of,
    place_of,
    place_verdict,
    run_verdict,
    space_answer,
    space_verdict,
    take_note,
)
from replica.scheduler.backfill import DRAINING, NOBODY_KNOWS, Head, drain_us, release_at, start_of
from replica.scheduler.gates import reservation_of, still, waits_for_space
from replica.scheduler.index import Agenda
from replica.scheduler.index_rows import Group, Key, NodeUse, Queue
from replica.scheduler.persistent import judge_named, names_of, serve_named
from replica.scheduler.preemption import revocation_events, victims_for
from replica.scheduler.quotas import Headroom
from replica.values import CANDIDATES_BEHIND_MAX, EVENTS_PER_PASS_MAX, NEVER, Instant, Verdict


class _Follows(Enum):
    """Who may come after a candidate."""

    NEXT = auto()
    NOT_THIS_QUEUE = auto()
    """Nobody further back in the same queue can get anything."""
    NOBODY = auto()
    """Nobody further back in the same group of queues can get anything."""


def events_of_pass(agenda: Agenda, at: Instant) -> tuple[e.Event, ...]:
    """Return the events of a scheduling pass over the agenda's State at `at`."""
    agenda.catch_up()
    nodes: dict[str, NodeUse] = {}
    try:
        return tuple(AgendaPass(agenda, at, nodes).run())
    finally:
        # What was given to nodes on trial. The events, once they are settled, take it for good.
        for name, before in nodes.items():
            agenda.nodes.put(name, before)


def verdicts_of(agenda: Agenda, job_ids: Iterable[int], at: Instant) -> dict[int, Verdict]:
    """Return what holds back each of these jobs at `at`, at the cost of one pass. They must not be over."""
    agenda.catch_up()
    found: dict[int, Verdict] = {}
    asked: list[int] = []
    if reservations_due(agenda.state, at):
        jobs, buffers = agenda.state.jobs, agenda.state.buffers
        return {job_id: still(agenda.state, jobs[job_id], buffers.get(job_id)) for job_id in job_ids}
    for job_id in job_ids:
        due = agenda.due_at(job_id)
        verdict = None if due != NEVER and due <= at else agenda.gate_verdict(job_id)
        if verdict is None:
            asked.append(job_id)
        else:
            found[job_id] = verdict
    if asked:
        nodes: dict[str, NodeUse] = {}
        turn = AgendaPass(agenda, at, nodes)
        try:
            turn.run(asked)
        finally:
            for name, before in nodes.items():
                agenda.nodes.put(name, before)
        found |= turn.verdicts
    return found


class AgendaPass:
    """One pass over an agenda."""

    def __init__(self, agenda: Agenda, at: Instant, nodes: dict[str, NodeUse]) -> None:
        """`nodes` takes down what the nodes were that the pass gives something to."""
        self.agenda = agenda
        self.state = agenda.state
        self.at = at
        self.events: list[e.Event] = []
        self.nodes = nodes
        self.done: set[int] = set()
        """Jobs that something was due for: what follows is for the next pass."""
        self.turns = Turns(agenda.state.operations)
        self.held: dict[str, int] = {}
        """Pool -> bytes that this pass gave away."""
        self.heads: dict[str, Head] = {}
        self.waiting_nodes: dict[str, int] = {}
        self.any_node = AnyNode(agenda.state.partitions)
        self.headroom = Headroom(agenda.state, at)
        self.turned_away: dict[tuple[str, int, Standing | None], int] = {}
        self._to_open: set[str] = set()
        """Nodes whose first in line may be another one now."""
        self._closed: set[Queue] = set()
        """Queues in which nobody further back can get anything."""
        self._free_later: dict[tuple[str, int], int] = {}
        """(pool, instant) -> what is given back by then by those who hold it now."""
        self.asked: list[tuple[Place, int]] = []
        """Candidates whose verdicts are asked for, the next one last."""
        self.verdicts: dict[int, Verdict] = {}
        self.named = 0

    def run(self, asked: Iterable[int] = ()) -> list[e.Event]:
        """Return the events of the pass; `verdicts` then has what is said of those `asked` for."""
        state = self.state
        self.asked = sorted(((place_of(state, state.jobs[job_id]), job_id) for job_id in asked), reverse=True)
        begin_or_end = reservations_due(state, self.at)
        if begin_or_end:
            for _, job_id in self.asked:
                self.verdicts[job_id] = still(state, state.jobs[job_id], state.buffers.get(job_id))
            return list(begin_or_end)
        lines = self._due()
        self._give_turns()
        streams: list[tuple[Key, Queue, Iterator[tuple[Key, Queue]]]] = []
        opened: set[Group] = set()
        for group in self._open_groups(lines):
            opened.add(group)
            iterator = self._merged(group)
            first = next(iterator, None)
            if first is not None:
                streams.append((*first, iterator))
        # No two keys are equal, so nothing after them is ever compared.
        heapify(streams)
        while streams and (self.asked or not self.is_full):
            key, queue, iterator = streams[0]
            follows = _Follows.NEXT
            self._explain(key[:2])
            if key[1] not in self.done:
                if queue[0] == "space":
                    follows = self._reserve(key, queue)
                elif queue[0] == "named":
                    follows = self._reserve_named(key[1])
                elif queue[0] == "node":
                    follows = self._run_where_its_data_is(key, queue)
                else:
                    follows = self._run_anywhere(key, queue)
            if follows is _Follows.NOT_THIS_QUEUE:
                self._closed.add(queue)
            following = None if follows is _Follows.NOBODY else next(iterator, None)
            if following is None:
                heappop(streams)
            else:
                heapreplace(streams, (*following, iterator))
            while self._to_open:
                group = "node", self._to_open.pop()
                if group not in opened and group[1] in self.agenda.nodes.up and group in self.agenda.fronts:
                    opened.add(group)
                    iterator = self._merged(group)
                    heappush(streams, (*next(iterator), iterator))
        self._explain(None)
        self._purge()
        return self.events

    def _explain(self, reached: Place | None) -> None:
        """Say what is to be said of those asked for whose turn it is: all up to `reached`, or all.

        What the pass leaves out changes nothing, so everything is as when the candidate's turn comes in a walk.
        """
        while self.asked and (reached is None or self.asked[-1][0] <= reached):
            _, job_id = self.asked.pop()
            job, buffer = self.state.jobs[job_id], self.state.buffers.get(job_id)
            if job_id in self.done:
                self.verdicts[job_id] = still(self.state, job, buffer)
                continue
            verdict = self.agenda.gate_verdict(job_id)
            if verdict is None:
                asked = names_of(job)
                waits = buffer is not None and waits_for_space(job, buffer)
                if asked is not None and waits and buffer is not None:
                    self.verdicts[job_id] = judge_named(self, job, buffer, asked).verdict
                    continue
                verdict = space_verdict(self, job, buffer) if waits and buffer else place_verdict(self, job, buffer)
            self.verdicts[job_id] = verdict

    def _due(self) -> set[str]:
        """Do what is due by time alone; return the nodes whose lines have changed by that."""
        state, lines = self.state, set()
        for instant, job_id in self.agenda.timers:
            if instant > self.at or self.is_full:
                break
            job = state.jobs[job_id]
            events = due_events(state, job, state.buffers.get(job_id), self.at)
            self.events.extend(with_turns(state, self.turns, events))
            self.done.add(job_id)
            lines.add(job.node)
        return lines

    def _give_turns(self) -> None:
        for stage in QUEUED_STAGES:
            lines = self.agenda.queued.get(stage)
            if lines:
                room = EVENTS_PER_PASS_MAX - len(self.events)
                given = turns_given(self.state, self.turns, stage, lines, lambda job: job not in self.done, room)
                self.events.extend(given)

    def _open_groups(self, lines: set[str]) -> Iterator[Group]:
        fronts, up = self.agenda.fronts, self.agenda.nodes.up
        for group in fronts:
            if group[0] not in ("node", "large"):
                yield group
        for name in self.agenda.ready | lines:
            if name in up and ("node", name) in fronts:
                yield "node", name

    def _merged(self, group: Group) -> Iterator[tuple[Key, Queue]]:
        """Yield the candidates of a group of queues in order. A queue is opened when its first one is reached, and
        left when it is closed, so that many queues cost no more than what is looked at.
        """
        queues = self.agenda.queues
        fronts = iter(self.agenda.fronts[group])
        front = next(fronts, None)
        opened: list[tuple[Key, Queue, Iterator[Key]]] = []
        while True:
            while front is not None and (not opened or front[0] < opened[0][0]):
                first, queue = front
                if queue[2] <= self._cpus_max_of(queue):
                    iterator = iter(queues[queue])
                    heappush(opened, (next(iterator), queue, iterator))
                front = next(fronts, None)
            if not opened:
                return
            first, queue, iterator = opened[0]
            yield first, queue
            following = None if queue in self._closed else next(iterator, None)
            if following is None:
                heappop(opened)
            else:
                heapreplace(opened, (following, queue, iterator))

    # The Turn --------------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return len(self.events) >= EVENTS_PER_PASS_MAX

    def free_in(self, pool: str) -> int:
        known = self.state.pools.get(pool)
        held = self.state.held_bytes.get(pool, 0) + self.held.get(pool, 0)
        return 0 if known is None else free_bytes(known, held)

    def node_use(self, node: str) -> tuple[int, int] | None:
        use = self.agenda.nodes.up.get(node)
        return None if use is None else use[:2]

    def waits_for_node(self, node: str, place: Place) -> int:
        waiting = self.waiting_nodes.get(node, 0)
        if waiting or node in self.agenda.ready:
            return waiting
        # Its first one could not run before the pass began, so its line was not opened.
        front = self.agenda.fronts.get(("node", node))
        first = None if front is None else front.first[0]
        if first is None or first[:2] >= place or first[1] in self.done:
            return 0
        return int(first[1])

    def cpus_max_in(self, partition: str) -> int:
        return self.agenda.nodes.of(partition).cpus_max

    def _cpus_max_of(self, queue: Queue) -> int:
        """Return the CPUs of the largest node that those of a queue may run on."""
        partition = "" if queue[3] is None else queue[3].partition
        return self.cpus_max_in(place_name(self.state.partitions, partition)) if queue[2] else 0

    def has_node_for(self, cpus: int, place: Place, partition: str) -> bool:
        return self._node_for(cpus, place, partition) is not None

    def _node_for(self, cpus: int, place: Place, partition: str) -> str | None:
        for free, name in self.agenda.nodes.of(partition).by_free:
            if -free < cpus:
                break
            if not self.waits_for_node(name, place) and not self.any_node.first_for(name):
                return str(name)
        return None

    def free_cpus(self) -> Iterable[tuple[str, int]]:
        up = self.agenda.nodes.up
        return ((name, up[name][1]) for name in sorted(up))

    # Space -----------------------------------------------------------------------------------------------------------

    def _reserve(self, key: Key, queue: Queue) -> _Follows:
        """Give the candidate its space if it may have it; return who behind it could get any."""
        _, pool, cpus, standing = queue
        size_bytes, job_id = key[2], key[1]
        job = self.state.jobs[job_id]
        wish = Wish(job, pool, size_bytes, standing)
        # Those of a reservation come first and have space of their own: what is over for them is not for others.
        over = _Follows.NOT_THIS_QUEUE if wish.reservation else _Follows.NOBODY
        smallest = self.agenda.sizes[pool].first
        if pool in self.heads and available(self, wish) < smallest:
            return over
        if run_verdict(self, standing, cpus) is not None:
            return _Follows.NOT_THIS_QUEUE
        answer = space_answer(self, wish)
        if answer is SpaceAnswer.STAGES_FULL:
            return _Follows.NOBODY
        if answer is SpaceAnswer.TOO_FAR_BEHIND:
            return over
        if answer is SpaceAnswer.TURNED_AWAY:
            return _Follows.NOT_THIS_QUEUE
        head = take_note(self, wish, answer)
        if answer is SpaceAnswer.NOT_ENOUGH and self.heads[pool].job == job_id:
            self._revoke_for(wish)
        if answer is SpaceAnswer.GIVEN:
            counted = head is not None and head.let_pass(size_bytes, end_of(self, wish), self.at)
            node = self.fewest_jobs(job.request.cpus, nodes_of(self.state, job_id))
            cpus, cpus_free, jobs = self.agenda.nodes.up[node]
            self._give(node, (cpus, cpus_free, jobs + 1))
            self.held[pool] = self.held.get(pool, 0) + size_bytes
            allocated = e.BufferAllocated(job_id, node, job.attempt + 1)
            if head is not None:
                allocated = e.BufferAllocated(job_id, node, job.attempt + 1, head.job, counted, head.start_at)
            self.events.extend(with_turns(self.state, self.turns, (allocated,)))
        return _Follows.NEXT

    def _revoke_for(self, wish: Wish) -> None:
        """Take back buffers for the first in line, if that is called for."""
        state, room = self.state, EVENTS_PER_PASS_MAX - len(self.events)
        victims = self.agenda.victims.get(wish.pool)
        if victims is None:
            return
        draining = takewhile(lambda hold: hold[0] == DRAINING, self.agenda.holds.get(wish.pool, ()))
        coming = sum(size_bytes for _, size_bytes, _ in draining)
        for job_id in victims_for(self, wish, victims, coming, room, self.done):
            self.events.extend(with_turns(state, self.turns, revocation_events(state, job_id, wish.job.id)))
            self.done.add(job_id)
            # Somebody else may be the first in line for CPUs of its node now.
            self._to_open.add(state.jobs[job_id].node)

    def _reserve_named(self, job_id: int) -> _Follows:
        """As `_reserve`, for a job that creates, destroys or uses persistent buffers."""
        job, buffer = self.state.jobs[job_id], self.state.buffers[job_id]
        asked = names_of(job)
        assert asked is not None
        answer = serve_named(self, job, buffer, asked)
        if answer.node:
            cpus, cpus_free, jobs = self.agenda.nodes.up[answer.node]
            self._give(answer.node, (cpus, cpus_free, jobs + 1))
        return _Follows.NEXT if self.named < CANDIDATES_BEHIND_MAX else _Follows.NOBODY

    def fewest_jobs(self, cpus: int, partition: str) -> str:
        return self.agenda.nodes.of(partition).fewest_jobs(cpus)

    def _give(self, node: str, after: NodeUse) -> None:
        self.nodes.setdefault(node, self.agenda.nodes.up[node])
        self.agenda.nodes.put(node, after)

    def head_of(self, job: Job, pool: str, size_bytes: int, free: int) -> Head:
        """Return the first in line for a pool, with when it should get its space if every holder uses its time."""
        new = given_of(self, self.events, pool)
        ends = self.headroom.ends(pool, reservation_of(self.state, job.id))
        return Head(job, lambda: start_of(merge(self._releases(pool), new, ends), free, size_bytes))

    def free_at(self, pool: str, instant: Instant) -> int:
        later = self._free_later.get((pool, instant))
        if later is None:
            by_then = takewhile(lambda release: release[0] <= instant, self._releases(pool))
            later = self._free_later[pool, instant] = sum(size_bytes for _, size_bytes in by_then)
        new = given_of(self, self.events, pool)
        return self.free_in(pool) + later + sum(size_bytes for end_at, size_bytes in new if end_at <= instant)

    def _releases(self, pool: str) -> Iterator[tuple[int, int]]:
        """Yield when the holders of a pool should give back how much, in ascending order."""
        drains_us = drain_us(self.state, pool)
        overdue: list[int] | None = []
        for until, size_bytes, _ in self.agenda.holds.get(pool, ()):
            if until == NOBODY_KNOWS:
                break
            if overdue is not None:
                if until <= self.at:
                    overdue.append(size_bytes)
                    continue
                yield from ((release_at(0, self.at, drains_us), size) for size in sorted(overdue))
                overdue = None
            yield release_at(until, self.at, drains_us), size_bytes
        if overdue is not None:
            yield from ((release_at(0, self.at, drains_us), size) for size in sorted(overdue))

    # CPUs ------------------------------------------------------------------------------------------------------------

    def _run_where_its_data_is(self, key: Key, queue: Queue) -> _Follows:
        """Run the candidate if it may run; return who behind it could."""
        _, node, _, standing = queue
        if self.any_node.first_for(node):
            return _Follows.NOBODY
        if run_verdict(self, standing, key[2]) is not None:
            # Not for this queue: in that of a node are jobs with different numbers of CPUs.
            return _Follows.NEXT
        use = self.agenda.nodes.up[node]
        if use[0] < key[2]:
            return _Follows.NEXT
        pre_runs = self.turns.get(Stage.RUN, 0)
        if use[1] < key[2] or pre_runs >= self.state.policy.operations_per_stage_max:
            self.waiting_nodes[node] = key[1]
            return _Follows.NOBODY
        if not self.is_full:
            self._run(key, node, standing)
            self.turns[Stage.RUN] = pre_runs + 1
        return _Follows.NEXT

    def _run_anywhere(self, key: Key, queue: Queue) -> _Follows:
        partition = queue[1]
        if self.any_node.first_in(partition):
            return _Follows.NOBODY
        if run_verdict(self, queue[3], key[2]) is not None:
            return _Follows.NOT_THIS_QUEUE
        node = self._node_for(key[2], key[:2], partition)
        if node is None:
            self.any_node.wait(partition, key[1])
            return _Follows.NOBODY
        if not self.is_full:
            self._run(key, node, queue[3])
        return _Follows.NEXT

    def _run(self, key: Key, node: str, standing: Standing | None) -> None:
        cpus, free, jobs = self.agenda.nodes.up[node]
        self._give(node, (cpus, free - key[2], jobs))
        self.headroom.give_run(standing, key[2])
        job = self.state.jobs[key[1]]
        self.events.append(e.RunOrdered(job.id, node, job.attempt + 1))

    # -----------------------------------------------------------------------------------------------------------------

    def _purge(self) -> None:
        room = EVENTS_PER_PASS_MAX - len(self.events)
        surplus = min(room, len(self.state.finished) - self.state.policy.finished_jobs_kept)
        if surplus <= 0:
            return
        for _, job_id in zip(range(surplus), self.agenda.purgeable, strict=False):
            self.events.append(e.JobPurged(job_id))

"""End of a simulation: faults stop, and within a limit of virtual time the cluster must be healthy."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from forebay.replica.messages import commands
from forebay.replica.state.digest import state_digest
from tests.simulation import whole
from tests.simulation.clients import SimClient

if TYPE_CHECKING:
    from tests.simulation.world import World

CONVERGE_S: Final = 30.0
"""Virtual seconds in which healed replicas agree again and new work commits."""

LOOK_EVERY_S: Final = 0.005
"""How often it is asked whether all is well, virtual seconds."""

DRAIN_S: Final = 60.0
"""Virtual seconds in which a healed cluster gets rid of every job when it is told to."""

CLEAN_UP_S: Final = 1.0
"""How often the operator tells every job that is left to go, virtual seconds."""


class Ending:
    """The last part of one simulation."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._callers = itertools.count()
        self._rounds = 0

    def heal(self) -> None:
        """Stop all faults, and start stopped replicas."""
        world = self.world
        world.note("heal")
        world.faults.on = False
        world.ending = True
        world.network.heal()
        world.request_losses = world.request_copies = world.slow_reports = world.failing_stages = 0.0
        for replica in world.replicas.values():  # their clocks stay as wrong as they are
            disk = replica.disk
            disk.full = disk.files_full = disk.next_sync_fails = False
            disk.operations_left = None
            disk.log.dies = False
            disk.stall_s = 0.0
            if not replica.up:
                world.restart_later(replica)
        for agent in world.agents:
            agent.silent_s = 0.0

    def come_right(self) -> None:
        """Heal the cluster, and check its recovery.

        Replicas agree, new work commits, all jobs end, no space is missing, and ledgers are complete.
        """
        world = self.world
        self.heal()
        for client in world.clients:
            client.stopped = True
        # After the last partition that was still to be mended.
        world.timeline.after(2.0 * world.pace, world.network.heal)
        converge_s = CONVERGE_S * world.pace
        if not world.run(converge_s, world.operator.is_done, every_s=LOOK_EVERY_S):
            self._complain(
                f"the members were not put in order within {converge_s:.0f} s of being healed: "
                f"{world.operator.describe()}; {world.describe()}"
            )
            return
        if not world.run(converge_s, world.converged, every_s=LOOK_EVERY_S):
            self._complain(f"the replicas did not agree within {converge_s:.0f} s of being healed: {world.describe()}")
            return
        answers = sum(client.answers for client in world.clients)
        for client in world.clients[:2]:
            client.begin(client.request(client.submission()))
        if not world.run(converge_s, lambda: sum(client.answers for client in world.clients) >= answers + 2):
            self._complain(f"no new work was committed within {converge_s:.0f} s of being healed: {world.describe()}")
            return
        external_jobs = world.external_jobs
        if external_jobs is not None:
            self._release_stuck()
            if not world.run(DRAIN_S * world.pace, external_jobs.is_done):
                self._complain(f"jobs of the other scheduler did not come to their end: {external_jobs.describe()}")
                return
            external_jobs.check_end()
        self._clean_up()
        if not world.run(DRAIN_S * world.pace, self._is_empty):
            self._complain(f"jobs or persistent buffers are left over: {self._leftovers()}")
            return
        if world.oracle.state.held_bytes:
            self._complain(f"every job is gone, but {dict(world.oracle.state.held_bytes)} bytes are held")
        if not world.run(converge_s, world.converged, every_s=LOOK_EVERY_S):
            self._complain(f"the replicas did not agree at the end: {world.describe()}")
            return
        self._check_ledgers()

    def _complain(self, sentence: str) -> None:
        if not self.world.violations:
            self.world.violate(sentence)

    def _release_stuck(self) -> None:
        """The operator releases what of the other scheduler's has failed for good, until it has its way."""
        world, external_jobs = self.world, self.world.external_jobs
        if external_jobs is None or external_jobs.is_done() or world.violations:
            return
        self._ask(commands.ReleaseJob(job.id) for job in external_jobs.unfinished if job.stuck)
        world.timeline.after(CLEAN_UP_S * world.pace, self._release_stuck)

    def _ask(self, wanted: Iterable[commands.Command]) -> None:
        """Have the operator ask for several things, one beside the other."""
        operator = self.world.clients[-1]
        for delay, command in enumerate(wanted):
            caller = SimClient(self.world, 1000 + next(self._callers))
            caller.stopped = True
            self.world.timeline.after(0.005 * delay, caller.begin, operator.request(command, operator=True))

    def _clean_up(self) -> None:
        """The operator gets rid of every job, again and again until they are gone."""
        world = self.world
        state = world.oracle.state
        if self._is_empty() or world.violations:
            return
        operator = world.clients[-1]
        wanted: list[Any] = []
        for job_id in sorted(state.unfinished):
            job = state.jobs[job_id]
            wanted.append(commands.ReleaseJob(job_id) if job.stuck else None)
            wanted.append(commands.CancelJob(job_id, hurry=True))
        self._rounds += 1
        for name in sorted(set(state.persistent) - set(state.using)):
            # Not every destroyer can come to its turn: what holds its name may be held, or its node be full.
            gently = self._rounds % 2 == 1
            wanted.append(whole.destroyer(operator, name) if gently else commands.ClearBuffer(name=name, discard=True))
        wanted += [commands.ResumeNode(name) for name in world.nodes if name in state.nodes]
        self._ask(command for command in wanted if command is not None)
        world.timeline.after(CLEAN_UP_S * world.pace, self._clean_up)

    def _is_empty(self) -> bool:
        return not self.world.oracle.state.unfinished and not self.world.oracle.state.persistent

    def _leftovers(self) -> str:
        state = self.world.oracle.state
        return ", ".join(
            f"{job} {state.jobs[job].state.name}/{state.buffers[job].state.word if job in state.buffers else '-'}"
            for job in sorted(state.unfinished)
        ) + "".join(f", {name} {buffer.state.word}" for name, buffer in state.persistent.items())

    def _check_ledgers(self) -> None:
        """What is on each disk is the history, whole and chained."""
        world = self.world
        for replica in world.living():
            controller = replica.controller
            if controller is None or replica.disk.damaged:
                continue
            if state_digest(controller.state) != state_digest(world.oracle.state):
                world.violate(f"{replica.name} ends with another state than the history")
                return
            replica.loop.call_now(controller.journal.flush_hints)
            verified = controller.ledger.verify()
            points = world.oracle.points
            for entry in controller.ledger.read(verified.first_index, limit=len(points)):
                if (entry.term, entry.data) != (points[entry.index].term, points[entry.index].data):
                    world.violate(f"the ledger of {replica.name} has another entry {entry.index}")
                    return

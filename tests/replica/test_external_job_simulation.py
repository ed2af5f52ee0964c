"""A Slurm as it was seen to behave, with external jobs here: it restarts at any moment, calls again, and its killed
calls come late; native jobs want the same space. Nothing is moved twice without cause, nothing is lost, nothing leaks.

Sources: SLURM-OBSERVED.md, 2 ("Restart", "Cancel"): after a restart what has not run is torn down with hurry and, a
minute later, set up and staged again; what was being exported is exported again; teardowns are repeated.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.operations.external_jobs import ExternalJobPhase
from forebay.replica.values.errors import Rejection
from tests.replica.external_job_world import CLUSTER, DATA, MOVERS, RESULTS, ExternalJobWorld, asked

JOBS = 12
SIZE = 20
NATIVE = "#DW jobdw capacity=40 access_mode=striped type=scratch"


class Slurm:
    """What slurmctld believes of its jobs, and the calls that it makes for them."""

    def __init__(self, seed: int, pool: int) -> None:
        self.random = Random(seed)
        self.world = ExternalJobWorld({"fast": pool})
        self.step = {str(number): "pending" for number in range(1, JOBS + 1)}
        self.late: list[c.Command] = []
        """Calls of a slurmctld that was killed, which may still arrive."""
        self.there: set[tuple[str, str]] = set()
        """Directories with all their data in them: (job, where it is in its place)."""
        self.copied: Counter[str] = Counter()
        self.exported: Counter[str] = Counter()
        self.removed: Counter[str] = Counter()
        """Directories that were removed before their job ran, for somebody's need of space or after
        ExternalJobLinger.
        """

    def call(self, command: c.Command) -> bool:
        """Make a call; return whether it succeeded. One in ten dies with its caller, and comes again later."""
        if not self.random.randrange(10):
            self.late.append(command)
        return not isinstance(self.world.ask(command), Rejection)

    def epoch(self, job: str) -> int:
        known = self.world.state.external_jobs.get(f"slurm:{job}")
        return 0 if known is None else known.epoch

    # What it does for one job

    def go_on(self, job: str) -> None:
        phase, epoch = self.world.phase(job), self.epoch(job)
        match self.step[job]:
            case "pending":
                request = asked(SIZE, DATA, RESULTS, name="job")
                if self.call(c.SetUpExternalJob(CLUSTER, job, 1000, request, epoch + 1)):
                    self.step[job] = "setup"
            case "setup" if phase is ExternalJobPhase.OVER:
                self.step[job] = "pending"  # no space in time: held, and released by its user
            case "setup" if phase is ExternalJobPhase.SET_UP:
                if self.call(c.StageInExternalJob(CLUSTER, job, epoch)):
                    self.step[job] = "data_in"
            case "data_in" if phase is ExternalJobPhase.STAGED_IN:
                self.step[job] = "staged"
            case "staged":
                assert self.call(c.BeginExternalJobRun(CLUSTER, job, epoch)), phase
                self.step[job] = "running"
            case "running":
                assert self.call(c.EndExternalJobRun(CLUSTER, job, epoch))
                self.step[job] = "post_run"
            case "post_run":
                assert self.call(c.StageOutExternalJob(CLUSTER, job, epoch))
                self.step[job] = "data_out"
            case "data_out" if phase in (ExternalJobPhase.TEARDOWN, ExternalJobPhase.OVER):
                assert self.call(c.TearDownExternalJob(CLUSTER, job, False, epoch))
                self.step[job] = "done"

    def restart(self) -> None:
        """Die and start again."""
        for job, step in self.step.items():
            epoch = self.epoch(job)
            if step in ("setup", "data_in", "staged"):
                assert self.call(c.TearDownExternalJob(CLUSTER, job, True, epoch))
                self.step[job] = "pending"
            elif step in ("post_run", "data_out"):
                assert self.call(c.EndExternalJobRun(CLUSTER, job, epoch))
                self.step[job] = "post_run"
            elif step == "done":
                assert self.call(c.TearDownExternalJob(CLUSTER, job, False, epoch))
        self.world.advance(60)

    # What agents do, and what that moves

    def agents(self) -> None:
        world = self.world
        for order in [one for node in (*MOVERS, "n1") for one in world.orders(node)]:
            external_job = world.state.jobs[order.job].external_job
            if self.random.randrange(3) == 0:
                continue
            if external_job is None:
                world.done(order.job)
                continue
            assert order.filesystem is not None
            key = (external_job.job, order.filesystem.directory)
            if order.stage == "stage_in":
                self.copied[external_job.job] += key not in self.there
                self.there.add(key)
            elif order.stage == "stage_out":
                assert key in self.there
                self.exported[external_job.job] += 1
            elif order.stage == "teardown":
                ran = world.state.jobs[order.job].started_at
                assert not ran or self.exported[external_job.job]
                if key in self.there and not ran:
                    self.removed[external_job.job] += 1
                self.there.discard(key)
            world.done(order.job)

    def run(self, rounds: int, *, native: bool) -> None:
        for _ in range(rounds):
            self.agents()
            for job in self.random.sample(sorted(self.step), 4):
                self.go_on(job)
            if not self.random.randrange(25):
                self.restart()
            if self.late and not self.random.randrange(4):
                self.world.ask(self.late.pop(self.random.randrange(len(self.late))))
            if native and not self.random.randrange(30):
                self.world.submit(NATIVE)
            self.world.advance(self.random.choice((0, 1, 2)))

    def finish(self) -> None:
        """Go on without restarts until Slurm has done with all jobs, and what lingers has gone."""
        for _ in range(3_000):
            self.agents()
            for job in self.step:
                self.go_on(job)
            self.world.advance(1)
            if set(self.step.values()) == {"done"} and not self.world.state.unfinished:
                return
        raise AssertionError((self.step, [self.world.shown(job) for job in self.world.state.unfinished]))


@pytest.mark.parametrize("seed", range(12))
def test_with_space_for_all_each_byte_moves_once_however_often_slurm_restarts(seed: int) -> None:
    slurm = Slurm(seed, pool=JOBS * SIZE)
    slurm.world.configure(ExternalJobLinger="3000")
    slurm.run(300, native=False)
    slurm.finish()
    assert set(slurm.copied.values()) == {1}
    assert set(slurm.exported.values()) == {1}
    check_end(slurm)


@pytest.mark.parametrize("seed", range(12))
def test_with_too_little_space_what_moves_again_was_given_up_for_others_and_all_end(seed: int) -> None:
    slurm = Slurm(seed, pool=100)
    slurm.run(300, native=True)
    slurm.finish()
    assert all(slurm.copied[job] <= 1 + slurm.removed[job] for job in slurm.step)
    assert set(slurm.exported.values()) == {1}
    check_end(slurm)


def check_end(slurm: Slurm) -> None:
    """Nothing is left: no space, no directory, no external job that is not over."""
    world = slurm.world
    assert len(slurm.exported) == JOBS
    assert not slurm.there
    assert world.free() == world.state.pools["fast"].usable_bytes
    runs = Counter(
        event.job
        for batch in world.ledger
        for entry in batch.entries
        for event in entry.events
        if isinstance(event, e.ExternalJobRunBegan)
    )
    assert sorted(runs.values()) == [1] * JOBS

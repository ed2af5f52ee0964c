"""Slurm's buffer jobs and Forebay's external jobs, side by side, once a minute: what only one of the two knows.

Nothing is done in one look, and nothing while slurmctld does not answer. An external job that Slurm did not know in two
looks, or whose job was over in two and its buffer not torn down, is torn down with the reason, which parks it where it
has results that are not exported. One whose run had ended for Slurm in two looks, and not here, has its results
exported. A buffer that Slurm believes to be staged in two looks, and that is no external job, is said to the leader
once, and counted. A pending job whose stage-in Slurm has lost in two looks never starts: that is logged once, counted,
and shown by the service manager. Slurm offers no way to begin its stage-in anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from cluster.client import ApiError, Client
from cluster.schemas import external_jobs as g
from cluster.schemas import new_command_id, operations
from cluster.slurm.metrics import BridgeMetrics
from cluster.slurm.slurmctld import SlurmView
from cluster.system import Clock, about, tell_manager

LOGGER = logging.getLogger(__name__)

LOOK_S: Final = 60.0
"""Seconds between two looks: longer than any call of Slurm's is between its two books."""

CALL_S: Final = 10.0
"""Seconds that one question or command may take; what is not done is done after the next look."""

SETTLED: Final = frozenset({"none", "over", "lingering", "parked", "teardown", "teardown-failed"})
"""Phases that nobody at Slurm has to do with any more."""

BELIEVED: Final = frozenset({"staged-in", "pre-run", "running", "post-run", "staging-out"})
"""States of Slurm's buffers that need something here."""

NOT_EXPORTED: Final = frozenset({"running", "post-run"})
"""Phases of external jobs that ran, and whose results nobody has asked for."""

STAGE_IN_ENDED: Final = frozenset({"stage-in-failed", "lingering", "parked", "teardown", "teardown-failed"})
"""Phases of external jobs whose stage-in is not under way and has not succeeded."""

TORN_DOWN: Final = frozenset({"lingering", "parked"})
"""Phases after a teardown was answered."""

STUCK_SHOWN_MAX: Final = 10
"""Job IDs in the status of the service, count: one line."""

FORGOTTEN: Final = "slurmctld does not know the job, in two looks a minute apart"

LEFT: Final = "slurmctld has not torn down the buffer of a job that is over, in two looks a minute apart"
"""22.05 does so now and then: what ends the calls of a cancelled job also ends the teardown that has begun."""


class Reconciler:
    """The two books of one Slurm, compared."""

    def __init__(
        self,
        leader: Client,
        cluster: str,
        clock: Clock,
        metrics: BridgeMetrics,
        ask: Callable[[], Awaitable[SlurmView | str]],
        pools: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        """`ask` asks slurmctld; see `cluster.slurm.slurmctld.look`. `pools` returns the names of Forebay's pools, None
        while the leader has not sent them: buffers in other pools belong to a script of the site's own.
        """
        self._leader = leader
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._ask = ask
        self._pools = pools
        self._unknown: dict[tuple[str, int], str] = {}
        self._unasked: frozenset[tuple[str, int]] = frozenset()
        self._exported: frozenset[str] = frozenset()
        """Jobs whose results were exported though Slurm had not asked, while it still counts their buffers."""
        self._missed: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        self._lost: dict[str, str] = {}
        """Pending jobs whose stage-in slurmctld had lost in the last look -> what it has lost."""
        self._stuck: dict[str, str] = {}
        """Those that had lost it in two looks."""
        self._said = ""

    @property
    def stuck(self) -> frozenset[str]:
        """Pending jobs that slurmctld will never start, as of the last look."""
        return frozenset(self._stuck)

    async def run(self) -> None:
        """Look again and again."""
        while True:
            try:
                await self.look()
            except ApiError as error:
                # The leader's silence is said by whoever renews files; this look counts for nothing.
                LOGGER.debug("a look ended early: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Compare once; ApiError where no leader answers."""
        # First the external jobs: of what is in neither, one has had time to hear of its end.
        listed = await self._leader.call(operations.LIST_EXTERNAL_JOBS, live="yes", deadline_s=CALL_S)
        looked = await self._ask()
        if isinstance(looked, str):
            if looked != self._said:
                LOGGER.warning("external jobs are not compared with Slurm's jobs: %s", looked)
            self._said = looked
            self._metrics.looks.labels("slurm_away").inc()
            return
        if self._said:
            LOGGER.info("slurmctld answers again")
            self._said = ""
        self._metrics.looks.labels("compared").inc()
        self._metrics.external_jobs_are(listed.external_jobs)
        unknown = {
            (one.job, one.epoch): FORGOTTEN if one.job not in looked.jobs else LEFT
            for one in listed.external_jobs
            if one.phase not in SETTLED and (one.job not in looked.jobs or one.job in looked.over)
        }
        unasked = frozenset(
            (one.job, one.epoch)
            for one in listed.external_jobs
            if one.phase in NOT_EXPORTED and one.job in looked.staging_out
        )
        unasked_again, self._unasked = unasked & self._unasked, unasked
        phases = {one.job: one.phase for one in listed.external_jobs}
        self._note_stuck(_lost(looked, phases))
        pools = self._pools()
        missed = frozenset(
            job
            for job, state in looked.buffers.items()
            if state in BELIEVED
            and job not in phases
            and not listed.truncated
            and (pools is None or looked.pools.get(job) in pools)
        )
        self._metrics.differ(len(unknown), len(missed))
        again = {external_job: reason for external_job, reason in unknown.items() if external_job in self._unknown}
        self._unknown = unknown
        self._exported &= looked.buffers.keys()
        missed -= self._exported
        missed_again, self._missed = missed & self._missed, missed
        self._reported &= missed
        for (job, epoch), reason in sorted(again.items()):
            await self._forget(job, epoch, reason)
        for job, epoch in sorted(unasked_again):
            await self._export(job, epoch)
        for job in sorted(missed_again - self._reported):
            await self._miss(job, looked.buffers[job])

    def _note_stuck(self, lost: dict[str, str]) -> None:
        """Report the jobs that are stuck in two looks: a log line each, a metric, and the status of the service."""
        before = self._stuck
        self._stuck = {job: cause for job, cause in lost.items() if job in self._lost}
        self._lost = lost
        for job in sorted(self._stuck.keys() - before.keys()):
            LOGGER.error(
                "job %s never starts: %s; cancel it and submit it again: scancel %s", job, self._stuck[job], job,
                extra=about(job=f"slurm:{job}"),
            )  # fmt: skip
        self._metrics.stuck.set(len(self._stuck))
        if self._stuck.keys() != before.keys():
            tell_manager(status=stuck_status(self._stuck))

    async def _forget(self, job: str, epoch: int, reason: str) -> None:
        request = g.TearDownExternalJobRequest(
            command_id=new_command_id(self._clock), cluster=self._cluster, epoch=epoch, reason=reason
        )
        external_job = await self._leader.call(operations.TEAR_DOWN_EXTERNAL_JOB, request, job=job, deadline_s=CALL_S)
        LOGGER.warning("job %s: %s; its buffer is %s", job, reason, external_job.phase, extra=about(job=f"slurm:{job}"))
        self._metrics.forgotten.labels("parked" if external_job.phase == "parked" else "removed").inc()

    async def _export(self, job: str, epoch: int) -> None:
        """Have a job's results exported, as Slurm would: what it asks for later is done then."""
        request = g.ExternalJobCommand(command_id=new_command_id(self._clock), cluster=self._cluster, epoch=epoch)
        external_job = await self._leader.call(operations.STAGE_OUT_EXTERNAL_JOB, request, job=job, deadline_s=CALL_S)
        LOGGER.warning(
            "job %s: its run has ended for slurmctld, which in two looks a minute apart has not asked for its results; "
            "they are exported, and its buffer is %s", job, external_job.phase,
            extra=about(job=f"slurm:{job}"),
        )  # fmt: skip
        self._exported |= {job}
        self._metrics.forgotten.labels("exported").inc()

    async def _miss(self, job: str, state: str) -> None:
        request = g.MissExternalJobRequest(command_id=new_command_id(self._clock), cluster=self._cluster, state=state)
        await self._leader.call(operations.MISS_EXTERNAL_JOB, request, job=job, deadline_s=CALL_S)
        LOGGER.error(
            "job %s: Slurm has its buffer as %s, and Forebay has none", job, state, extra=about(job=f"slurm:{job}")
        )
        self._reported |= {job}
        self._metrics.missed.inc()


def _lost(looked: SlurmView, phases: Mapping[str, str]) -> dict[str, str]:
    """Return the pending jobs whose stage-in slurmctld has lost, and what it has lost. `phases`: of external jobs.

    A slurmctld that was killed, or whose place another took, forgets buffers that it had not written down yet, and
    calls that were running (seen with 22.05 to 26.05, with scripts that only copy, too).
    """
    found: dict[str, str] = {}
    for job in looked.pending:
        phase = phases.get(job)
        if job in looked.staging_in and job not in looked.buffers:
            found[job] = "it is in BurstBufferStageIn, and slurmctld has no record of its buffer"
        elif job in looked.staging_in and phase in STAGE_IN_ENDED:
            found[job] = f"it is in BurstBufferStageIn, and its buffer is {phase}"
        elif looked.buffers.get(job) == "teardown" and phase in TORN_DOWN:
            found[job] = "slurmctld shows its buffer in teardown, and the teardown has ended"
    return found


def stuck_status(stuck: Collection[str]) -> str:
    """Return what `systemctl status` shows of the bridge."""
    if not stuck:
        return "no job is stuck in stage-in"
    shown = sorted(stuck, key=int)[:STUCK_SHOWN_MAX]
    more = f" and {len(stuck) - len(shown)} more" if len(stuck) > len(shown) else ""
    return f"{len(stuck)} jobs never start, since slurmctld lost their stage-in; run: scancel {' '.join(shown)}{more}"

"""Reconciliation of Slurm's buffer jobs with Forebay's external jobs, once a minute.

A difference counts only if two consecutive checks find it; a check without an answer of slurmctld does not count. If
Slurm does not know the job of an external job, or the job has finished without a teardown, the bridge sends a teardown
with the reason to the leader. `replica.decide.external_jobs` decides whether the buffer is removed or retained. If only
Slurm knows that a run has ended, the external job's results are exported. A buffer that Slurm lists as staged without
an external job is counted, and reported to the leader once. A pending job whose stage-in Slurm has lost never starts,
because Slurm cannot restart the stage-in. Such a job is logged once, counted, and shown in the status of the service.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import external_jobs as g
from forebay.cluster.schemas import new_command_id, operations
from forebay.cluster.slurm.metrics import BridgeMetrics
from forebay.cluster.slurm.slurmctld import SlurmView
from forebay.cluster.system import Clock, about, tell_manager

LOGGER = logging.getLogger(__name__)

LOOK_S: Final = 60.0
"""Seconds between two checks: longer than any call takes to reach both sides."""

CALL_S: Final = 10.0
"""Timeout of one query or command, seconds; remaining work is left to the next check."""

SETTLED: Final = frozenset({"none", "over", "lingering", "retained", "teardown", "teardown-failed"})
"""Phases of buffers that Slurm no longer uses."""

BELIEVED: Final = frozenset({"staged-in", "pre-run", "running", "post-run", "staging-out"})
"""States of Slurm's buffers that need an external job."""

NOT_EXPORTED: Final = frozenset({"running", "post-run"})
"""Phases of external jobs that ran, without a request to export their results."""

STAGE_IN_ENDED: Final = frozenset({"stage-in-failed", "lingering", "retained", "teardown", "teardown-failed"})
"""Phases of external jobs whose stage-in neither runs nor has succeeded."""

TORN_DOWN: Final = frozenset({"lingering", "retained"})
"""Phases after a completed teardown."""

STUCK_SHOWN_MAX: Final = 10
"""Maximum number of job IDs in the status of the service, which is one line."""

FORGOTTEN: Final = "slurmctld did not know the job in two checks a minute apart"

LEFT: Final = "slurmctld had not torn down the buffer of the finished job in two checks a minute apart"
"""Reason of a teardown that Slurm omitted: 22.05 may kill a teardown with the other calls of a cancelled job."""


class Reconciler:
    """Comparison of one Slurm's jobs with Forebay's external jobs."""

    def __init__(
        self,
        leader: Client,
        cluster: str,
        clock: Clock,
        metrics: BridgeMetrics,
        ask: Callable[[], Awaitable[SlurmView | str]],
        pools: Callable[[], Collection[str] | None] = lambda: None,
    ) -> None:
        """Create a reconciler; `run` starts it.

        `ask` reads slurmctld's view; see `cluster.slurm.slurmctld.look`. `pools` returns the names of Forebay's pools,
        or None until the leader has sent them. Buffers in other pools belong to the site's own script.
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
        """Jobs whose results were exported without Slurm's request, as long as Slurm counts their buffers."""
        self._missed: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        self._lost: dict[str, str] = {}
        """Pending jobs whose stage-in was lost at the last check -> description of the lost part."""
        self._stuck: dict[str, str] = {}
        """Pending jobs whose stage-in was lost at two consecutive checks."""
        self._said = ""

    @property
    def stuck(self) -> frozenset[str]:
        """Return the pending jobs that slurmctld will never start, as of the last check."""
        return frozenset(self._stuck)

    async def run(self) -> None:
        """Check repeatedly."""
        while True:
            try:
                await self.look()
            except ApiError as error:
                # The check does not count. The renewal of files logs that the leader is unavailable.
                LOGGER.debug("a check ended early: %s", error)
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Compare once.

        Raises:
            ApiError: No leader answers.
        """
        # The answer of slurmctld must be newer than the list of external jobs.
        listed = await self._leader.call(operations.LIST_EXTERNAL_JOBS, live="yes", deadline_s=CALL_S)
        looked = await self._ask()
        if isinstance(looked, str):
            if looked != self._said:
                LOGGER.warning("external jobs cannot be compared with Slurm's jobs: %s", looked)
            self._said = looked
            self._metrics.looks.labels("slurm_away").inc()
            return
        if self._said:
            LOGGER.info("slurmctld is reachable again")
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
        """Report stuck jobs: write a log line for each new one, and update the metric and the status of the service."""
        before = self._stuck
        self._stuck = {job: cause for job, cause in lost.items() if job in self._lost}
        self._lost = lost
        for job in sorted(self._stuck.keys() - before.keys()):
            LOGGER.error(
                "job %s will never start: %s; cancel it and submit it again: scancel %s", job, self._stuck[job], job,
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
        self._metrics.forgotten.labels("retained" if external_job.phase == "retained" else "removed").inc()

    async def _export(self, job: str, epoch: int) -> None:
        """Export a job's results as Slurm would; a later request of Slurm finds them exported."""
        request = g.ExternalJobCommand(command_id=new_command_id(self._clock), cluster=self._cluster, epoch=epoch)
        external_job = await self._leader.call(operations.STAGE_OUT_EXTERNAL_JOB, request, job=job, deadline_s=CALL_S)
        LOGGER.warning(
            "job %s: slurmctld ended the run, but did not request the export of the results in two checks a "
            "minute apart; they are exported, and its buffer is %s", job, external_job.phase,
            extra=about(job=f"slurm:{job}"),
        )  # fmt: skip
        self._exported |= {job}
        self._metrics.forgotten.labels("exported").inc()

    async def _miss(self, job: str, state: str) -> None:
        request = g.MissExternalJobRequest(command_id=new_command_id(self._clock), cluster=self._cluster, state=state)
        await self._leader.call(operations.MISS_EXTERNAL_JOB, request, job=job, deadline_s=CALL_S)
        LOGGER.error(
            "job %s: Slurm lists its buffer as %s, but Forebay has none", job, state, extra=about(job=f"slurm:{job}")
        )
        self._reported |= {job}
        self._metrics.missed.inc()


def _lost(looked: SlurmView, phases: Mapping[str, str]) -> dict[str, str]:
    """Return the pending jobs whose stage-in slurmctld has lost, with a description; `phases` are of external jobs.

    After a kill or a takeover, slurmctld forgets unsaved buffers and running calls (seen with 22.05 to 26.05, also with
    scripts that only copy).
    """
    found: dict[str, str] = {}
    for job in looked.pending:
        phase = phases.get(job)
        if job in looked.staging_in and job not in looked.buffers:
            found[job] = "it is in BurstBufferStageIn, but slurmctld has no record of its buffer"
        elif job in looked.staging_in and phase in STAGE_IN_ENDED:
            found[job] = f"it is in BurstBufferStageIn, and its buffer is {phase}"
        elif looked.buffers.get(job) == "teardown" and phase in TORN_DOWN:
            found[job] = "slurmctld shows its buffer in teardown, and the teardown has ended"
    return found


def stuck_status(stuck: Collection[str]) -> str:
    """Return the bridge's text in `systemctl status`."""
    if not stuck:
        return "no job is stuck in stage-in"
    shown = sorted(stuck, key=int)[:STUCK_SHOWN_MAX]
    more = f" and {len(stuck) - len(shown)} more" if len(stuck) > len(shown) else ""
    return (
        f"{len(stuck)} jobs will never start, because slurmctld lost their stage-in; run: scancel "
        f"{' '.join(shown)}{more}"
    )

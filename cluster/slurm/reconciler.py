"""Slurm's buffer jobs and Forebay's guests, side by side, once a minute: what only one of the two knows.

Nothing is done in one look, and nothing while slurmctld does not answer. A guest that Slurm did not know in two looks,
or whose job was over in two and its buffer not torn down, is torn down with the reason, which parks it where it has
results that are not exported. One whose run had ended for Slurm in two looks, and not here, has its results exported.
A buffer that Slurm believes to be staged in two looks, and that is no guest, is said to the leader once, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from cluster.client import ApiError, Client
from cluster.schemas import guests as g
from cluster.schemas import new_command_id, operations
from cluster.slurm.metrics import Metrics
from cluster.slurm.slurmctld import Looked
from cluster.system import Clock, about

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
"""Phases of guests that ran, and whose results nobody has asked for."""

FORGOTTEN: Final = "slurmctld does not know the job, in two looks a minute apart"

LEFT: Final = "slurmctld has not torn down the buffer of a job that is over, in two looks a minute apart"
"""22.05 does so now and then: what ends the calls of a cancelled job also ends the teardown that has begun."""


class Reconciler:
    """The two books of one Slurm, compared."""

    def __init__(
        self, leader: Client, cluster: str, clock: Clock, metrics: Metrics, ask: Callable[[], Awaitable[Looked | str]]
    ) -> None:
        """`ask` asks slurmctld; see `cluster.slurm.slurmctld.look`."""
        self._leader = leader
        self._cluster = cluster
        self._clock = clock
        self._metrics = metrics
        self._ask = ask
        self._unknown: dict[tuple[str, int], str] = {}
        self._unasked: frozenset[tuple[str, int]] = frozenset()
        self._exported: frozenset[str] = frozenset()
        """Jobs whose results were exported though Slurm had not asked, while it still counts their buffers."""
        self._missed: frozenset[str] = frozenset()
        self._reported: frozenset[str] = frozenset()
        self._said = ""

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
        # First the guests: of what is in neither, one has had time to hear of its end.
        listed = await self._leader.call(operations.LIST_GUESTS, live="yes", deadline_s=CALL_S)
        looked = await self._ask()
        if isinstance(looked, str):
            if looked != self._said:
                LOGGER.warning("guests are not compared with Slurm's jobs: %s", looked)
            self._said = looked
            self._metrics.looks.labels("slurm_away").inc()
            return
        if self._said:
            LOGGER.info("slurmctld answers again")
            self._said = ""
        self._metrics.looks.labels("compared").inc()
        self._metrics.guests_are(listed.guests)
        unknown = {
            (one.job, one.epoch): FORGOTTEN if one.job not in looked.jobs else LEFT
            for one in listed.guests
            if one.phase not in SETTLED and (one.job not in looked.jobs or one.job in looked.over)
        }
        unasked = frozenset(
            (one.job, one.epoch) for one in listed.guests if one.phase in NOT_EXPORTED and one.job in looked.staging_out
        )
        unasked_again, self._unasked = unasked & self._unasked, unasked
        known = {one.job for one in listed.guests}
        missed = frozenset(
            job
            for job, state in looked.buffers.items()
            if state in BELIEVED and job not in known and not listed.truncated
        )
        self._metrics.differ(len(unknown), len(missed))
        again = {guest: reason for guest, reason in unknown.items() if guest in self._unknown}
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

    async def _forget(self, job: str, epoch: int, reason: str) -> None:
        request = g.TearDownGuestRequest(
            command_id=new_command_id(self._clock), cluster=self._cluster, epoch=epoch, reason=reason
        )
        guest = await self._leader.call(operations.TEAR_DOWN_GUEST, request, job=job, deadline_s=CALL_S)
        LOGGER.warning("job %s: %s; its buffer is %s", job, reason, guest.phase, extra=about(job=f"slurm:{job}"))
        self._metrics.forgotten.labels("parked" if guest.phase == "parked" else "removed").inc()

    async def _export(self, job: str, epoch: int) -> None:
        """Have a job's results exported, as Slurm would: what it asks for later is done then."""
        request = g.GuestCommand(command_id=new_command_id(self._clock), cluster=self._cluster, epoch=epoch)
        guest = await self._leader.call(operations.STAGE_OUT_GUEST, request, job=job, deadline_s=CALL_S)
        LOGGER.warning(
            "job %s: its run has ended for slurmctld, which in two looks a minute apart has not asked for its results; "
            "they are exported, and its buffer is %s", job, guest.phase,
            extra=about(job=f"slurm:{job}"),
        )  # fmt: skip
        self._exported |= {job}
        self._metrics.forgotten.labels("exported").inc()

    async def _miss(self, job: str, state: str) -> None:
        request = g.MissGuestRequest(command_id=new_command_id(self._clock), cluster=self._cluster, state=state)
        await self._leader.call(operations.MISS_GUEST, request, job=job, deadline_s=CALL_S)
        LOGGER.error(
            "job %s: Slurm has its buffer as %s, and Forebay has none", job, state, extra=about(job=f"slurm:{job}")
        )
        self._reported |= {job}
        self._metrics.missed.inc()

"""One transcript against a real Forebay: the same commands at the same points of each job's life."""

import asyncio
import contextlib
import time
from typing import Final

from forebay.cluster.client import ApiError
from forebay.cluster.schemas import operations as ops
from tests.conformance.replayer.acting import perform
from tests.conformance.replayer.compare import Seen, Shown, Step, agrees, merge
from tests.conformance.replayer.differences import Kind
from tests.conformance.replayer.listings import watch_remark
from tests.conformance.replayer.run import PATIENCE_S, PERIOD_S, Run, Say
from tests.conformance.replayer.transcript import Act, Part, Remark

LISTED_PATIENCE_S: Final = 4.0
"""Seconds that Forebay may be later with what a listing told in passing: the recorder did not wait for it."""

IDLE_S: Final = 4.0
"""Seconds of silence after which a pause of the transcript in which nothing happened is cut short."""

AT_ONCE_S: Final = 0.25
"""Seconds between two submits below which nobody waited for what the first one did."""

VISIBLE_S: Final = 1.5
"""Seconds after which a reader of the ledger in another process has seen what was written."""


class Replay:
    """Drives one run: when what is typed."""

    def __init__(self, doing: Run, say: Say) -> None:
        self.doing = doing
        self.say = say
        self.followed: dict[str, int] = {}
        self.due: list[tuple[str, Seen]] = []
        self.reached_s = 0.0
        """Up to which second of the transcript Forebay has been followed."""

    async def run(self) -> list[Step]:
        """Do everything and return what came of it."""
        seen_at: dict[int, list[tuple[str, Seen]]] = {}
        for job, seen in self.doing.sightings.seen.items():
            for one in seen:
                seen_at.setdefault(one.line, []).append((job, one))
        last_parts = self._last_parts()
        previous_s = 0.0
        part = 0
        for item in self.doing.transcript.items:
            if isinstance(item, Part):
                part = item.line
                await self._catch_up()
                for job in [job for job, line in last_parts.items() if line < part and job not in self.doing.cuts]:
                    self.doing.cuts[job] = time.time()
                self.say(f"{item.title[:100]}")
            if isinstance(item, Act):
                # What is typed one right after the other is, here too: nobody looks between.
                if item.submitted is None or item.at_s - previous_s >= AT_ONCE_S:
                    await self._catch_up()
                await self._pause(item.at_s - previous_s)
                await perform(self.doing, item)
                self.reached_s = item.at_s
            self.due += seen_at.get(item.line, [])
            if isinstance(item, Remark):
                # The recorder looked, and wrote what it saw, this much later.
                await self._catch_up()
                await self._pause(item.at_s - previous_s)
                watch_remark(self.doing, item)
            previous_s = max(previous_s, item.at_s)
        await self._catch_up()
        await self._pause(1.0)
        self.doing.new_window()
        await self._visible()
        return self.doing.steps

    async def _visible(self) -> None:
        """Wait until the ledger shows what had happened by now."""
        deadline = time.monotonic() + VISIBLE_S
        while time.monotonic() < deadline:
            self.doing.mirror.poll()
            await asyncio.sleep(PERIOD_S)
        self.doing.mirror.until(time.time())

    def _last_parts(self) -> dict[str, int]:
        """Return for each job the part of the transcript in which it was seen last."""
        parts = [item.line for item in self.doing.transcript.items if isinstance(item, Part)]
        found = {}
        for job, seen in self.doing.sightings.seen.items():
            found[job] = max((line for line in parts if line <= seen[-1].line), default=0)
        return found

    async def _pause(self, seconds: float) -> None:
        """Wait as long as the transcript did; a long pause ends once nothing happens any more."""
        deadline = time.monotonic() + max(0.0, seconds) / self.doing.setting.speed
        quiet_since = time.monotonic()
        while (now := time.monotonic()) < deadline:
            if self.doing.mirror.poll():
                quiet_since = now
            if now - quiet_since > IDLE_S and not self._busy():
                return
            self.doing.cluster.check()
            await asyncio.sleep(min(PERIOD_S, max(0.0, deadline - now)))

    def _busy(self) -> bool:
        """Say whether anything is under way that will end by itself."""
        state = self.doing.mirror.state
        for job_id in state.unfinished:
            job, buffer = state.jobs[job_id], state.buffers.get(job_id)
            if job.state.name in ("RUNNING", "CONFIGURING"):
                return True
            if buffer is not None and not job.stuck and not job.hold:
                if buffer.state.word in ("staging-in", "post-run", "staging-out", "teardown", "teardown-fail"):
                    return True
            if job.retry_at or (job.state.name == "PENDING" and job.request.begin_at and not job.eligible_at):
                return True
        return False

    async def _catch_up(self) -> None:
        """Wait until Forebay has shown what was seen so far."""
        due, self.due = self.due, []
        for job, one in due:
            await self._follow(job, one)

    async def _follow(self, job: str, seen: Seen) -> None:
        """Wait until Forebay has shown what was seen, or is not going to."""
        if seen.torn or self.doing.number(job) is None:
            return
        gap_s, self.reached_s = seen.at_s - self.reached_s, max(seen.at_s, self.reached_s)
        patience_s = LISTED_PATIENCE_S if seen.listed else PATIENCE_S + max(0.0, gap_s) / self.doing.setting.speed
        deadline = time.monotonic() + patience_s
        while True:
            self.doing.mirror.poll()
            number = self.doing.number(job)
            shown = merge(self.doing.mirror.shown.get(number, [])) if number is not None else []
            start = self.followed.get(job, 0)
            for position, one in enumerate(shown[start:], start=start):
                if agrees(seen, one) or self.doing.differences.find(Kind.SHOWN, seen.where, seen.text, one.text):
                    self.followed[job] = position
                    return
            if self.doing.differences.find(Kind.MISSING, seen.where, seen.text, "", lasted_s=seen.lasted_s):
                return
            if number is not None and await self._shows_now(number, seen):
                return
            if time.monotonic() > deadline or self._at_rest(number):
                return
            self.doing.cluster.check()
            await asyncio.sleep(PERIOD_S)

    async def _shows_now(self, number: int, seen: Seen) -> bool:
        """Ask whether the job shows what was seen now: the ledger tells it a moment later."""
        assert self.doing.cluster.client is not None
        with contextlib.suppress(ApiError):
            job = await self.doing.cluster.client.call(ops.SHOW_JOB, id=number)
            one = Shown(0, 0.0, 0.0, job.state, job.reason, job.burst_buffer_state or "", job.hold is not None)
            row = self.doing.differences.find(Kind.SHOWN, seen.where, seen.text, one.text)
            return agrees(seen, one) or row is not None
        return False

    def _at_rest(self, number: int | None) -> bool:
        """Say whether a job is over, so that it will show nothing else."""
        if number is None:
            return True
        job, state = self.doing.mirror.state.jobs.get(number), self.doing.mirror.state
        return job is not None and number in state.finished

"""Results that the controller has not acknowledged: on disk before they are sent, sent until they are acknowledged.

A report is idempotent by (job, attempt): sent twice, the second is refused as stale, which acknowledges it too.
While the disk is full, reports are written into reserve files, which come back when they are acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Final

import msgspec

from cluster.agent.files import RESERVE_SUFFIX, ReserveFiles, is_disk_full, read_bounded, write_durably
from cluster.agent.home.home import AgentFailed
from cluster.agent.limits import COMMAND_AGE_S_MAX, REPORTS_PER_REQUEST_MAX
from cluster.schemas import Report, instant_of, new_command_id
from cluster.system import Clock
from replica.values import seconds

_NAME: Final = re.compile(r"([0-9]{20})\.json", re.ASCII)


class Outbox:
    """The reports of an agent, in the order in which they were made."""

    def __init__(self, directory: int, clock: Clock, reserve_files: ReserveFiles) -> None:
        """Read what is in the open directory; AgentFailed names a file that cannot be read."""
        self._directory = directory
        self._spares = reserve_files
        self._clock = clock
        self._reports: dict[int, Report] = {}
        self.changed = asyncio.Event()
        """Set while there may be something to send."""
        for name in sorted(os.listdir(directory)):
            found = _NAME.fullmatch(name)
            if found is None:
                # Lent and not used: it comes back.
                if name.endswith(RESERVE_SUFFIX):
                    reserve_files.drop(directory, name)
                continue
            try:
                self._reports[int(found.group(1))] = msgspec.json.decode(
                    read_bounded(directory, name) or b"", type=Report
                )
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise AgentFailed(
                    f"outbox/{name} is damaged ({error}); the disk may be failing: "
                    "move the file away, and its operation is ordered again"
                ) from error
        self._next = max(self._reports, default=0) + 1
        if self._reports:
            self.changed.set()

    def __len__(self) -> int:
        return len(self._reports)

    def reports(self) -> list[Report]:
        """Return everything that is not acknowledged, oldest first."""
        return list(self._reports.values())

    def add(self, job: int, attempt: int, stage: str, result: object) -> None:
        """Keep a result until it is acknowledged; durable on return.

        OSError if the disk does not take it: nothing is kept then, and the same may be added again.
        """
        report = msgspec.convert(
            {
                "command_id": new_command_id(self._clock),
                "job": job,
                "attempt": attempt,
                "stage": stage,
                "result": msgspec.to_builtins(result),
            },
            type=Report,
        )
        number = self._next
        name, data = f"{number:020}.json", msgspec.json.encode(report)
        try:
            write_durably(self._directory, name, data)
        except OSError as error:
            if not is_disk_full(error) or not self._spares.lend(self._directory, name + RESERVE_SUFFIX):
                raise
            write_durably(self._directory, name, data)
        self._next += 1
        self._spares.fill()
        self._reports[number] = report
        self.changed.set()

    def batch(self) -> list[Report]:
        """Return the oldest reports for one request.

        An id that the controller would find too old is replaced by a new one.
        """
        chosen: list[Report] = []
        for number in sorted(self._reports)[:REPORTS_PER_REQUEST_MAX]:
            report = self._reports[number]
            if abs(self._clock.now() - instant_of(report.command_id)) > seconds(COMMAND_AGE_S_MAX):
                report = msgspec.structs.replace(report, command_id=new_command_id(self._clock))
                self._reports[number] = report
            chosen.append(report)
        return chosen

    def acknowledge(self, command_id: str) -> Report | None:
        """Drop the report that was sent with this id and return it; None if there is none."""
        for number, report in self._reports.items():
            if report.command_id == command_id:
                # Not synced: a report that comes back after a crash is refused as stale.
                self._spares.drop(self._directory, f"{number:020}.json")
                del self._reports[number]
                return report
        return None

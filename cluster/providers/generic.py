"""Provider of the older burst-buffer guide: a site's own programs to start and stop each stage.

Command lines are those of Slurm's burst_buffer/generic. A LINE is a comment line at the top of the job's script,
without the `#!` line:

    GetSysState get_sys
    StartStageIn start_stage_in JOB UID SIZE LINE…
    StartStageOut stage_out JOB UID SIZE LINE…
    StopStageIn stop_stage_in JOB
    StopStageOut stop_stage_out JOB

An operation without a configured program succeeds.
"""

from __future__ import annotations

import re
from typing import Final

from forebay.cluster.providers.commands import CommandProvider
from forebay.cluster.providers.files import replace_symbols, whole_script
from forebay.cluster.providers.interface import OperationError, PoolReport, Subject
from forebay.replica.model import CreatePersistent, DestroyPersistent, Provision
from forebay.replica.values import SIZE_BYTES_MAX, SizeError, parse_size

DIRECTIVES: Final = ("#BB",)

POOL: Final = "generic"
"""Name of the only pool, whose size GetSysState reports."""

LINES_MAX: Final = 1024
"""Maximum number of comment lines in a command line: the maximum number of directives of a job."""

_TOTAL: Final = re.compile(r"\bTotalSize=(\S+)")


class GenericProvider(CommandProvider):
    """Provider with programs for the start and end of each stage; StartStageIn also creates the space."""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Return the pool from `TotalSize=SIZE` in GetSysState's output, if present."""
        if not self._state:
            return None
        output = self._commands.check("pools", self._state, ("get_sys",), self._provision.other_timeout_s)
        found = _TOTAL.search(output.text)
        if found is None:
            return None
        try:
            size = parse_size(found.group(1))
        except SizeError as error:
            raise OperationError("pools", f"TotalSize is not a size: {error.sentence}") from error
        if size > SIZE_BYTES_MAX:
            raise OperationError("pools", f"TotalSize is more than {SIZE_BYTES_MAX} bytes")
        return (PoolReport(name=POOL, quantity=size, granularity=1),)

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Run GetSysStatus, or GetSysState if that is not configured."""
        path = self._status or self._state
        output = self._commands.check("get_status", path, arguments or ("get_sys",), self._provision.other_timeout_s)
        return output.printed.decode("utf-8", "replace")

    def create_persistent(self, subject: Subject, wanted: CreatePersistent, directory: str) -> None:
        """Run CreateBuffer."""
        access = wanted.access_text or ",".join(way.name.lower() for way in wanted.access)
        whose = (wanted.name, str(subject.uid), str(wanted.capacity_bytes))
        argv = ("create_buffer", *whose, wanted.pool, access, wanted.type)
        path, timeout_s = self._provision.create_buffer, self._provision.other_timeout_s
        self._commands.check("create_persistent", path, argv, timeout_s)

    def destroy_persistent(self, subject: Subject, wanted: DestroyPersistent, directory: str) -> None:
        """Run DestroyBuffer."""
        argv = ("destroy_buffer", wanted.name) + (("hurry",) if wanted.hurry else ())
        path, timeout_s = self._provision.destroy_buffer, self._provision.other_timeout_s
        self._commands.check("destroy_persistent", path, argv, timeout_s)

    def data_in(self, subject: Subject, directory: str) -> None:
        """Run StartStageIn."""
        argv = ("start_stage_in", *_of(subject, self._provision))
        self._run("data_in", self._provision.start_stage_in, argv, self._provision.stage_in_timeout_s)

    def data_out(self, subject: Subject, directory: str) -> None:
        """Run StartStageOut."""
        argv = ("stage_out", *_of(subject, self._provision))
        self._run("data_out", self._provision.start_stage_out, argv, self._provision.stage_out_timeout_s)

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Run StopStageIn and StopStageOut, which release the space."""
        provision, job = self._provision, str(subject.job)
        self._run("teardown", provision.stop_stage_in, ("stop_stage_in", job), provision.other_timeout_s)
        self._run("teardown", provision.stop_stage_out, ("stop_stage_out", job), provision.other_timeout_s)

    def _run(self, operation: str, path: str, argv: tuple[str, ...], timeout_s: float) -> None:
        if path:
            self._commands.check(operation, path, argv, timeout_s)


def _of(subject: Subject, provision: Provision) -> tuple[str, ...]:
    """Return the arguments of a stage: job ID, user ID, size, and the comment lines at the top of the script."""
    lines = []
    whole = whole_script(subject, provision.provider, provision.directive)
    for line in replace_symbols(whole, subject, DIRECTIVES).split("\n"):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith("#") and not line.startswith("#!"):
            lines.append(line)
    return (str(subject.job), str(subject.uid), str(subject.size), *lines[:LINES_MAX])


PROVIDER: Final = GenericProvider

"""The provider that runs a site's burst_buffer.lua, unmodified.

Functions, arguments and return values: SLURM-OBSERVED.md, section 5. The arguments that newer releases of Slurm added
are given, too: a script that does not name them does not see them.
"""

from __future__ import annotations

import os
from typing import Final

import msgspec

from cluster.providers import files, guard
from cluster.providers.commands import environment_for, log_output, timed_out
from cluster.providers.interface import Local, OperationError, PoolReport, Provider, Subject, parse_pools
from cluster.providers.lua_worker import Returned, call
from cluster.providers.trust import ProgramRefused, read_trusted
from cluster.system import Clock, write_all
from replica.model import Provision
from replica.values import SizeError, parse_size

NO_POOL: Final = "(null)"
"""What the script is told where the job asked for no pool, as Slurm does."""

BUSY: Final = "BUSY"

POLL_EXCEEDED: Final = "Poll exceeded time limit"

_SECONDS_PER_MINUTE: Final = 60


class LuaProvider(Provider):
    """A site's Lua script."""

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare; the script is read when a function is called."""
        super().__init__(provision, local, clock)
        self._path = local.lua_script or provision.lua_script or local.lua_script_beside
        self._status_identity = local.status_identity
        self._environment = environment_for(local.environment)
        self._directives = (f"#{provision.directive}",)

    def process(self, subject: Subject, directory: str) -> str:
        """Call slurm_bb_job_process."""
        script, _ = self._scripts(directory, subject)
        timeout_s = self._provision.validate_timeout_s
        return self._call("process", (script, *_ids(subject)), timeout_s, subject, function="job_process") or ""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Call slurm_bb_pools."""
        text = self._call("pools", (), self._provision.other_timeout_s)
        if not text:
            return None
        return parse_pools(text.encode("utf-8", "surrogateescape"), operation="pools", bytes_by_default=True)

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Call slurm_bb_get_status."""
        given = (str(uid), str(gid), *arguments) if self._status_identity else arguments
        return self._call("get_status", given, self._provision.other_timeout_s) or ""

    def setup(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_setup."""
        _, script = self._scripts(directory, subject)
        space = (subject.pool or NO_POOL, str(subject.size if subject.pool else 0))
        arguments = (str(subject.job), *_ids(subject), *space, script)
        self._call("setup", arguments, self._provision.other_timeout_s, subject)

    def data_in(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_data_in, then slurm_bb_test_data_in for as long as that says BUSY."""
        self._move(subject, directory, "data_in", self._provision.stage_in_timeout_s)

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Call slurm_bb_real_size, if the job asked for space in a pool."""
        if not subject.pool or not subject.has_size:
            return None
        arguments = (str(subject.job), *_ids(subject))
        text = self._call("real_size", arguments, self._provision.stage_in_timeout_s, subject)
        if not text:
            return None
        try:
            return parse_size(text.strip())
        except SizeError as error:
            raise OperationError("real_size", f"slurm_bb_real_size returned no size: {error.sentence}") from error

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Call slurm_bb_paths and read the file that it filled."""
        script, _ = self._scripts(directory, subject)
        path_file = files.make_path_file(directory)
        arguments = (str(subject.job), script, path_file, *_ids(subject))
        self._call("paths", arguments, self._provision.other_timeout_s, subject)
        return files.read_paths(path_file)

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_pre_run."""
        script, _ = self._scripts(directory, subject)
        self._call("pre_run", _of_job(subject, script), self._provision.other_timeout_s, subject)

    def post_run(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_post_run."""
        _, script = self._scripts(directory, subject)
        self._call("post_run", _of_job(subject, script), self._provision.other_timeout_s, subject)

    def data_out(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_data_out, then slurm_bb_test_data_out for as long as that says BUSY."""
        self._move(subject, directory, "data_out", self._provision.stage_out_timeout_s)

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Call slurm_bb_job_teardown."""
        script, _ = self._scripts(directory, subject)
        arguments = (str(subject.job), script, "true" if hurry else "false", *_ids(subject))
        self._call("teardown", arguments, self._provision.other_timeout_s, function="job_teardown")

    # How

    def _scripts(self, directory: str, subject: Subject) -> tuple[str, str]:
        return files.write_scripts(directory, subject, self._directives, self._provision)

    def _move(self, subject: Subject, directory: str, operation: str, timeout_s: int) -> None:
        """Start moving, and ask every PollInterval whether it is over; the stage's time is for all of it."""
        _, script = self._scripts(directory, subject)
        arguments = _of_job(subject, script)
        deadline_s = self._clock.monotonic_s() + timeout_s
        self._call(operation, arguments, timeout_s, subject)
        while True:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise OperationError(operation, POLL_EXCEEDED)
            answer = self._call(operation, arguments, left_s, subject, function=f"test_{operation}", optional=True)
            if answer != BUSY:
                return
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s > 0:
                guard.pause(min(self._provision.poll_interval_s, left_s))

    def _call(
        self,
        operation: str,
        arguments: tuple[str, ...],
        timeout_s: float,
        subject: Subject | None = None,
        *,
        function: str = "",
        optional: bool = False,
    ) -> str | None:
        """Call the function of the operation, or another one, and return its text; OperationError if it failed.

        It is told of the job if there is a `subject`. An `optional` one may be missing.
        """
        function = f"slurm_bb_{function or operation}"
        job_info = None if subject is None else _job_info(subject)
        try:
            source = read_trusted(self._path)
        except ProgramRefused as error:
            raise OperationError(operation, str(error), final=True) from error

        def perform(returned: int) -> None:
            # Nothing that only this interpreter needs: a program of the site's may be written in Python, too.
            os.environ.clear()
            os.environ.update(self._environment)
            answer = call(source, self._path, function, arguments, job_info)
            write_all(returned, msgspec.json.encode(answer))
            os._exit(0)

        try:
            finished = guard.run(perform, timeout_s=timeout_s, clock=self._clock)
        except OSError as error:
            raise OperationError(operation, f"{function} cannot be called: {error.strerror}") from error
        log_output(function, finished)
        if finished.timed_out:
            raise OperationError(operation, timed_out(timeout_s, finished))
        answer = _answered(finished)
        if answer is None:
            raise OperationError(operation, f"{function} {guard.how(finished.code)} before it returned")
        if answer.missing and optional:
            return None
        if answer.error:
            raise OperationError(operation, answer.error)
        if answer.code != 0:
            raise OperationError(operation, answer.text or f"{function} returned {answer.code} and no message")
        return answer.text


def _ids(subject: Subject) -> tuple[str, str]:
    return str(subject.uid), str(subject.gid)


def _of_job(subject: Subject, script: str) -> tuple[str, ...]:
    return (str(subject.job), script, *_ids(subject))


def _answered(finished: guard.Finished) -> Returned | None:
    try:
        return msgspec.json.decode(finished.returned, type=Returned) if finished.code == 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _job_info(subject: Subject) -> dict[str, str | int]:
    """Return the table that newer releases give, with the names that job_submit.lua has for the same."""
    info: dict[str, str | int] = {
        "job_id": subject.job,
        "name": subject.name,
        "user_name": subject.user,
        "user_id": subject.uid,
        "group_id": subject.gid,
        "work_dir": subject.workdir,
        "account": subject.account,
        "qos": subject.qos,
        "partition": subject.partition,
        "comment": subject.comment,
        "reservation": subject.reservation,
        "nodes": subject.node,
        "min_nodes": subject.nodes,
        "min_cpus": subject.cpus,
        "time_limit": -(-subject.time_limit_s // _SECONDS_PER_MINUTE),
    }
    if subject.array_job:
        info |= {"array_job_id": subject.array_job, "array_task_id": subject.array_task}
    return {name: value for name, value in info.items() if value != ""}


PROVIDER: Final = LuaProvider

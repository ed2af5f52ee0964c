"""Provider that runs a site's unmodified `dw_wlm_cli` and `dwstat`.

SLURM-OBSERVED.md, sections 2 and 5, lists the command lines and which answers mean success.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from forebay.cluster.providers import files
from forebay.cluster.providers.commands import CommandOutput, CommandProvider, failure
from forebay.cluster.providers.interface import OperationError, PoolReport, Subject, parse_pools
from forebay.replica.model import CreatePersistent, DestroyPersistent
from forebay.replica.values import format_slurm_size

CALLER: Final = "SLURM"
DIRECTIVES: Final = ("#DW", "#BB")

NO_SESSION: Final = "No matching session"
NO_TOKEN: Final = "token not found"
"""Outputs of dw_wlm_cli that mean that there is nothing to do, regardless of the exit code."""

VALID: Final = "job_file_valid True"
CREATED: Final = "created"


class DatawarpProvider(CommandProvider):
    """Provider for a site's DataWarp."""

    def process(self, subject: Subject, directory: str) -> str:
        """Run job_process."""
        script, _ = self._scripts(directory, subject)
        argv = ("--function", "job_process", "--job", script)
        self._operate("process", argv, self._provision.validate_timeout_s, begins=VALID)
        return ""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Run pools."""
        output = self._operate("pools", ("--function", "pools"), self._provision.other_timeout_s)
        return parse_pools(output.printed, operation="pools", bytes_by_default=True)

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Run dwstat with the arguments."""
        output = self._commands.check("get_status", self._status, arguments, self._provision.other_timeout_s)
        return output.printed.decode("utf-8", "replace")

    def create_persistent(self, subject: Subject, wanted: CreatePersistent, directory: str) -> None:
        """Run create_persistent, whose output must confirm the creation."""
        argv = ["--function", "create_persistent", "-c", "CLI", "-t", wanted.name, "-u", str(subject.uid)]
        argv += ["-C", f"{wanted.pool}:{wanted.capacity_bytes}"]
        if wanted.access:
            argv += ["-a", wanted.access_text or ",".join(way.name.lower() for way in wanted.access)]
        if wanted.type:
            argv += ["-T", wanted.type]
        output = self._operate("create_persistent", argv, self._provision.other_timeout_s)
        if CREATED not in output.text:
            raise failure("create_persistent", self._state, output)

    def destroy_persistent(self, subject: Subject, wanted: DestroyPersistent, directory: str) -> None:
        """Run teardown with the buffer's name."""
        self._teardown("destroy_persistent", wanted.name, subject, wanted.hurry, directory)

    def setup(self, subject: Subject, directory: str) -> None:
        """Run setup."""
        _, script = self._scripts(directory, subject)
        size = format_slurm_size(subject.size) if subject.size_is_bytes else str(subject.size)
        whose = ("--token", str(subject.job), "--caller", CALLER, "--user", str(subject.uid))
        what = ("--groupid", str(subject.gid), "--capacity", f"{subject.pool}:{size}", "--job", script)
        argv = ("--function", "setup", *whose, *what)
        self._operate("setup", argv, self._provision.other_timeout_s)

    def data_in(self, subject: Subject, directory: str) -> None:
        """Run data_in."""
        self._of_job("data_in", subject, directory, self._provision.stage_in_timeout_s)

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Run real_size if the job requested a capacity; empty output is permitted."""
        if not subject.has_size:
            return None
        argv = ("--function", "real_size", "--token", str(subject.job))
        output = self._operate("real_size", argv, self._provision.stage_in_timeout_s)
        if not output.printed.strip():
            return None
        try:
            return msgspec.json.decode(output.printed, type=_RealSize).capacity
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OperationError("real_size", f"the size is not valid JSON: {error}") from error

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Run paths and read its path file."""
        _, script = self._scripts(directory, subject)
        path_file = files.make_path_file(directory)
        argv = ("--function", "paths", "--job", script, "--token", str(subject.job), "--pathfile", path_file)
        self._operate("paths", argv, self._provision.other_timeout_s, begins=VALID)
        return files.read_paths(path_file)

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Run pre_run."""
        _, script = self._scripts(directory, subject)
        nodes = ("--nodehostnamefile", files.write_nodes(directory, subject))
        argv = ("--function", "pre_run", "--token", str(subject.job), "--job", script, *nodes)
        self._operate("pre_run", argv, self._provision.other_timeout_s)

    def post_run(self, subject: Subject, directory: str) -> None:
        """Run post_run."""
        self._of_job("post_run", subject, directory, self._provision.other_timeout_s)

    def data_out(self, subject: Subject, directory: str) -> None:
        """Run data_out."""
        self._of_job("data_out", subject, directory, self._provision.stage_out_timeout_s)

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Run teardown."""
        self._teardown("teardown", str(subject.job), subject, hurry, directory)

    def _scripts(self, directory: str, subject: Subject) -> tuple[str, str]:
        return files.write_scripts(directory, subject, DIRECTIVES, self._provision)

    def _operate(
        self,
        operation: str,
        argv: Sequence[str],
        timeout_s: float,
        *,
        fine: tuple[str, ...] = (),
        begins: str | None = None,
    ) -> CommandOutput:
        """Run a command. It succeeds with exit code 0, or if its output contains one of `fine` or starts with `begins`.

        Raises:
            OperationError: The command failed; the message has its output.
        """
        output = self._commands.run(operation, self._state, argv, timeout_s)
        said = any(words in output.text for words in fine) or (begins is not None and output.text.startswith(begins))
        if output.code != 0 and not said:
            raise failure(operation, self._state, output)
        return output

    def _of_job(self, operation: str, subject: Subject, directory: str, timeout_s: float) -> None:
        _, script = self._scripts(directory, subject)
        argv = ("--function", operation, "--token", str(subject.job), "--job", script)
        self._operate(operation, argv, timeout_s, fine=(NO_SESSION,))

    def _teardown(self, operation: str, token: str, subject: Subject, hurry: bool, directory: str) -> None:
        _, script = self._scripts(directory, subject)
        argv = ["--function", "teardown", "--token", token, "--job", script] + ["--hurry"] * hurry
        self._operate(operation, argv, self._provision.other_timeout_s, fine=(NO_SESSION, NO_TOKEN))


class _RealSize(msgspec.Struct):
    capacity: int
    units: str = "bytes"


PROVIDER: Final = DatawarpProvider

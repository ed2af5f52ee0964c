"""Files read by slurmctld, replaced by rename: pools, grammar tables, and the variables of each staged job.

Times are the machine's uptime in seconds, which no account can set; the bridge and burst_buffer.lua read it from
`/proc/uptime`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from forebay.cluster.schemas.external_jobs import ExternalJobView, PersistentView, SchedulerSiteAnswer
from forebay.cluster.slurm import PARTS, script_parts
from forebay.cluster.system import closing, make_private_directory, open_directory
from forebay.replica.grammar import external_job_tables, path_variable_table
from forebay.replica.model import VARIABLE_DIRECTORIES, WHOLE_BUFFER, persistent_variable
from forebay.replica.values import SCRIPT_BYTES_MAX

BELIEVED_S: Final = 10.0
"""Validity of a file, seconds: three renewal periods, so that a renewal may fail."""

RENEW_S: Final = 3.0
"""Seconds between two renewals."""

STAGED: Final = frozenset({"staged-in", "running", "post-run", "staging-out", "stage-out-failed"})
"""Phases in which a job's variables point to existing data."""

VARIABLES: Final = {
    **{name: f"/{VARIABLE_DIRECTORIES[name]}" for name in ("DW_JOB_STRIPED", "DW_JOB_LDBALANCE")},
    WHOLE_BUFFER: "",
}
"""Variable of a job -> path in the job's buffer, for access modes that all nodes of the job share."""

SESSIONS: Final = STAGED | {"waiting", "set-up", "staging-in", "stage-in-failed"}
"""Phases in which a buffer is listed for Slurm.

burst_buffer/datawarp drops a buffer that is not listed for a minute, and adopts a listed one.
"""

PERSISTENT_ID: Final = 2**31
"""Offset of the session IDs of persistent buffers. The session IDs of jobs' own buffers are the lower job IDs."""

LEAVING_S: Final = 900.0
"""Seconds for which a job stays listed while Slurm has not read the reply to its teardown: time for a restart."""

LEFT_S: Final = 60.0
"""Seconds for which a job stays listed after the reply was read: slurmctld may learn of it later than slurmscriptd."""

_PRIVATE: Final = 0o700
_JOB = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_PERSISTENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*", re.ASCII)
"""Pattern of a persistent buffer's name, which does not start with a digit, unlike a job ID."""


def uptime_s() -> float:
    """Return the machine's uptime in seconds, including sleep."""
    with open("/proc/uptime", encoding="ascii") as file:
        return float(file.read().split()[0])


class BufferSession(NamedTuple):
    """Buffer as burst_buffer/datawarp lists it; `token` is the job ID, or a persistent buffer's name."""

    token: str
    number: int
    """Unique among sessions."""
    uid: int
    size_bytes: int
    created_s: int
    """Unix time of the request or creation. Slurm tolerates unknown sessions younger than OtherTimeout."""

    def lines(self) -> bytes:
        """Return a session, its instance and its configuration, each as one line of JSON."""
        rows: tuple[dict[str, Any], ...] = (
            {
                "id": self.number,
                "token": self.token,
                "owner": self.uid,
                "created": self.created_s,
                "creator": "SLURM",
                "expiration": 0,
                "links": {"client_nodes": []},
                "state": {"actualized": True, "mixed": False, "transitioning": False},
            },
            {
                "id": self.number,
                "label": self.token,
                "capacity": {"bytes": self.size_bytes, "nodes": 1},
                "links": {"configurations": [self.number], "session": self.number},
            },
            {"id": self.number, "type": "scratch", "links": {"instance": self.number}},
        )
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)


def _second(written: str | None) -> int:
    """Return an API time in whole seconds of Unix time, 0 for none."""
    return int(datetime.fromisoformat(written).timestamp()) if written else 0


def is_listed(external_job: ExternalJobView) -> bool:
    """Return whether Slurm counts an external job."""
    return external_job.phase in SESSIONS and _JOB.fullmatch(external_job.job) is not None


def session_of(external_job: ExternalJobView) -> BufferSession:
    """Return the session of an external job."""
    created = _second(external_job.submit_time)
    return BufferSession(external_job.job, int(external_job.job), external_job.uid, external_job.size, created)


def session_of_persistent(buffer: PersistentView, uid: int) -> BufferSession | None:
    """Return the session of a persistent buffer, or None if Slurm must not see it.

    That is the case before its creation, and for a buffer on no shared filesystem.
    """
    if buffer.state not in ("allocated", "deleting") or buffer.path is None or not _PERSISTENT.fullmatch(buffer.name):
        return None
    created = _second(buffer.create_time)
    number = PERSISTENT_ID | buffer.number & (PERSISTENT_ID - 1)
    return BufferSession(buffer.name, number, uid, buffer.size, created)


class DirectoryRefused(Exception):
    """Directory that other accounts could change; the message has the cause and the remedy."""


class SlurmFiles:
    """Directory of the bridge, private to its account."""

    def __init__(self, directory: Path, host: str, *, away: str = "refuse") -> None:
        """Create the directory. `away` is the policy for new jobs while no bridge runs: `refuse` or `accept`.

        Raises:
            DirectoryRefused: Other accounts could change the directory.
            OSError: The directory cannot be created.
        """
        self.directory: Final = directory
        self._host = host
        self._away = away
        self._paths = directory / "paths"
        make_private_directory(directory)
        with closing(open_directory(directory)) as opened:
            status = os.fstat(opened)
        # The content of the directory becomes the environment of users' jobs.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise DirectoryRefused(
                f"{directory}: accounts other than SlurmUser could change it; remove it, or choose another directory "
                "(--run)"
            )
        self._paths.mkdir(mode=0o700, exist_ok=True)
        self._sessions = directory / "sessions"
        self._sessions.mkdir(mode=0o700, exist_ok=True)
        self._parts = directory / PARTS
        self._compiled = secrets.token_hex(8)
        """Name under which slurmctld caches compiled parts.

        It is new for each bridge, because an earlier bridge may be of another release.
        """
        self._listed: dict[str, BufferSession] = {}
        self._setting_up: dict[str, int] = {}
        """Jobs whose setup is running -> number of calls. Slurm counts such jobs before Forebay does."""
        self._known: dict[str, str] = {}
        self._since: set[str] = set()
        """Jobs staged or listed since the last request for all external jobs, which the reply may lack."""
        self._ended: set[str] = set()
        """Sessions that ended since that request, which the reply may still contain."""
        self._leaving_s: dict[str, float] = {}
        """Jobs being torn down -> uptime until which they stay listed: Slurm counts them until it is notified."""

    def publish(self) -> None:
        """Write the parts of burst_buffer.lua, and remove the compiled ones of earlier bridges.

        Raises:
            OSError: A file cannot be written.
        """
        self._parts.mkdir(mode=0o700, exist_ok=True)
        wanted = script_parts()
        for name, text in wanted.items():
            self._write(self._parts / name, text.encode())
        for name in os.listdir(self._parts):
            if name not in wanted:
                (self._parts / name).unlink(missing_ok=True)

    def renew(
        self, site: SchedulerSiteAnswer, asked_s: float, written: str, users: dict[str, list[int]] | None = None
    ) -> None:
        """Write the settings that were requested at the uptime `asked_s`.

        `written` is this time for display, such as `10:03`.
        """
        until = {"until": round(asked_s + BELIEVED_S, 2), "lasts": BELIEVED_S, "written": written, "host": self._host}
        pools = [
            {
                "id": pool.name,
                "quantity": pool.quantity // pool.granularity,
                "granularity": pool.granularity,
                "free": max(0, pool.free) // pool.granularity,
            }
            for pool in site.pools
        ]
        self._write(self.directory / "pools.json", msgspec.json.encode({**until, "pools": pools}))
        tables: dict[str, Any] = {
            **until,
            **external_job_tables(),
            "away": self._away,
            "compiled": self._compiled,
            "directive": site.directive,
            "path_variables": path_variable_table(site.path_variables),
            "pools": [{name: pool[name] for name in ("id", "quantity", "granularity")} for pool in pools],
        }
        if users:
            tables["users"] = users
        self._write(self.directory / "site.json", msgspec.json.encode(tables))

    def write_variables(self, external_job: ExternalJobView) -> None:
        """Write the variables of a job whose buffer is staged.

        Raises:
            OSError: The file cannot be written.
        """
        if external_job.path is None or not _JOB.fullmatch(external_job.job):
            return
        self._since.add(external_job.job)
        own = () if external_job.persistent and not external_job.size else VARIABLES.items()
        text = "".join(f"{name}={external_job.path}{below}\n" for name, below in own)
        text += "".join(
            f"{persistent_variable(name)}={path}\n" for name, path in sorted(external_job.persistent.items())
        )
        if self._known.get(external_job.job) != text:
            self._write(self._paths / external_job.job, text.encode())
            self._known[external_job.job] = text

    def remove_variables(self, job: str) -> None:
        """Remove the variables of a job."""
        self._known.pop(job, None)
        if _JOB.fullmatch(job):
            (self._paths / job).unlink(missing_ok=True)

    # Sessions have one file each, so the cost of a change does not depend on their number

    def setup_begins(self, session: BufferSession) -> None:
        """List a job whose setup begins, because Slurm counts its buffer from now on.

        Raises:
            OSError: The file cannot be written.
        """
        self._setting_up[session.token] = self._setting_up.get(session.token, 0) + 1
        self._leaving_s.pop(session.token, None)
        self._list(session)

    def setup_ends(self, job: str, *, failed: bool) -> None:
        """End a setup: unlist a job whose setup failed.

        Otherwise the phase of the external job determines the listing again.
        """
        self._setting_up[job] -= 1
        if not self._setting_up[job]:
            del self._setting_up[job]
            if failed:
                self._unlist(job)

    def teardown_begins(self, job: str, now_s: int) -> None:
        """Keep a job listed until Slurm knows of its teardown, as if created at the Unix time `now_s`.

        A slurmctld that restarts meanwhile repeats the teardown, but only for listed sessions. A slurmctld that has
        read the reply ignores a session that young.

        Raises:
            OSError: The file cannot be written.
        """
        known = self._listed.get(job)
        if known is not None:
            self._leaving_s[job] = uptime_s() + LEAVING_S
            self._write(self._sessions / job, known._replace(created_s=now_s).lines())

    def teardown_read(self, job: str, *, done: bool) -> None:
        """Note that the reply was read: a deleted buffer is unlisted soon, a retained one stays listed by its phase."""
        if job in self._leaving_s and done:
            self._leaving_s[job] = uptime_s() + LEFT_S
        elif not done:
            self._leaving_s.pop(job, None)

    def _leave(self) -> None:
        """Unlist jobs whose teardown ended long enough ago."""
        now_s = uptime_s()
        for job in [job for job, until_s in self._leaving_s.items() if until_s <= now_s]:
            del self._leaving_s[job]
            self._unlist(job)

    def update_listing(self, external_job: ExternalJobView) -> None:
        """List or unlist an external job.

        Raises:
            OSError: The file cannot be written or removed.
        """
        if external_job.job in self._leaving_s:
            return
        if is_listed(external_job):
            self._list(session_of(external_job))
        elif external_job.job not in self._setting_up:
            self._unlist(external_job.job)

    def list_persistent(self, session: BufferSession) -> None:
        """List a persistent buffer.

        Raises:
            OSError: The file cannot be written.
        """
        self._list(session)

    def unlist_persistent(self, name: str) -> None:
        """Unlist a persistent buffer.

        Raises:
            OSError: The file cannot be removed.
        """
        if _PERSISTENT.fullmatch(name):
            self._unlist(name)

    def _list(self, session: BufferSession) -> None:
        self._since.add(session.token)
        known = self._listed.get(session.token)
        if known is not None and (known.uid, known.size_bytes) == (session.uid, session.size_bytes):
            return
        self._write(self._sessions / session.token, session.lines())
        self._listed[session.token] = session

    def _unlist(self, token: str) -> None:
        self._ended.add(token)
        self._listed.pop(token, None)
        (self._sessions / token).unlink(missing_ok=True)

    def ask(self) -> None:
        """Note that all external jobs are being requested; `reconcile` gets the reply."""
        self._since.clear()
        self._ended.clear()

    def reconcile(self, external_jobs: Iterable[ExternalJobView], *, whole: bool = True) -> None:
        """Write the variables of these external jobs, and remove others, except for jobs staged since `ask`.

        This includes jobs staged by other hosts. Without `whole`, the reply is incomplete and no files are removed.
        """
        wanted = {external_job.job: external_job for external_job in external_jobs if external_job.phase in STAGED}
        for name in os.listdir(self._paths) if whole else ():
            if name not in wanted and name not in self._since:
                self.remove_variables(name)
        for external_job in wanted.values():
            self.write_variables(external_job)

    def list_all(self, sessions: Iterable[BufferSession], *, whole: bool = True, unsure: Iterable[str] = ()) -> None:
        """List these sessions, and keep those listed since `ask` or being set up.

        `whole` is as in `reconcile`. Sessions in `unsure` do not change.
        """
        self._leave()
        before = self._since.union(unsure, self._leaving_s)
        wanted = {session.token: session for session in sessions}
        for name in os.listdir(self._sessions) if whole else ():
            if name not in wanted and name not in before and name not in self._setting_up:
                self._unlist(name)
        for token, session in wanted.items():
            # Skip sessions that ended since the request, which the reply may still contain.
            if token not in self._leaving_s and (token in self._listed or token not in self._ended):
                self._list(session)

    def _write(self, path: Path, content: bytes) -> None:
        # Only one bridge writes to this directory. No sync is needed, because /run is in memory.
        beside = path.with_name(f".{path.name}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        beside.rename(path)


# Slurm keeps a directory for each job, with its script, below StateSaveLocation. From 24.11 on, it creates neither for
# a task split from a job array, but its plugins still read the script there and write the job's variables beside it.
# These functions create missing ones as 22.05 did; Slurm removes them with the job.


def directory_of(state: Path, job: str) -> Path:
    """Return a job's directory below StateSaveLocation; `job` is an ID."""
    return state / f"hash.{int(job) % 10}" / f"job.{job}"


def make_directory(state: Path, job: str) -> None:
    """Create a job's directory if it is missing.

    Raises:
        OSError: The directory cannot be created.
    """
    directory = directory_of(state, job)
    directory.parent.mkdir(mode=_PRIVATE, exist_ok=True)
    directory.mkdir(mode=_PRIVATE, exist_ok=True)


async def linked_script(state: Path, job: str, ask_array: Callable[[str], Awaitable[str | None]]) -> str:
    """Link the script of a job array to its task, and return it; empty if there is none.

    `ask_array` returns the array ID of a task, None if unknown.

    Raises:
        OSError: The script cannot be read or linked.
        UnicodeDecodeError: The script is not UTF-8.
    """
    path = directory_of(state, job) / "script"
    if not path.exists():
        array = await ask_array(job)
        if array is None:
            return ""
        with contextlib.suppress(FileExistsError):
            os.link(directory_of(state, array) / "script", path)
    with path.open("rb") as file:
        # Read one byte over the limit, to detect longer scripts, and the zero byte at the end of Slurm's file.
        return file.read(SCRIPT_BYTES_MAX + 2).decode().rstrip("\0")

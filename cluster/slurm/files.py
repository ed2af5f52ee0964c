"""The files that slurmctld reads, written by rename: pools, the tables of the grammar, variables of each staged job.

Times are the machine's uptime, which nobody sets: seconds, as `/proc/uptime` tells the bridge and burst_buffer.lua.
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

from cluster.schemas.external_jobs import ExternalJobView, PersistentView, SchedulerSiteAnswer
from cluster.slurm import PARTS, script_parts
from cluster.system import closing, make_private_directory, open_directory
from replica.grammar import external_job_tables
from replica.model import VARIABLE_DIRECTORIES, WHOLE_BUFFER, persistent_variable
from replica.values import SCRIPT_BYTES_MAX

BELIEVED_S: Final = 10.0
"""How long a file may be believed, seconds: three renewals, so that one that fails goes unnoticed."""

RENEW_S: Final = 3.0
"""Seconds between two renewals."""

STAGED: Final = frozenset({"staged-in", "running", "post-run", "staging-out", "stage-out-failed"})
"""Phases in which a job's variables point to something."""

VARIABLES: Final = {
    **{name: f"/{VARIABLE_DIRECTORIES[name]}" for name in ("DW_JOB_STRIPED", "DW_JOB_LDBALANCE")},
    WHOLE_BUFFER: "",
}
"""Path in its buffer of each variable of a job: those of the access modes that all nodes of a job share."""

SESSIONS: Final = STAGED | {"waiting", "set-up", "staging-in", "stage-in-failed"}
"""Phases in which a buffer is in Slurm's books: burst_buffer/datawarp strikes one off that is not listed for a minute,
and takes one that is listed for its own.
"""

PERSISTENT_ID: Final = 2**31
"""What is added to the numbers of persistent buffers' sessions: those of jobs' own are the jobs' numbers, below it."""

LEAVING_S: Final = 900.0
"""Seconds for which a job is listed of whose teardown Slurm has not read: a slurmctld that ended is back by then."""

LEFT_S: Final = 60.0
"""Seconds for which it is listed after that was read: slurmctld may hear of it later than slurmscriptd."""

_PRIVATE: Final = 0o700
_JOB = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)
_PERSISTENT = re.compile(r"[A-Za-z_][A-Za-z0-9_.+-]*", re.ASCII)
"""As Forebay names them; it begins with no digit, as the number of a job does."""


def uptime_s() -> float:
    """Return for how many seconds the machine is up, sleep included."""
    with open("/proc/uptime", encoding="ascii") as file:
        return float(file.read().split()[0])


class BufferSession(NamedTuple):
    """One buffer as burst_buffer/datawarp lists it: `token` is the job's number, or a persistent buffer's name."""

    token: str
    number: int
    """Which no other session has."""
    uid: int
    size_bytes: int
    created_s: int
    """When it was asked for, or made: Unix time. What is younger than OtherTimeout may be unknown to Slurm."""

    def lines(self) -> bytes:
        """Return a session, its instance and its configuration, each as JSON on a line of its own."""
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
    """Return a time of the API in whole seconds of Unix time, 0 for none."""
    return int(datetime.fromisoformat(written).timestamp()) if written else 0


def is_listed(external_job: ExternalJobView) -> bool:
    """Whether an external job is in Slurm's books."""
    return external_job.phase in SESSIONS and _JOB.fullmatch(external_job.job) is not None


def session_of(external_job: ExternalJobView) -> BufferSession:
    """Return the session of an external job."""
    created = _second(external_job.submit_time)
    return BufferSession(external_job.job, int(external_job.job), external_job.uid, external_job.size, created)


def session_of_persistent(buffer: PersistentView, uid: int) -> BufferSession | None:
    """Return the session of a persistent buffer, None of one that Slurm cannot know: not made, or in no place."""
    if buffer.state not in ("allocated", "deleting") or buffer.path is None or not _PERSISTENT.fullmatch(buffer.name):
        return None
    created = _second(buffer.create_time)
    number = PERSISTENT_ID | buffer.number & (PERSISTENT_ID - 1)
    return BufferSession(buffer.name, number, uid, buffer.size, created)


class DirectoryRefused(Exception):
    """A directory that others than the bridge's account could change: what is wrong, and what to do."""


class SlurmFiles:
    """The directory of the bridge, private to its account."""

    def __init__(self, directory: Path, host: str, *, away: str = "refuse") -> None:
        """Make it; OSError, DirectoryRefused.

        `away`: whether jobs are accepted while no bridge runs, `refuse` or `accept`.
        """
        self.directory: Final = directory
        self._host = host
        self._away = away
        self._paths = directory / "paths"
        make_private_directory(directory)
        with closing(open_directory(directory)) as opened:
            status = os.fstat(opened)
        # What lies in it becomes the environment of everybody's jobs.
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise DirectoryRefused(
                f"{directory}: others than SlurmUser could change it; remove it, or name another directory (--run)"
            )
        self._paths.mkdir(mode=0o700, exist_ok=True)
        self._sessions = directory / "sessions"
        self._sessions.mkdir(mode=0o700, exist_ok=True)
        self._parts = directory / PARTS
        self._compiled = secrets.token_hex(8)
        """What slurmctld calls its compiled parts by: those of an earlier bridge may be of another release."""
        self._listed: dict[str, BufferSession] = {}
        self._setting_up: dict[str, int] = {}
        """Jobs whose setup is under way -> how many calls: Slurm counts them from then on, whatever Forebay knows."""
        self._known: dict[str, str] = {}
        self._since: set[str] = set()
        """Jobs that were staged, or listed, since the external jobs were last asked for: the answer may not have
        them.
        """
        self._ended: set[str] = set()
        """Sessions that ended since then: the answer may still have them."""
        self._leaving_s: dict[str, float] = {}
        """Jobs that are torn down -> until which uptime they are listed: Slurm counts them until it has heard of it."""

    def publish(self) -> None:
        """Write the parts of burst_buffer.lua, and remove what slurmctld kept of earlier ones; OSError."""
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
        """Write what was asked for at the uptime `asked_s`; `written` is what people read of when it was, `10:03`."""
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
            "pools": [{name: pool[name] for name in ("id", "quantity", "granularity")} for pool in pools],
        }
        if users:
            tables["users"] = users
        self._write(self.directory / "site.json", msgspec.json.encode(tables))

    def staged(self, external_job: ExternalJobView) -> None:
        """Write the variables of a job whose buffer is there; OSError."""
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

    def gone(self, job: str) -> None:
        """Remove the variables of a job."""
        self._known.pop(job, None)
        if _JOB.fullmatch(job):
            (self._paths / job).unlink(missing_ok=True)

    # Sessions: one file each, so that a change costs the same however many there are

    def setup_begins(self, session: BufferSession) -> None:
        """Have a job listed from here on: Slurm counts it, whatever Forebay knows yet; OSError."""
        self._setting_up[session.token] = self._setting_up.get(session.token, 0) + 1
        self._leaving_s.pop(session.token, None)
        self._list(session)

    def setup_ends(self, job: str, *, failed: bool) -> None:
        """Have what becomes of its external job count again; one that failed is listed no longer."""
        self._setting_up[job] -= 1
        if not self._setting_up[job]:
            del self._setting_up[job]
            if failed:
                self._unlist(job)

    def teardown_begins(self, job: str, now_s: int) -> None:
        """Keep a job listed until Slurm knows of its teardown, as if it were made at the Unix time `now_s`; OSError.

        A slurmctld that ends meanwhile has it torn down again when it is back, but only what it finds listed; one that
        has heard the answer takes what is that young for nobody's.
        """
        known = self._listed.get(job)
        if known is not None:
            self._leaving_s[job] = uptime_s() + LEAVING_S
            self._write(self._sessions / job, known._replace(created_s=now_s).lines())

    def teardown_read(self, job: str, *, done: bool) -> None:
        """Note that the answer was read: what is gone leaves the list soon, what is not stays as others do."""
        if job in self._leaving_s and done:
            self._leaving_s[job] = uptime_s() + LEFT_S
        elif not done:
            self._leaving_s.pop(job, None)

    def _leave(self) -> None:
        """Unlist what was torn down long enough ago."""
        now_s = uptime_s()
        for job in [job for job, until_s in self._leaving_s.items() if until_s <= now_s]:
            del self._leaving_s[job]
            self._unlist(job)

    def heard(self, external_job: ExternalJobView) -> None:
        """List an external job, or do so no longer; OSError."""
        if external_job.job in self._leaving_s:
            return
        if is_listed(external_job):
            self._list(session_of(external_job))
        elif external_job.job not in self._setting_up:
            self._unlist(external_job.job)

    def made(self, session: BufferSession) -> None:
        """List a persistent buffer; OSError."""
        self._list(session)

    def removed(self, name: str) -> None:
        """List a persistent buffer no longer; OSError."""
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
        """Note that all external jobs are being asked for, for `reconcile`."""
        self._since.clear()
        self._ended.clear()

    def reconcile(self, external_jobs: Iterable[ExternalJobView], *, whole: bool = True) -> None:
        """Have the variables of these external jobs, and of those that were staged since `ask`: other hosts stage, too.

        `whole`: the answer has all that there are; else none is taken away.
        """
        wanted = {external_job.job: external_job for external_job in external_jobs if external_job.phase in STAGED}
        for name in os.listdir(self._paths) if whole else ():
            if name not in wanted and name not in self._since:
                self.gone(name)
        for external_job in wanted.values():
            self.staged(external_job)

    def list_all(self, sessions: Iterable[BufferSession], *, whole: bool = True, unsure: Iterable[str] = ()) -> None:
        """Have these sessions, and those listed since `ask` or being set up; `whole` as in `reconcile`, and nothing is
        said of the tokens in `unsure`.
        """
        self._leave()
        before = self._since.union(unsure, self._leaving_s)
        wanted = {session.token: session for session in sessions}
        for name in os.listdir(self._sessions) if whole else ():
            if name not in wanted and name not in before and name not in self._setting_up:
                self._unlist(name)
        for token, session in wanted.items():
            # What ended since was heard of by `heard`, and is not in an answer that was asked for before.
            if token not in self._leaving_s and (token in self._listed or token not in self._ended):
                self._list(session)

    def _write(self, path: Path, content: bytes) -> None:
        # Nobody but the one bridge of this directory writes here. No sync: /run is memory.
        beside = path.with_name(f".{path.name}.new")
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(content)
        beside.rename(path)


# Files of Slurm's own, below StateSaveLocation: a directory for each job, and in it the script. From 24.11 on Slurm
# makes neither for a task that it splits from a job array; its plugins still read the script there, and write the job's
# variables beside it. What is missing is made as 22.05 made it; Slurm removes it with the job.


def directory_of(state: Path, job: str) -> Path:
    """Return a job's directory below StateSaveLocation; `job` is a number."""
    return state / f"hash.{int(job) % 10}" / f"job.{job}"


def make_directory(state: Path, job: str) -> None:
    """Make a job's directory where it is missing; OSError."""
    directory = directory_of(state, job)
    directory.parent.mkdir(mode=_PRIVATE, exist_ok=True)
    directory.mkdir(mode=_PRIVATE, exist_ok=True)


async def linked_script(state: Path, job: str, ask_array: Callable[[str], Awaitable[str | None]]) -> str:
    """Give a task the script of its job array, and return it; empty if there is none. OSError, UnicodeDecodeError.

    `ask_array` returns the number of the array that a task belongs to, None if it is not known.
    """
    path = directory_of(state, job) / "script"
    if not path.exists():
        array = await ask_array(job)
        if array is None:
            return ""
        with contextlib.suppress(FileExistsError):
            os.link(directory_of(state, array) / "script", path)
    with path.open("rb") as file:
        # One byte more than is accepted, so that a longer script is seen, and the zero byte with which Slurm ends it.
        return file.read(SCRIPT_BYTES_MAX + 2).decode().rstrip("\0")

"""Bridge between slurmctld's host and the leader: files for slurmctld, FIFOs and a socket for calls that may wait.

burst_buffer.lua, and dw_wlm_cli in calls about a job, send requests and read replies through FIFOs. forebay-bb uses a
Unix socket; if a call does not finish at once, the reply is the path of a FIFO. The bridge keeps the FIFOs open, so no
process is needed for a waiting caller. When the bridge ends for any reason, waiting callers read the end of the file
and repeat their calls at the next bridge; all calls are repeatable.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import fcntl
import logging
import os
import secrets
import socket
import struct
import termios
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import external_jobs as g
from forebay.cluster.schemas import new_command_id, operations
from forebay.cluster.slurm.calls import FUNCTIONS, NO_TEXT, QUESTIONS, STAGE_IN, Answer, PluginCalls, sentence
from forebay.cluster.slurm.fifos import FifoRequest, Fifos
from forebay.cluster.slurm.files import RENEW_S, SlurmFiles, is_listed, session_of, session_of_persistent, uptime_s
from forebay.cluster.slurm.metrics import BridgeMetrics
from forebay.cluster.slurm.reconciler import Reconciler
from forebay.cluster.slurm.slurmctld import SlurmView, array_of, ended_by_itself, look, owner_of
from forebay.cluster.system import READY, Clock, closing, new_private_file, open_private_file, tell_manager
from forebay.cluster.system.eventloop import Identities
from forebay.replica.values import MICROSECONDS_PER_SECOND

LOGGER = logging.getLogger(__name__)

AT_ONCE_S: Final = 0.25
"""Seconds to wait before the reply to a socket call is moved to a FIFO: several commits."""

REQUEST_BYTES_MAX: Final = 16 * 1024
"""Limit of one socket request, bytes."""

REQUEST_S: Final = 10.0
"""Seconds within which a request must arrive: a process on this host sends it in one piece."""

ANSWER_BYTES_MAX: Final = 32 * 1024
"""Limit of one reply, bytes: less than the capacity of a pipe."""

CALLS_MAX: Final = 8_192
"""Maximum number of FIFOs at a time: one for each buffer job that stages; further callers retry."""

READ_S: Final = 30.0
"""Seconds for which a reply stays in its FIFO: a caller reads it at once, unless it was killed."""

LOOK_S: Final = 0.02
"""Seconds before the first check whether a reply was read; doubled for each further check, up to a second."""

LIST_EVERY: Final = 5
"""Number of file renewals between two requests for all external jobs, which reveal jobs staged by other hosts."""

SITE_S: Final = 5.0
"""Timeout of the request for the site's settings, seconds: it is repeated every RENEW_S."""

SHORTEN_MAX: Final = 60
"""Maximum number of socket requests that are read or answered at a time."""


class BridgeRefused(Exception):
    """Bridge that must not run; the message has the cause and the remedy."""


def cluster_token(state: Path) -> str:
    """Return the token that identifies this Slurm, kept in its state directory, which all its hosts share.

    Raises:
        OSError: The state directory cannot be read or written.
    """
    path = state / "forebay.cluster"
    with contextlib.suppress(FileExistsError):
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        _write_token(beside, secrets.token_hex(16))
        try:
            os.link(beside, path)
        finally:
            beside.unlink()
    return path.read_text(encoding="ascii").strip()


def keep_token(state: Path, token: str) -> None:
    """Restore the token if it was removed with the other state: the external jobs still belong to this Slurm."""
    path = state / "forebay.cluster"
    if path.exists():
        return
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write_token(beside, token)
        with contextlib.suppress(FileExistsError):
            os.link(beside, path)
        LOGGER.warning("%s was missing, and has been restored", path)
    except OSError as error:
        LOGGER.debug("%s cannot be restored: %s", path, error)
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def _write_token(beside: Path, token: str) -> None:
    with new_private_file(beside) as file:
        file.write(f"{token}\n".encode("ascii"))


class Bridge:
    """Bridge in its directory."""

    def __init__(
        self,
        leader: Client,
        files: SlurmFiles,
        cluster: str,
        host: str,
        clock: Clock,
        *,
        state: Path | None = None,
        metrics_file: Path | None = None,
        ask: Callable[[], Awaitable[SlurmView | str]] = look,
        ask_owner: Callable[[str], Awaitable[int | str]] = owner_of,
        ask_array: Callable[[str], Awaitable[str | None]] = array_of,
        ask_ended: Callable[[str], Awaitable[bool]] = ended_by_itself,
        on_served: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a bridge; `run` starts it.

        `ask` returns slurmctld's jobs, `ask_owner` the uid of a job's user, `ask_array` the job array of a task,
        `ask_ended` whether a job has ended and was not cancelled.
        `state` is StateSaveLocation, which holds the token `cluster`. Counters are written to `metrics_file`, if given.
        `on_served` is called, perhaps repeatedly, once slurmctld can read the pools.
        """
        self._leader = leader
        self._files = files
        self._cluster = cluster
        self._state = state
        self._host = host
        self._clock = clock
        self._directory = files.directory
        self._fifos = Fifos(files.directory, self._asked)
        self._calls = PluginCalls(
            leader, files, cluster, clock, ask_owner, state=state, ask_array=ask_array, ask_ended=ask_ended
        )
        self._metrics, self._metrics_file = BridgeMetrics(), metrics_file
        self._reconciler = Reconciler(leader, cluster, clock, self._metrics, ask, self._pool_names)
        self._calls.is_stuck = lambda job: job in self._reconciler.stuck
        self._identities = Identities(clock)
        self._under_way: dict[tuple[str, ...], asyncio.Task[Answer]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_ending = False
        """True while the bridge ends: calls get no reply, so that callers repeat them at the next bridge."""
        self._requests = asyncio.Semaphore(SHORTEN_MAX)
        self._said = ""
        self._registered = False
        self._on_served = on_served

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop` is set, and remove all FIFOs, sockets and tasks.

        Raises:
            BridgeRefused: Another bridge runs here, or another Slurm uses this name.
            OSError: A file, FIFO or socket cannot be created.
        """
        with self._locked(), contextlib.ExitStack() as stack:
            self._files.publish()
            stack.callback(self._fifos.stop)
            self._fifos.start()
            async with self._listening():
                renewing = asyncio.create_task(self._renew())
                comparing = asyncio.create_task(self._reconciler.run())
                stopping = asyncio.create_task(stop.wait())
                try:
                    done, _ = await asyncio.wait({renewing, comparing, stopping}, return_when=asyncio.FIRST_COMPLETED)
                    for ended in done - {stopping}:
                        ended.result()
                finally:
                    # First wake waiting callers, which then call the next bridge, as do new callers. No caller must
                    # receive
                    # the reply that its call was superseded.
                    self._is_ending = True
                    await _ended(self._answering)
                    await _ended({renewing, comparing, stopping, *self._under_way.values()})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with closing(open_private_file(self._directory / "lock", os.O_RDWR)) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise BridgeRefused(f"another bridge runs in {self._directory}; stop it first") from None
            yield

    # ---- files

    async def _renew(self) -> None:
        count = 0
        while True:
            asked_s = uptime_s()
            try:
                if not self._registered:
                    await self._register()
                if self._state is not None:
                    keep_token(self._state, self._cluster)
                site = await self._leader.call(operations.SHOW_SCHEDULER_SITE, deadline_s=SITE_S)
                self._calls.site = site
                if count % LIST_EVERY == 0:
                    await self._list()
                # Write the pools after the first list of jobs, so that slurmctld finds the pools together with their
                # content.
                self._files.renew(site, asked_s, self._moment(), await self._users(site))
                if count == 0:
                    self._on_served()
                count += 1
                self._metrics.answered.set(self._clock.now() / MICROSECONDS_PER_SECOND)
                if self._said:
                    LOGGER.info("the leader is reachable again")
                    self._said = ""
            except ApiError as error:
                if str(error) != self._said:
                    LOGGER.warning("files cannot be updated: %s", error)
                    self._said = str(error)
            self._count()
            self._fifos.sweep()
            await asyncio.sleep(max(0.0, RENEW_S - (uptime_s() - asked_s)))

    async def _list(self) -> None:
        """Update the files of all external jobs.

        Raises:
            ApiError: The leader does not answer.
            OSError: A file cannot be written.
        """
        self._files.ask()
        asked_s = uptime_s()
        listed = await self._leader.call(operations.LIST_EXTERNAL_JOBS, live="yes", deadline_s=SITE_S)
        whole = not listed.truncated
        self._files.reconcile(listed.external_jobs, whole=whole)
        made = (await self._leader.call(operations.LIST_PERSISTENT, deadline_s=SITE_S)).buffers
        uids = await self._identities.uids(one.user for one in made)
        sessions = [session_of(external_job) for external_job in listed.external_jobs if is_listed(external_job)]
        unsure: list[str] = []
        for one in made:
            uid = uids.get(one.user)
            if uid is None:
                unsure.append(one.name)  # this host did not resolve its user in time
            elif (session := session_of_persistent(one, uid)) is not None:
                sessions.append(session)
        self._files.list_all(sessions, whole=whole, unsure=unsure)
        for external_job in listed.external_jobs:
            self._calls.remember(external_job, asked_s)

    def _count(self) -> None:
        if self._metrics_file is None:
            return
        self._metrics.waiting.set(len(self._under_way))
        try:
            self._metrics.write(self._metrics_file)
        except OSError as error:
            LOGGER.warning("%s cannot be written: %s", self._metrics_file, error)
            self._metrics_file = None

    async def _register(self) -> None:
        """Register the external jobs' Slurm.

        Raises:
            BridgeRefused: Another Slurm uses this name.
        """
        request = g.RegisterSchedulerRequest(
            command_id=new_command_id(self._clock), cluster=self._cluster, address=self._host
        )
        try:
            await self._leader.call(operations.REGISTER_SCHEDULER, request, deadline_s=SITE_S)
        except ApiError as error:
            if error.status == 403 and error.outcome == "rejected":
                raise BridgeRefused(sentence(error)) from error
            raise
        self._registered = True

    def _pool_names(self) -> frozenset[str] | None:
        """Return the names of Forebay's pools, None until the leader has sent them."""
        site = self._calls.site
        return None if site is None else frozenset(pool.name for pool in site.pools)

    def _moment(self) -> str:
        """Return the local time of day for display."""
        return f"{datetime.datetime.fromtimestamp(self._clock.now() // MICROSECONDS_PER_SECOND):%H:%M}"  # noqa: DTZ006

    async def _users(self, site: g.SchedulerSiteAnswer) -> dict[str, list[int]]:
        """Return the uids of users who are allowed or denied buffers. `setup` checks users unknown to this host."""
        found: dict[str, list[int]] = {}
        for word, names in (("allow", site.allow_users), ("deny", site.deny_users)):
            if not names:
                continue
            known = await self._identities.uids(name for name in names if not name.isdigit())
            numbers = [int(name) if name.isdigit() else known.get(name) for name in names]
            if word == "deny" or None not in numbers:
                found[word] = [number for number in numbers if number is not None]
        return found

    # ---- calls

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        path = self._directory / "socket"
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Never reachable with wider permissions: directory and socket are private to this account.
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        server = await asyncio.start_unix_server(self._answer, sock=listener, limit=REQUEST_BYTES_MAX, backlog=1024)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request: its words, separated by zero bytes, up to the end of the stream."""
        answering = asyncio.current_task()
        assert answering is not None
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            if _peer(writer) not in (0, os.geteuid()):
                return
            async with self._requests:
                async with asyncio.timeout(REQUEST_S):
                    asked = await _read(reader)
                function, words = "", list[str]()
                if asked is None:
                    word, text = "fail", f"the request has more than {REQUEST_BYTES_MAX} bytes"
                else:
                    function, words, (word, text) = await self._settle(asked)
            writer.write(_encoded(word, text))
            await writer.drain()
            # The caller was killed and has closed its end, so nothing can be sent.
            if word not in _NO_ANSWER and not writer.is_closing():
                self._calls.note_reply(function, words, word)
        except (OSError, TimeoutError, asyncio.CancelledError):
            pass  # the caller or the bridge was ended: no other task waits for this one
        finally:
            writer.close()

    async def _settle(self, asked: bytes) -> tuple[str, list[str], Answer]:
        """Return the requested function, its arguments, and its reply or the FIFO of its reply."""
        fields = asked.split(b"\0")
        try:
            words = [field.decode() for field in fields]
        except UnicodeDecodeError:
            return "", [], ("fail", "the request is not UTF-8; write it as UTF-8")
        function, *arguments = words
        if self._is_ending:
            return function, arguments, ("again", "")
        task = self._begin(function, arguments, "")
        await asyncio.wait({task}, timeout=AT_ONCE_S)
        if task.done():
            return function, arguments, _outcome(task)
        if len(self._answering) >= CALLS_MAX:
            return function, arguments, ("again", "")
        name = self._fifos.make()
        self._later(name, task, function, arguments)
        return function, arguments, ("wait", str(self._fifos.calls / name))

    def _asked(self, request: FifoRequest) -> None:
        """Start a call that came through a FIFO. If there are too many calls, the caller gets no reply and retries."""
        if self._is_ending or len(self._answering) >= CALLS_MAX:
            return
        try:
            "".join((*request.words, request.script)).encode()
        except UnicodeEncodeError:
            self._later(request.name, asyncio.create_task(_refused(NO_TEXT)), "", [])
        else:
            task = self._begin(request.function, request.words, request.script)
            self._later(request.name, task, request.function, request.words)

    def _begin(self, function: str, arguments: list[str], script: str) -> asyncio.Task[Answer]:
        """Return the pending task of the same call, or a new task, which ends earlier waiting calls of the job."""
        key = (function, *arguments, script)
        known = self._under_way.get(key)
        if known is not None and not known.done():
            return known
        earlier: list[asyncio.Task[Answer]] = []
        if function not in QUESTIONS and arguments:
            for other, one in self._under_way.items():
                # Keep the stage-in calls of a cancelled job beside its teardown, and let them succeed. Slurm usually
                # kills such a call, but misses some if many jobs are cancelled at once.
                if (function == "teardown" and other[0] in STAGE_IN) or (
                    function in STAGE_IN and other[0] == "teardown"
                ):
                    continue
                if other[1:2] == (arguments[0],) and other[0] not in QUESTIONS:
                    one.cancel(f"a {function} of the same job arrived")
                    earlier.append(one)

        async def perform() -> Answer:
            if earlier:
                await asyncio.wait(earlier)
            began_s = uptime_s()
            word, text = await self._calls.perform(function, arguments, script)
            named = function if function in FUNCTIONS else "unknown"
            self._metrics.calls.labels(named, word).observe(uptime_s() - began_s)
            return word, text

        task = asyncio.create_task(perform())
        self._under_way[key] = task

        def over(done: asyncio.Task[Answer]) -> None:
            if self._under_way.get(key) is done:
                del self._under_way[key]

        task.add_done_callback(over)
        return task

    def _later(self, name: str, task: asyncio.Task[Answer], function: str, words: list[str]) -> None:
        """Deliver a call's reply through a FIFO, unless the caller has ended."""
        # Open in both directions: opening for writing only would block until the reader opens the FIFO.
        descriptor = self._fifos.open_reply(name)
        if descriptor is None:
            return
        answering = asyncio.create_task(self._deliver(task, name, descriptor, function, words))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def _deliver(
        self, task: asyncio.Task[Answer], name: str, descriptor: int, function: str, words: list[str]
    ) -> None:
        try:
            await asyncio.wait({task})
            word, text = _outcome(task)
            os.write(descriptor, _encoded(word, text))
            left_s, look_s = READ_S, LOOK_S
            while left_s > 0 and _unread(descriptor):
                await asyncio.sleep(look_s)
                left_s, look_s = left_s - look_s, min(1.0, 2 * look_s)
            if not _unread(descriptor):
                self._calls.note_reply(function, words, word)
        finally:
            self._fifos.finish_reply(name, descriptor)


_NO_ANSWER: Final = ("wait", "again")
"""First words of replies after which the caller reads a FIFO or repeats the request."""


async def _read(reader: asyncio.StreamReader) -> bytes | None:
    """Return the whole request, or None if it is too long."""
    asked = bytearray()
    while part := await reader.read(64 * 1024):
        asked += part
        if len(asked) > REQUEST_BYTES_MAX:
            return None
    return bytes(asked)


def _peer(writer: asyncio.StreamWriter) -> int:
    """Return the uid of the caller, from the kernel."""
    connection = writer.get_extra_info("socket")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def _encoded(word: str, text: str) -> bytes:
    return f"{word}\n{text}".encode("utf-8", "replace")[:ANSWER_BYTES_MAX]


async def _refused(sentence: str) -> Answer:
    return "fail", sentence


async def _ended(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their ends."""
    tasks = set(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _outcome(task: asyncio.Task[Answer]) -> Answer:
    if task.cancelled():
        return "fail", "a later call for the same job arrived"
    error = task.exception()
    if error is not None:
        LOGGER.error("a call failed", exc_info=error)
        return "fail", "forebay: the bridge failed unexpectedly; see its log"
    return task.result()


def _unread(descriptor: int) -> int:
    """Return the number of bytes in a FIFO."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, b"\0\0\0\0"))[0])


def report_served() -> None:
    """Notify the service manager that this process is ready."""
    tell_manager(READY)

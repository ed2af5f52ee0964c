"""Helper of one machine: checks requests, starts the process that causes the fault, and manages the lease."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import logging
import ssl
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.client import ApiError
from forebay.cluster.config import Config
from forebay.cluster.drills.helper.allowed import fault_of
from forebay.cluster.drills.helper.faults import Fill, ThisMachine
from forebay.cluster.drills.helper.messages import (
    ASKS,
    JSON,
    LEASE_S,
    LINE_BYTES_MAX,
    Ask,
    BeginRequest,
    EndRequest,
    HelperAnswer,
    HelperRefused,
    LookRequest,
    RenewRequest,
)
from forebay.cluster.drills.helper.performer import FaultAssignment
from forebay.cluster.drills.helper.record import UndoRecord
from forebay.cluster.schemas.drills import DrillAnswer
from forebay.cluster.security import Credentials, Identity, IdentityError, Role, certificate_of, certificate_shown
from forebay.cluster.system import Clock, free_bytes
from forebay.cluster.system.eventloop import Acceptor
from forebay.replica.values import MICROSECONDS_PER_SECOND

LOGGER = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 8
"""Maximum number of connections at a time: a drill, operators who plan another, and spares."""

IDLE_S: Final = 10.0
"""Seconds without a request after which a connection is closed."""

BEGIN_S: Final = 20.0
"""Timeout for causing a fault, seconds."""

END_S: Final = 45.0
"""Timeout for undoing a fault, seconds, including the command that restarts a process."""

_MAY: Final = frozenset({Role.OPERATOR, Role.DRILL})

Known = Callable[[int], Awaitable[DrillAnswer]]
"""Queries the cluster for a drill. Raises ApiError."""

Spawn = Callable[..., Awaitable[asyncio.subprocess.Process]]
"""Starts a process, like asyncio.create_subprocess_exec."""


class UnderWay:
    """Running fault and its process."""

    def __init__(self, ask: BeginRequest, who: Identity, process: asyncio.subprocess.Process) -> None:
        self.ask: Final = ask
        self.who: Final = who
        self.until_s = float("inf")
        """Latest possible end of the lease, seconds of the monotonic clock; unknown until the fault is caused."""
        self.process: Final = process
        self.begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """First output line of the process."""
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Reason why the fault is not undone; empty if it is undone."""

    def tell(self, line: str) -> None:
        """Send a line to the process; ignore that the process has ended."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, RuntimeError):  # uvloop's error for a closed pipe
            self.process.stdin.write(f"{line}\n".encode())


class Helper:
    """Helper in its directory."""

    def __init__(
        self,
        config: Config,
        name: str,
        known: Known,
        clock: Clock,
        *,
        credentials: Credentials,
        up: int | None = None,
        spawn: Spawn = asyncio.create_subprocess_exec,
    ) -> None:
        """Create the helper.

        `up` is the descriptor of a pipe to `forebay cluster up`, which restarts killed processes. `spawn` starts the
        process that causes a fault.

        Raises:
            ConfigError: The configuration has no helper of this name.
        """
        self._config = config
        self._me = config.helper(name)
        self._known = known
        self._clock = clock
        self._credentials = credentials
        self._up = up
        self._spawn = spawn
        self._directory: Path = config.drill.directory / name
        self._under_way: UnderWay | None = None
        self._watching: asyncio.Task[None] | None = None
        self._beginning = asyncio.Lock()
        self._done: set[int] = set()
        """Drills whose fault was caused on this machine; each drill causes at most one fault."""
        self._connections = 0

    def renew(self, config: Config) -> None:
        """Apply a new configuration, except for the location of the undo record."""
        self._config = config

    async def run(self, stop: asyncio.Event) -> None:
        """Undo the faults of an earlier run, serve until `stop` is set, and undo running faults.

        Raises:
            OSError: The address or the undo record cannot be used.
            ValueError: The undo record is unreadable.
            HelperRefused: A fault of an earlier run cannot be undone.
        """
        left = await asyncio.to_thread(self._settle)
        if left:
            LOGGER.warning("%s", left)
        acceptor = Acceptor(self._protocol, self._me.address, self._tls)
        await acceptor.start()
        LOGGER.info("helper %s: %s, allowed: %s", self._me.name, self._me.address, ", ".join(self._config.drill.allow))
        try:
            await stop.wait()
        finally:
            await acceptor.stop()
            if self._under_way is not None:
                self._under_way.tell("end")
            if self._watching is not None:
                await asyncio.wait((self._watching,), timeout=END_S)

    def _settle(self) -> str:
        """Undo a leftover fault and return its description; first wait for a process that may be undoing it."""
        record = UndoRecord(self._directory, wait=True)
        try:
            undo = record.settle(ThisMachine(self._up))
        finally:
            record.close()
        return f"the fault of drill {undo.drill} on {undo.target} is undone" if undo is not None else ""

    # ---- connections

    def _tls(self) -> ssl.SSLContext:
        self._credentials.refresh()
        return self._credentials.server_context()

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=LINE_BYTES_MAX), self._serve)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            who = self._admitted(writer)
            while True:
                async with asyncio.timeout(IDLE_S):
                    line = await reader.readuntil(b"\n")
                writer.write(JSON.encode(await self._answered(line, who)) + b"\n")
                await writer.drain()
        except HelperRefused as error:
            writer.write(JSON.encode(HelperAnswer(done=False, sentence=error.sentence, remedy=error.remedy)) + b"\n")
        except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError) as error:
            LOGGER.debug("a connection ended: %s", error)
        finally:
            self._connections -= 1
            writer.close()

    def _admitted(self, writer: asyncio.StreamWriter) -> Identity:
        """Return the peer's identity.

        Raises:
            HelperRefused: The peer may not run drills.
        """
        try:
            shown = certificate_shown(writer.transport, self._config.cluster.id)
        except IdentityError as error:
            raise HelperRefused(str(error), "use a certificate of this cluster") from error
        if shown.identity.role not in _MAY:
            allowed = ", ".join(sorted(_MAY))
            raise HelperRefused(
                f"{shown.identity} may not use a helper", f"use a certificate with one of the roles {allowed}"
            )
        if self._connections > CONNECTIONS_MAX:
            raise HelperRefused(f"this helper has {CONNECTIONS_MAX} other connections", "try again in a moment")
        return shown.identity

    async def _answered(self, line: bytes, who: Identity) -> HelperAnswer:
        try:
            ask = ASKS.decode(line)
        except msgspec.MsgspecError as error:
            return HelperAnswer(
                done=False,
                sentence=f"the request is not valid: {error}",
                remedy="use the same release on both machines",
            )
        try:
            return await self._do(ask, who)
        except HelperRefused as error:
            return HelperAnswer(done=False, sentence=error.sentence, remedy=error.remedy)
        except OSError as error:
            return HelperAnswer(
                done=False,
                sentence=f"an operation failed on the machine of helper {self._me.name}: {error}",
                remedy="see its log",
            )

    async def _do(self, ask: Ask, who: Identity) -> HelperAnswer:
        match ask:
            case LookRequest():
                return await self._look(ask)
            case BeginRequest():
                async with self._beginning:
                    return await self._begin(ask, who)
            case RenewRequest():
                return self._renew(self._mine(ask.drill, who))
            case EndRequest():
                return await self._end(self._mine(ask.drill, who))

    def _mine(self, drill: int, who: Identity) -> UnderWay:
        one = self._under_way
        if one is None or one.ask.drill != drill or one.who != who:
            raise HelperRefused(
                f"drill {drill} of {who} is not under way on this machine", "its lease has ended, or it was undone"
            )
        return one

    # ---- requests

    async def _look(self, ask: LookRequest) -> HelperAnswer:
        self._check_hours()
        if self._under_way is not None:
            raise HelperRefused(f"drill {self._under_way.ask.drill} is under way on this machine", "wait for its end")
        fault = await asyncio.to_thread(fault_of, self._config, self._me, ask.scenario, ask.target, 1)
        until = certificate_of(self._config.tls.certificates, self._me.name).valid_until
        figures = {"now_us": int(self._clock.now()), "certificate_until_us": int(until)}
        if isinstance(fault, Fill):
            figures["free_bytes"] = free_bytes(Path(fault.directory))
        starts = "up" if self._up is not None else ("command" if self._config.drill.start else "")
        return HelperAnswer(done=True, figures=figures, starts=starts)

    def _check_hours(self) -> None:
        # A site's hours are local time, not UTC.
        here = datetime.datetime.fromtimestamp(self._clock.now() / MICROSECONDS_PER_SECOND)  # noqa: DTZ006
        hours = self._config.drill.forbids(here.weekday(), here.hour * 60 + here.minute)
        if hours:
            raise HelperRefused(
                f"helper {self._me.name} permits no drills during {hours} (`never` in [drill])",
                "try again outside of these hours",
            )

    async def _begin(self, ask: BeginRequest, who: Identity) -> HelperAnswer:
        self._check_hours()
        if self._under_way is not None:
            raise HelperRefused(f"drill {self._under_way.ask.drill} is under way on this machine", "wait for its end")
        if ask.drill in self._done:
            raise HelperRefused(f"drill {ask.drill} has already run on this machine", "start another drill")
        fault = await asyncio.to_thread(fault_of, self._config, self._me, ask.scenario, ask.target, ask.drill)
        await self._check_under_way(ask, who)
        up = () if self._up is None else (self._up,)
        process = await self._spawn(
            *(sys.executable, "-P", "-m", "forebay.cluster.drills.helper.performer"),
            *("--directory", str(self._directory)),
            *(("--up", str(self._up)) if self._up is not None else ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            pass_fds=up,
        )
        one = self._under_way = UnderWay(ask, who, process)
        self._done.add(ask.drill)
        self._watching = asyncio.get_running_loop().create_task(self._watch(one))
        one.tell(JSON.encode(FaultAssignment(ask.drill, ask.target, fault, LEASE_S, ask.duration_s)).decode())
        try:
            async with asyncio.timeout(BEGIN_S):
                said = await asyncio.shield(one.begun)
        except TimeoutError:
            one.tell("end")
            raise HelperRefused(f"the fault was not caused within {BEGIN_S:g} s", "see the log of the helper") from None
        word, _, rest = said.partition(" ")
        if word != "done":
            sentence, _, remedy = rest.rpartition("; ")
            raise HelperRefused(
                sentence or "the process that causes the fault has exited", remedy or "see the log of the helper"
            )
        one.until_s = self._clock.monotonic_s() + ask.duration_s
        LOGGER.warning("drill %d: %s of %s, by %s", ask.drill, ask.scenario, ask.target, who)
        return HelperAnswer(done=True)

    async def _check_under_way(self, ask: BeginRequest, who: Identity) -> None:
        """Check that this drill is running in the cluster.

        Raises:
            HelperRefused: The drill is not running, or the cluster does not answer.
        """
        try:
            drill = await self._known(ask.drill)
        except ApiError as error:
            raise HelperRefused(
                f"the cluster cannot confirm that drill {ask.drill} is under way: {error}",
                "see `forebay cluster members`",
            ) from error
        if drill.verdict != "under way" or drill.abort:
            raise HelperRefused(
                f"drill {ask.drill} is {drill.abort and 'being aborted' or drill.verdict}", "start another drill"
            )
        if drill.by != who.name:
            raise HelperRefused(
                f"drill {ask.drill} was started by {drill.by}, not by {who}", f"continue it as {drill.by}"
            )
        said, known = (ask.plan, ask.scenario, ask.target), (drill.plan, drill.scenario, drill.target)
        if said != known:
            what = " ".join(said)
            raise HelperRefused(
                f"drill {ask.drill} is {' '.join(known)}, not {what}", "plan it again, and confirm the new plan"
            )
        if self._config.drill.require_second and not drill.second:
            remedy = f"let another operator run: forebay drill confirm {ask.drill}"
            raise HelperRefused(
                f"helper {self._me.name} requires confirmation by a second operator (require_second)", remedy
            )

    def _renew(self, one: UnderWay) -> HelperAnswer:
        now_s = self._clock.monotonic_s()
        until_s = min(now_s + LEASE_S, one.until_s)
        one.tell(f"lease {until_s!r}")
        return HelperAnswer(done=True, figures={"left_us": max(0, round((until_s - now_s) * MICROSECONDS_PER_SECOND))})

    async def _end(self, one: UnderWay) -> HelperAnswer:
        one.tell("end")
        try:
            async with asyncio.timeout(END_S):
                why = await asyncio.shield(one.over)
        except TimeoutError:
            why = f"the fault is not undone after {END_S:g} s"
        if why:
            raise HelperRefused(why, f"see the log of helper {self._me.name}")
        return HelperAnswer(done=True)

    async def _watch(self, one: UnderWay) -> None:
        """Follow the process to its end, and undo leftovers."""
        assert one.process.stdout is not None
        said, why = "", "the helper has ended"
        try:
            with contextlib.suppress(OSError, ValueError):
                while line := (await one.process.stdout.readline()).decode("utf-8", "replace").strip():
                    said = line
                    if not one.begun.done():
                        one.begun.set_result(said)
            await one.process.wait()
            why = ""
            # The record shows what remains to be undone, however the process ended.
            try:
                left = await asyncio.to_thread(self._settle)
                if left:
                    LOGGER.warning("%s, here", left)
            except (OSError, ValueError, HelperRefused) as error:
                why = f"the fault is not undone: {error}"
                LOGGER.error("drill %d: %s", one.ask.drill, why)
            LOGGER.warning("drill %d has ended on this machine", one.ask.drill)
        finally:
            self._under_way = None
            for future, value in ((one.begun, said), (one.over, why)):
                if not future.done():
                    future.set_result(value)

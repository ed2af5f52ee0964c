"""Three replicas running on altered data in one process, over TLS: detectors and delays.

Periods are those of the product, or short ones: what is found stays the same.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from forebay.cluster.api.history_service import tree
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import TimingConfig
from forebay.cluster.consensus import HistoryElsewhere, KeyReplaced, LostDurableState
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import PoolRequest
from forebay.cluster.serve import Replica, StartRefused
from forebay.cluster.server import divergence, history_fetch
from forebay.cluster.server.divergence import StateDiverged
from forebay.cluster.server.tlog import LedgerAltered, publish
from forebay.cluster.system.clock import SystemClock
from forebay.wal import BrokenInvariant
from tests.cluster.harness import PATIENCE_S
from tests.faults.manipulations.detectors import Finder, Then
from tests.faults.manipulations.site import NAMES, VICTIM, Case

POLL_S: Final = 0.02
CHANGE_S: Final = 0.3
"""Between two changes by an operator, seconds: while nothing changes nothing is signed."""

SHORT: Final = (
    (publish, "PERIOD_S", 0.5),
    (publish, "POLL_S", 0.05),
    (publish, "ASK_AGAIN_S", 0.1),
    (divergence, "COMPARE_PERIOD_S", 0.05),
    (history_fetch, "POLL_PERIOD_S", 0.1),
    (history_fetch, "PAUSE_S", 0.001),
    (history_fetch, "SCRUB_PAUSE_S", 0.001),
    (tree, "CHECK_PAUSE_S", 0.001),
)


class Seen(NamedTuple):
    """Who found it first, what was said, after how many seconds, and what became of the replica."""

    finder: Finder
    sentence: str
    seconds: float
    then: Then
    stopped: tuple[str, ...]


class Running:
    """The replicas of a case, and who has stopped itself."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.config = case.config
        self.replicas: dict[str, Replica] = {}
        self.stopped: dict[str, BaseException] = {}

    def fail(self, name: str) -> Callable[[BaseException], NoReturn]:
        def fail(error: BaseException) -> NoReturn:
            self.stopped.setdefault(name, error)
            raise asyncio.CancelledError

        return fail

    async def start(self, name: str) -> None:
        """Start a replica; StartRefused where it does not."""
        self.replicas[name] = Replica(self.config, name, clock=SystemClock(), fail=self.fail(name))
        await self.replicas[name].start()

    async def stop(self, name: str) -> None:
        """Stop a replica; nothing is signed for it."""
        replica = self.replicas.pop(name)
        replica.publisher.publish = _nothing  # type: ignore[method-assign]
        await replica.stop()

    async def change(self) -> None:
        """Have an operator change a pool again and again, as long as somebody leads."""
        number = 0
        async with Client.from_config(self.case.config, "operator") as client:
            while True:
                number += 1
                quantity = f"{96 + number % 8}MiB"
                wanted = PoolRequest(command_id=client.new_command_id(), quantity=quantity, granularity="1MiB")
                with suppress(ApiError):
                    await client.call(ops.SET_POOL, wanted, name="another")
                await asyncio.sleep(CHANGE_S)

    def found(self) -> tuple[Finder, str] | None:
        """Return who has found something, and what is said."""
        for error in self.stopped.values():
            return _finder_of(error), str(error)
        for name in self.case.altered:
            replica = self.replicas.get(name)
            if replica is not None and replica.publisher.doubt:
                return Finder.SIGNING, replica.publisher.doubt
            if replica is not None and replica.controller.scrubbed.mended:
                return Finder.SCRUB, f"{replica.controller.scrubbed.mended} entries were repaired"
            if replica is not None and replica.controller.scrubbed.damaged:
                return Finder.SCRUB, f"entries {replica.controller.scrubbed.damaged} are damaged"
        return None


async def _nothing(*, whole: bool) -> bool:
    """Publish nothing, as a process that has ended."""
    return whole


def _finder_of(error: BaseException) -> Finder:
    match error:
        case StateDiverged():
            return Finder.LEDGERS if "the ledger of" in str(error) else Finder.STATES
        case LedgerAltered():
            return Finder.SIGNING
        case HistoryElsewhere():
            return Finder.HISTORY
        case KeyReplaced():
            return Finder.KEYS
        case LostDurableState():
            return Finder.LEADER
        case BrokenInvariant() if str(error).endswith("is committed"):
            return Finder.COMMITTED
    raise AssertionError(f"a replica stopped for something else: {error!r}") from error


@contextmanager
def short_periods() -> Iterator[None]:
    """Have everybody look more often than in production."""
    before = [(module, name, getattr(module, name)) for module, name, _ in SHORT]
    for module, name, value in SHORT:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


@asynccontextmanager
async def running(case: Case) -> AsyncIterator[Running]:
    """Have replicas run, and an operator who changes something now and then."""
    them = Running(case)
    changes = asyncio.create_task(them.change())
    try:
        yield them
    finally:
        changes.cancel()
        with suppress(asyncio.CancelledError):
            await changes
        for name in list(them.replicas):
            await them.stop(name)


async def live(case: Case, *, patience_s: float = PATIENCE_S) -> Seen | None:
    """Start all three on what was altered while none ran; return who finds it first, None where nobody does."""
    began_s = time.monotonic()
    async with running(case) as them:
        gaps = {}
        for name in NAMES:
            try:
                await them.start(name)
            except StartRefused as error:
                return Seen(Finder.START, str(error), time.monotonic() - began_s, Then.REFUSED, (name,))
            gaps[name] = them.replicas[name].controller.ledger.gaps()
        return await _awaited(them, began_s, patience_s, gaps)


async def live_under_a_leader(case: Case, do: Callable[[Case], None], *, patience_s: float = PATIENCE_S) -> Seen | None:
    """Alter the victim while it alone is down, and the leader that it has acknowledged to leads on."""
    async with running(case) as them:
        # On a busy machine three replicas in one process may be silent for a second.
        them.config = msgspec.structs.replace(case.config, timing=TimingConfig(election_min_ms=3_000))
        for name in NAMES:
            await them.start(name)
        async with asyncio.timeout(patience_s):
            while not (leader := next((one for one in them.replicas.values() if one.controller.leads), None)):
                await asyncio.sleep(POLL_S)
            if leader.controller.name == VICTIM:
                await leader.controller.membership.hand_over()
            while not any(one.controller.leads for name, one in them.replicas.items() if name != VICTIM):
                await asyncio.sleep(POLL_S)
            victim = them.replicas[VICTIM].controller
            index = victim.applied_index + 2
            while victim.applied_index < index:
                await asyncio.sleep(POLL_S)
        await them.stop(VICTIM)
        do(case)
        began_s = time.monotonic()
        try:
            await them.start(VICTIM)
        except StartRefused as error:
            return Seen(Finder.START, str(error), time.monotonic() - began_s, Then.REFUSED, (VICTIM,))
        return await _awaited(them, began_s, patience_s, {})


async def _awaited(them: Running, began_s: float, patience_s: float, gaps: dict[str, Any]) -> Seen | None:
    """Wait until somebody has found it."""
    found: tuple[Finder, str] | None = None
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            while found is None:
                await asyncio.sleep(POLL_S)
                found = them.found()
                for name, lacked in gaps.items():
                    if lacked and not them.replicas[name].controller.ledger.gaps():
                        found = Finder.BACKFILL, "entries that were missing are here"
    if found is None:
        return None
    stopped = tuple(sorted(them.stopped))
    replicas = them.replicas.values()
    then = Then.NAMED if any(one.controller.scrubbed.damaged for one in replicas) else Then.MENDED
    if any(one.publisher.doubt for one in replicas):
        then = Then.LOGGED
    if stopped:
        then = Then.STOPS if set(stopped) <= set(them.case.altered) else Then.OTHERS_STOP
    return Seen(*found, time.monotonic() - began_s, then, stopped)

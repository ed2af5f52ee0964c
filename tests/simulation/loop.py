"""Virtual time: one heap of events for the world, and one small asyncio loop for each replica, all in one thread.

A replica's code runs on its own loop, so that a crash is to forget the loop, and a pause is not to run it. Nothing here
reads a clock. What takes time on a replica (a sync) makes its loop late: it is not run again before that time is over.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any

from forebay.replica.values.units import MICROSECONDS_PER_SECOND, Instant

EPOCH_US = 1_800_000_000_000_000
"""The wall clock when a simulation begins, microseconds since 1970."""


STANDING_EVENTS_MAX = 20_000
"""Events at one moment, count: far more than a whole cluster ever needs."""


class Spinning(Exception):
    """Time does not go on: a replica asks for its next step at once, again and again."""


class Died(BaseException):
    """The replica whose code is running is no more: raised through it, caught by the world. Never by the replica."""


class Timeline:
    """The world's time and what will happen at which time, in one order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()
        self._standing = 0
        """Events since time last moved."""
        self.stopped = False
        """Nothing more is to happen."""

    def at(self, when_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have `action` called at `when_s`, or now if that is past; what is due at one time keeps its order."""
        heapq.heappush(self._heap, (max(when_s, self.now_s), next(self._count), action, arguments))

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        """Have `action` called in `delay_s` seconds."""
        self.at(self.now_s + delay_s, action, *arguments)

    def run(self, duration_s: float, until: Callable[[], bool] | None = None, every_s: float = 0.0) -> bool:
        """Run for `duration_s`, or until `until()` is true or `stopped` is set; return whether `until()` became true.

        It is asked before each event, or with `every_s` not more often than that.
        """
        end_s = self.now_s + duration_s
        heap = self._heap
        asked_s = self.now_s
        while heap and heap[0][0] <= end_s:
            if self.stopped:
                return False
            if until is not None and self.now_s >= asked_s:
                asked_s = self.now_s + every_s
                if until():
                    return True
            when_s, _, action, arguments = heapq.heappop(heap)
            if when_s > self.now_s:
                self._standing = 0
            self._standing += 1
            if self._standing > STANDING_EVENTS_MAX:
                raise Spinning(f"{STANDING_EVENTS_MAX} events at {self.now_s} s: something goes round without end")
            self.now_s = when_s
            action(*arguments)
        if until is not None and not self.stopped and until():
            return True
        self.now_s = max(self.now_s, end_s)
        return False


class VirtualLoop(asyncio.AbstractEventLoop):
    """The loop of one replica. Only what the replica's code uses is here; anything else raises NotImplementedError."""

    def __init__(self, timeline: Timeline, on_fault: Callable[[BaseException], None]) -> None:
        self._timeline = timeline
        self._on_fault = on_fault
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._wanted = False
        self._closed = False
        self.free_s = 0.0
        """The loop does not run before this time: it works, or its process is stopped."""
        self.worked_s = 0.0
        """What the code that runs now has taken so far."""
        self.after_step: Callable[[], None] = lambda: None

    # What the world does

    def kill(self) -> None:
        """Stop this loop for ever."""
        self._closed = True
        self._ready.clear()
        for task in list(self._tasks):
            # What waits will wait for ever; closed, it says nothing about it when it is collected.
            with suppress(ValueError, RuntimeError):
                task.get_coro().close()
        self._tasks.clear()

    def hold(self, until_s: float) -> None:
        """Stop the process until `until_s` (SIGSTOP); what arrives meanwhile waits."""
        self.free_s = max(self.free_s, until_s)

    def work(self, duration_s: float) -> None:
        """The code that runs now takes this long."""
        self.worked_s += duration_s

    def call_now(self, action: Callable[..., object], *arguments: Any) -> None:
        """Run something as part of this replica's code, from outside, at once; it must not be late or stopped."""
        asyncio._set_running_loop(self)
        try:
            action(*arguments)
        finally:
            asyncio._set_running_loop(None)
            self._rest()

    def _want(self) -> None:
        if not self._wanted:
            self._wanted = True
            self._timeline.at(max(self._timeline.now_s, self.free_s), self._run)

    def _run(self) -> None:
        self._wanted = False
        if self._closed:
            return
        if self._timeline.now_s < self.free_s:
            self._want()
            return
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                if self._closed:
                    return
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)
            self._rest()
        if not self._closed:
            self.after_step()
        if self._ready and not self._closed:
            self._want()

    def _rest(self) -> None:
        self.free_s = max(self.free_s, self._timeline.now_s + self.worked_s)
        self.worked_s = 0.0

    def _timer(self, handle: asyncio.TimerHandle) -> None:
        if not self._closed and not handle.cancelled():
            self._ready.append(handle)
            self._want()

    # What asyncio asks

    def time(self) -> float:
        return self._timeline.now_s + self.worked_s

    def call_soon(  # type: ignore[override]  # asyncio checks the arguments against the callback; here nothing does
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self._closed:
            self._ready.append(handle)
            self._want()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # there is one thread

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self._closed:
            self._timeline.at(when, self._timer, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is passed over when its time comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))
        return task

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return self._closed

    def is_running(self) -> bool:
        return asyncio._get_running_loop() is self

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not self._closed:
            self._on_fault(error)


class SimClock:
    """The clocks of one replica: the monotonic one is the world's, the wall clock is off by what somebody did to it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.loop: VirtualLoop | None = None
        self.offset_us = 0
        self.farthest_us = 0
        """The largest offset there ever was: the clock never showed more than this."""
        self.worst_us = 0
        """By how much it was ever off."""

    def now(self) -> Instant:
        return Instant(EPOCH_US + self.offset_us + round(self.monotonic_s() * MICROSECONDS_PER_SECOND))

    def set(self, offset_us: int) -> None:
        """Let somebody set the wall clock."""
        self.offset_us, self.farthest_us = offset_us, max(self.farthest_us, offset_us)
        self.worst_us = max(self.worst_us, abs(offset_us))

    def monotonic_s(self) -> float:
        return self._timeline.now_s + (0.0 if self.loop is None else self.loop.worked_s)

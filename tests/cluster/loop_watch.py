"""How much the event loop does in one turn: lines of Python that are run and bytes that are taken, not time.

A line counts each time that it is run, so what walks over all jobs counts a few for each of them, on a slow machine as
on a fast one. What C does in one call (sorting, encoding, copying) runs no lines, but takes memory for what it makes.
"""

from __future__ import annotations

import asyncio
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple


class Most(NamedTuple):
    """The most that one callback, or one turn of the loop, did."""

    lines: int = 0
    size_bytes: int = 0

    def or_more(self, lines: int, size_bytes: int) -> Most:
        return Most(max(self.lines, lines), max(self.size_bytes, size_bytes))


class LoopWatch:
    """Counts what an asyncio loop does while it is `watching`."""

    def __init__(self) -> None:
        self.callback = Most()
        """The most that one callback did."""
        self.turn = Most()
        """The most that all callbacks of one turn did together."""
        self._in_turn = [0, 0]

    def reset(self) -> None:
        self.callback = self.turn = Most()

    @contextmanager
    def watching(self) -> Iterator[LoopWatch]:
        handle, loop = asyncio.events.Handle, asyncio.base_events.BaseEventLoop
        run, turn = handle._run, loop._run_once  # type: ignore[attr-defined]
        watch, lines = self, 0

        # It is called for each line of Python: a variable costs half of what an attribute and a method do.
        def trace(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal lines
            if event == "line":
                lines += 1
            return trace

        def counted(self: Any) -> None:
            nonlocal lines
            lines = 0
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            sys.settrace(trace)
            try:
                run(self)
            finally:
                sys.settrace(None)
                taken = tracemalloc.get_traced_memory()[1] - before
                watch.callback = watch.callback.or_more(lines, taken)
                watch._in_turn[0] += lines
                watch._in_turn[1] += taken

        def bounded(self: Any) -> None:
            watch._in_turn = [0, 0]
            turn(self)
            watch.turn = watch.turn.or_more(*watch._in_turn)

        handle._run = counted  # type: ignore[method-assign]
        loop._run_once = bounded  # type: ignore[attr-defined]
        tracemalloc.start()
        try:
            yield self
        finally:
            tracemalloc.stop()
            handle._run = run  # type: ignore[method-assign]
            loop._run_once = turn  # type: ignore[attr-defined]

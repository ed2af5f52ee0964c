"""The client for callers that are not asynchronous, such as the CLI: one event loop for one command."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run `coroutine` to its end in a loop of its own and return its result.

    KeyboardInterrupt cancels it first, so that connections are closed. RuntimeError in a running loop: await it there.
    """
    with asyncio.Runner() as runner:
        return runner.run(coroutine)

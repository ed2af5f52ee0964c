"""Asking a provider from a replica: in worker processes, never in the loop, a bounded number at once.

A worker takes one question at a time and is kept for the next, so that a question costs about ten milliseconds and not
the start of an interpreter. Whatever goes wrong with a worker, it is ended and its question fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Final

import msgspec

from cluster.providers.interface import OperationError
from cluster.providers.limits import ANSWER_BYTES_MAX, CALLS_IDLE_MAX, CALLS_MAX, CALLS_WAITING_MAX, REQUEST_BYTES_MAX
from cluster.providers.worker import LENGTH_BYTES, CallAnswer, CallRequest

logger = logging.getLogger(__name__)

WORKER_SLACK_S: Final = 10.0
"""What a worker may take beside the time of its call, seconds: its start, and ending what does not want to end."""

WORKER_GRACE_S: Final = 5.0
"""Seconds that a worker has between SIGTERM and SIGKILL: it ends its call and removes a directory."""

_TREE: Final = str(Path(__file__).resolve().parents[2])
"""What the package was imported from: workers are started from there too."""

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", "PYTHONHASHSEED")


class TooManyCalls(Exception):
    """As many questions as may wait are waiting; nothing was asked."""


class Calls:
    """The workers of one replica."""

    def __init__(self) -> None:
        """Begin with none."""
        self._turn = asyncio.Semaphore(CALLS_MAX)
        self._waiting = 0
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._closed = False

    async def ask(self, request: CallRequest, timeout_s: float) -> CallAnswer:
        """Return the provider's answer; OperationError with what failed, TooManyCalls if nothing could be asked.

        `timeout_s` is the time of the call itself, which its worker keeps.
        """
        data = msgspec.json.encode(request)
        if len(data) > REQUEST_BYTES_MAX:
            raise OperationError(
                request.operation, f"the job's script and options have more than {REQUEST_BYTES_MAX} bytes"
            )
        if self._waiting >= CALLS_WAITING_MAX or self._closed:
            raise TooManyCalls
        self._waiting += 1
        try:
            await self._turn.acquire()
        finally:
            self._waiting -= 1
        try:
            answer = await self._asked(request, data, timeout_s + WORKER_SLACK_S)
        finally:
            self._turn.release()
        if answer.failed:
            raise OperationError(answer.operation, answer.failed)
        return answer

    async def _asked(self, request: CallRequest, data: bytes, timeout_s: float) -> CallAnswer:
        worker: asyncio.subprocess.Process | None = None
        fine = False
        try:
            async with asyncio.timeout(timeout_s):
                worker = self._idle.pop() if self._idle else await self._start()
                assert worker.stdin is not None and worker.stdout is not None
                worker.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
                await worker.stdin.drain()
                length = int.from_bytes(await worker.stdout.readexactly(LENGTH_BYTES), "big")
                if length > ANSWER_BYTES_MAX:
                    raise ValueError(f"an answer of {length} bytes")
                answer = msgspec.json.decode(await worker.stdout.readexactly(length), type=CallAnswer)
            fine = True
            return answer
        except TimeoutError:
            raise OperationError(request.operation, "the worker did not answer in time") from None
        except (OSError, EOFError, ValueError, msgspec.DecodeError) as error:
            raise OperationError(request.operation, f"the worker failed: {error}") from error
        finally:
            if worker is not None:
                if fine and len(self._idle) < CALLS_IDLE_MAX and not self._closed:
                    self._idle.append(worker)
                else:
                    # Shielded: whoever asked may be gone, and the worker has to go all the same.
                    await asyncio.shield(self._end(worker))

    async def _start(self) -> asyncio.subprocess.Process:
        environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | {"PYTHONPATH": _TREE}
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "cluster.providers.worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            cwd="/",
            limit=2 * ANSWER_BYTES_MAX,
        )
        self._all.add(worker)
        return worker

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(worker.wait(), WORKER_GRACE_S)
        except TimeoutError:
            logger.error("a provider's worker does not end and is killed")
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await worker.wait()
        self._all.discard(worker)

    async def close(self) -> None:
        """End every worker, and with them what they ask."""
        self._closed = True
        self._idle.clear()
        await asyncio.gather(*(self._end(worker) for worker in list(self._all)))

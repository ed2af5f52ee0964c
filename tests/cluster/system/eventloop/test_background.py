"""Signals that ask a process to stop."""

import asyncio
import os
import signal

import pytest

from forebay.cluster.system.eventloop.background import stop_on_signals
from tests.cluster.harness import story


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
@story
async def test_sighup_is_ignored_and_sigterm_and_sigint_ask_to_stop(ends: signal.Signals) -> None:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    stop_on_signals(stop)
    try:
        os.kill(os.getpid(), signal.SIGHUP)
        heard = loop.create_future()
        loop.call_later(0, heard.set_result, None)
        await heard
        assert not stop.is_set()
        os.kill(os.getpid(), ends)
        async with asyncio.timeout(60):
            await stop.wait()
    finally:
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

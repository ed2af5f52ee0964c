"""The process that counts what buffers hold, for the agent's watch over what jobs write.

Run as `python -m cluster.agent.worker.usage_counter AGENT` by the agent, whose process id that is. It reads lines of
JSON (`Asked`) and answers each with a line (`Answered`). It counts the buffers that it was asked about in turn, some
milliseconds of each, so that one with many files keeps none of the others waiting.
"""

from __future__ import annotations

import os
import resource
import select
import sys
from collections import deque
from collections.abc import Generator
from typing import Final

import msgspec

from cluster.agent.limits import BUFFER_NICE, DESCRIPTORS
from cluster.agent.worker.buffer_usage import Answered, Asked, Usage, measuring
from cluster.system import SystemClock, die_with_parent, ignore_hangup, write_all

_ASKED: Final = msgspec.json.Decoder(Asked)


class _Count:
    """One buffer that is being counted."""

    def __init__(self, asked: Asked) -> None:
        self._number = asked.number
        self._took_s = 0.0
        self._counting: Generator[None, None, Usage] = measuring(asked.look)
        self._clock = SystemClock()

    def go_on(self) -> Answered | None:
        """Count a slice; return the answer once all is counted."""
        began_s, usage, fault = self._clock.monotonic_s(), Usage(), ""
        try:
            next(self._counting)
            over = False
        except StopIteration as end:
            usage, over = end.value, True
        except FileNotFoundError:
            # The buffer is gone: nothing is in it.
            over = True
        except OSError as error:
            fault, over = str(error), True
        self._took_s += self._clock.monotonic_s() - began_s
        return Answered(self._number, usage, self._took_s, fault) if over else None


def main(agent: int) -> int:
    """Answer until there is nothing more to read; return the exit code."""
    ignore_hangup()
    die_with_parent(agent)
    os.nice(BUFFER_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS if hard < 0 else min(hard, DESCRIPTORS), hard))
    asks, counts, begun, more = sys.stdin.fileno(), deque[_Count](), b"", True
    while more or counts:
        if more and select.select([asks], [], [], 0 if counts else None)[0]:
            data = os.read(asks, 1 << 16)
            more = bool(data)
            *lines, begun = (begun + data).split(b"\n")
            counts.extend(_Count(_ASKED.decode(line)) for line in lines)
        if counts:
            count = counts.popleft()
            answer = count.go_on()
            if answer is None:
                counts.append(count)
            else:
                write_all(sys.stdout.fileno(), msgspec.json.encode(answer) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

"""Process that counts buffer usage for the agent's watch over jobs.

The agent runs it as `python -m cluster.agent.worker.usage_counter AGENT_PID`. It reads JSON lines (`UsageRequest`) and
writes one line (`UsageReply`) for each. Buffers are counted alternately, some milliseconds each, so that a large one
does not delay the others.
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

from forebay.cluster.agent.limits import BUFFER_NICE, DESCRIPTORS
from forebay.cluster.agent.worker.buffer_usage import Usage, UsageReply, UsageRequest, measuring
from forebay.cluster.system import SystemClock, die_with_parent, ignore_hangup, write_all

_ASKED: Final = msgspec.json.Decoder(UsageRequest)


class _Count:
    """Count of one buffer in progress."""

    def __init__(self, asked: UsageRequest) -> None:
        self._number = asked.number
        self._took_s = 0.0
        self._counting: Generator[None, None, Usage] = measuring(asked.look)
        self._clock = SystemClock()

    def go_on(self) -> UsageReply | None:
        """Count a slice; return the reply when the count is complete."""
        began_s, usage, fault = self._clock.monotonic_s(), Usage(), ""
        try:
            next(self._counting)
            over = False
        except StopIteration as end:
            usage, over = end.value, True
        except FileNotFoundError:
            # A deleted buffer is empty.
            over = True
        except OSError as error:
            fault, over = str(error), True
        self._took_s += self._clock.monotonic_s() - began_s
        return UsageReply(self._number, usage, self._took_s, fault) if over else None


def main(agent: int) -> int:
    """Serve requests until standard input closes; return the exit code."""
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

"""The process that counts what buffers hold, one after the other, for the agent's watch over what jobs write.

Run as `python -m cluster.agent.worker.usage_counter AGENT` by the agent, whose process id that is. It reads a line of
JSON (`Look`) at a time and answers with a line (`Usage`)."""

from __future__ import annotations

import os
import resource
import sys
from typing import Final

import msgspec

from cluster.agent.limits import BUFFER_NICE, DESCRIPTORS
from cluster.agent.worker.buffer_usage import Look, Usage, measure
from cluster.system import die_with_parent, ignore_hangup, write_all

_LOOKS: Final = msgspec.json.Decoder(Look)


def main(agent: int) -> int:
    """Answer until there is nothing more to read; return the exit code."""
    ignore_hangup()
    die_with_parent(agent)
    os.nice(BUFFER_NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS if hard < 0 else min(hard, DESCRIPTORS), hard))
    for line in sys.stdin.buffer:
        try:
            usage = measure(_LOOKS.decode(line))
        except FileNotFoundError:
            # The buffer is gone: nothing is in it.
            usage = Usage()
        write_all(sys.stdout.fileno(), msgspec.json.encode(usage) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))

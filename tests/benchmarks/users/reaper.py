"""A parent for a server under measurement: it adopts what the server's dead children leave, and waits for it.

    python -m tests.benchmarks.users.reaper COMMAND...

So the processor time of everything below is the sum over this process, what it waited for, and what still lives.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(command: list[str]) -> int:
    """Run a command, reap all that ends below, and return the command's status once it has ended."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.execvp(command[0], command)
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) & 0xFF)

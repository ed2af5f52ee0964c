"""Running a program that moves data: found in the standard places, watched, held to the rate, ended whole."""

from __future__ import annotations

import os
import shutil
from typing import Final

from cluster.agent.files import write_all
from cluster.agent.processes import BASE_LANG, BASE_PATH, OPERATION_VARIABLE
from cluster.agent.transfer.backends.interface import Call, Job
from cluster.agent.transfer.errors import TransferFailed
from cluster.agent.transfer.io_counters import LOOK_S, IoWatch
from cluster.agent.transfer.programs import NO_LIMIT_S, ProgramFailed, end_descendants, last_words
from cluster.agent.transfer.state import Desk
from cluster.providers import guard
from cluster.system import become_subreaper

_EXECUTABLE: Final = os.X_OK


def run_program(desk: Desk, backend: str, call: Call, job: Job) -> None:
    """Run it to its end. ProgramFailed has its last words; TransferFailed if it is not there; OSError."""
    program = shutil.which(os.fsdecode(call.argv[0]), _EXECUTABLE, BASE_PATH)
    if program is None:
        raise TransferFailed(
            f"{os.fsdecode(call.argv[0])} is not on this node, or cannot be executed; "
            "install it here, or use another backend"
        )
    become_subreaper()
    told = os.memfd_create("forebay-names", os.MFD_CLOEXEC)
    try:
        write_all(told, call.told)
        os.lseek(told, 0, os.SEEK_SET)
        ran = guard.run(
            lambda returned: _become(program, call, job, told, returned),
            timeout_s=NO_LIMIT_S,
            clock=desk.context.clock,
            keep=(job.source, job.scratch, told),
            look=IoWatch(lambda: desk.advance(steps=1), desk.context.pace).look,
            look_s=LOOK_S,
        )
        left = end_descendants()
    finally:
        os.close(told)
    if ran.code:
        raise ProgramFailed(f"{backend} {guard.how(ran.code)}{last_words(ran)}")
    if left:
        raise ProgramFailed(f"{backend} left processes that cannot be ended: {', '.join(map(str, left[:20]))}")


def _become(program: str, call: Call, job: Job, told: int, returned: int) -> None:
    """In the child: become the program."""
    os.close(returned)
    os.dup2(told, 0)
    os.close(told)
    os.fchdir(job.source)
    # It names its destination by this number.
    os.set_inheritable(job.scratch, True)
    os.umask(0o077)
    environment = {"PATH": BASE_PATH, "LANG": BASE_LANG, "HOME": "/"}
    if OPERATION_VARIABLE in os.environ:
        environment[OPERATION_VARIABLE] = os.environ[OPERATION_VARIABLE]
    os.execve(program, [os.fsencode(word) for word in call.argv], environment)

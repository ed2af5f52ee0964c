"""One operation in its own process: told on standard input, answered on standard output, never outliving its agent.

Run as `python -m cluster.agent.worker` by the agent. What touches a job's files runs as the account that the job has
here."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Final, NoReturn

import msgspec

from cluster.agent import provided
from cluster.agent.accounts import Account, AccountRefused, account_for, become
from cluster.agent.beneath import Identity, PathRefused, identity_of
from cluster.agent.durable import open_directory, write_all
from cluster.agent.leftovers import SWEEP, Recorder, sweep
from cluster.agent.limits import FILE_BYTES_MAX
from cluster.agent.mover import Mover, Throttle, TransferFailed
from cluster.agent.persistent import carry_out
from cluster.agent.places import BUFFERS
from cluster.agent.processes import kill_job
from cluster.agent.progress import SharedCounters
from cluster.agent.removal import RemovalFailed, remove_tree
from cluster.agent.staging import stage_in, stage_out
from cluster.agent.work import Outcome, Work, failure
from cluster.clock import SystemClock
from cluster.processes import die_with_parent, sync_file_system
from replica.commands import OperationDone

EXIT_ENDED = 143
"""Exit code after SIGTERM, as shells give it: there is no result."""


_LASTING: Final = frozenset(
    {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EROFS}
)
"""What the kernel says of a path that is wrong for good."""


class _Ended(BaseException):
    """SIGTERM arrived: unwind, so that temporary files are removed."""


def perform(work: Work) -> Outcome:
    """Do the operation and return its result; what is wrong with it is a result too."""
    try:
        if work.order.provision is not None and work.order.stage != SWEEP:
            return provided.perform(work)
        return _OPERATIONS[work.order.stage](work)
    except (AccountRefused, PathRefused, TransferFailed, RemovalFailed) as error:
        return failure(str(error), final=is_final(error))
    except OSError as error:
        traceback.print_exc()
        return failure(
            f"{work.order.stage} failed: {error.strerror or error}{f' ({error.filename})' if error.filename else ''}"
        )


def is_final(error: BaseException) -> bool:
    """Return whether trying again by itself is of no use: somebody has to put right what is wrong first.

    A full disk, an I/O error or a source that changes may go away; a source that does not exist, or may not be read, or
    needs more than the buffer has, does not.
    """
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if isinstance(cause, OSError):
        return cause.errno in _LASTING
    return type(cause) in (AccountRefused, PathRefused, TransferFailed)


def _stage_in(work: Work) -> Outcome:
    failed = carry_out(work)
    if failed is not None:
        return failed
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    identity = identity_of(home)
    buffers = open_directory(BUFFERS, dir_fd=home)
    name = str(work.order.job)
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=buffers)
    buffer = open_directory(name, dir_fd=buffers)
    os.fchmod(buffer, 0o700)
    if account.switch:
        os.fchown(buffer, account.uid, account.gid)
    os.fsync(buffers)
    _become(account, work, home, buffers)
    return stage_in(work.order, buffer, _mover(work, identity, limit_bytes=work.order.capacity_bytes), identity)


def _stage_out(work: Work) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    identity = identity_of(home)
    buffers = open_directory(BUFFERS, dir_fd=home)
    try:
        buffer = open_directory(str(work.order.job), dir_fd=buffers)
    except FileNotFoundError:
        return failure(f"the buffer of job {work.order.job} is not on this node; nothing can be staged out")
    _become(account, work, home, buffers)
    return stage_out(work.order, buffer, _mover(work, identity, recorded=True), identity)


def _sweep(work: Work) -> Outcome:
    """Remove what a killed stage-out left, as the user whose it is."""
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    identity = identity_of(home)
    _become(account, work, home)
    return OperationDone(files=sweep(work.order.job, work.storage_id, work.directory, work.order.roots, identity))


def _become(account: Account, work: Work, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    become(account)
    # Becoming another user clears it.
    die_with_parent(work.agent)


def _mover(work: Work, home: Identity, *, limit_bytes: int = 0, recorded: bool = False) -> Mover:
    return Mover(
        work.order.job,
        SharedCounters(work.progress),
        Throttle(work.copy_rate_bytes_s, SystemClock()),
        home=home,
        storage_id=work.storage_id,
        limit_bytes=limit_bytes,
        on_directory=Recorder(work.leftovers).enter if recorded and work.leftovers >= 0 else None,
    )


def _post_run(work: Work) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    left = kill_job(_marker(work), account.uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    buffers = open_directory(os.path.join(work.home, BUFFERS))
    with contextlib.suppress(FileNotFoundError):
        sync_file_system(open_directory(str(work.order.job), dir_fd=buffers))
    return OperationDone()


def _teardown(work: Work) -> Outcome:
    """Remove the buffer as the agent itself.

    By descriptors and never through a link, so it does not matter whose the files are.
    """
    buffers = open_directory(os.path.join(work.home, BUFFERS))
    name = str(work.order.job)
    uid = _owner(work, buffers, name)
    left = [] if uid is None else kill_job(_marker(work), uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    remove_tree(buffers, name, shown=f"the buffer of job {work.order.job}")
    return carry_out(work) or OperationDone()


def _owner(work: Work, buffers: int, name: str) -> int | None:
    """Return whose processes to look for: the account may have been removed since, the buffer still knows its owner."""
    try:
        return account_for(work.accounts, work.order.user).uid
    except AccountRefused:
        with contextlib.suppress(FileNotFoundError):
            owner = os.stat(name, dir_fd=buffers, follow_symlinks=False).st_uid
            return owner or None
        return None


def _marker(work: Work) -> str:
    return f"{work.storage_id}.{work.order.job}"


_OPERATIONS = {
    "stage_in": _stage_in,
    "stage_out": _stage_out,
    "post_run": _post_run,
    "teardown": _teardown,
    SWEEP: _sweep,
}


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    # Once is enough: a second one must not interrupt the cleaning up.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Ended


def main() -> int:
    """Read the work, do it, write the result; return the exit code."""
    try:
        signal.signal(signal.SIGTERM, _end)
        # Ctrl-C in a terminal is for the agent, which ends its workers itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        work = msgspec.json.decode(sys.stdin.buffer.read(2 * FILE_BYTES_MAX), type=Work)
        die_with_parent(work.agent)
        os.umask(0o022)
        outcome = perform(work)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_all(sys.stdout.fileno(), msgspec.json.encode(outcome))
        return 0
    except _Ended:
        return EXIT_ENDED


if __name__ == "__main__":
    sys.exit(main())

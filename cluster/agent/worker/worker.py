"""Worker process: carries out one operation and never outlives its agent.

The agent runs it as `python -m cluster.agent.worker.worker`. It reads a `WorkerTask` from standard input and writes an
`Outcome` to standard output. Code that touches a job's files runs as the job's account on this node.

A persistent buffer of the native provider is one directory, on the node or on a shared filesystem, that outlives the
jobs using it. Its owner and group may read and write it; the owner may change the permissions. Removal never follows a
link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import stat
import sys
import traceback
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

import msgspec
from msgspec.structs import replace

from forebay.cluster.agent.adapters import AdapterFailed, lay_out
from forebay.cluster.agent.files import (
    PERSISTENT,
    FileRefused,
    FilesystemRefused,
    ImageFailed,
    PathRefused,
    RemovalFailed,
    capacity,
    filesystems,
    identity_of,
    read_bounded,
    sync_written,
    write_durably,
)
from forebay.cluster.agent.limits import DESCRIPTORS, FILE_BYTES_MAX
from forebay.cluster.agent.messages import failure
from forebay.cluster.agent.processes import (
    OPERATION_VARIABLE,
    AccountRefused,
    CgroupTree,
    UnixAccount,
    account_for,
    become,
    cgroup_of_script,
    environment_of,
    join,
    kill_job,
    persistent_variables,
)
from forebay.cluster.agent.transfer import (
    FenceFailed,
    IoWatch,
    Pace,
    SharedCounters,
    TransferContext,
    TransferFailed,
    TransferPaused,
    TransferStopped,
    Workspace,
    WriterFenced,
    root_cause,
    workspace,
)
from forebay.cluster.agent.worker import external_provider
from forebay.cluster.agent.worker.buffer_removal import remove_as_operator, remove_as_user
from forebay.cluster.agent.worker.buffer_usage import blocks_of, inodes_of
from forebay.cluster.agent.worker.orphans import ANY_ATTEMPT, SWEEP, orphan_tag, sweep_orphans
from forebay.cluster.agent.worker.staging import (
    StageCommands,
    TransferRun,
    capacity_of,
    claimant_of,
    has_space,
    stage_in,
    stage_out,
)
from forebay.cluster.agent.worker.task import Outcome, WorkerTask
from forebay.cluster.system import (
    SystemClock,
    closing,
    die_with_parent,
    ignore_hangup,
    is_disk_full,
    names_in,
    open_directory,
    write_all,
)
from forebay.replica.messages import OperationDone, OperationFailed
from forebay.replica.model import QUOTA_AUTO, CreatePersistent, OrderFilesystem, PoolUnit, Stage
from forebay.replica.values import name_fault

PERSISTENT_MODE: Final = 0o770
"""Mode of a persistent buffer's directory: its user and the user's group have access."""


MADE: Final = ".made"
"""Directory beside the persistent buffers that records which job created each. Buffer names never begin with a dot."""

CLEARED: Final = ".cleared-"
"""Prefix of directories left by an earlier buffer of the same name, until they are removed."""


def _change_persistent(work: WorkerTask) -> Outcome:
    """Destroy, then create, the persistent buffers in the order; return the first failure. The change is idempotent."""
    order = work.order
    placed = dict(order.persistent)
    for unwanted in order.destroys:
        failed = _destroy_placed(placed[unwanted.name], unwanted.name, work) if unwanted.name in placed else None
        if failed is not None:
            return failed
    for wanted in order.creates:
        failed = _create_placed(placed[wanted.name], wanted, work) if wanted.name in placed else None
        if failed is not None:
            return failed
    order = replace(
        order,
        destroys=tuple(one for one in order.destroys if one.name not in placed),
        creates=tuple(one for one in order.creates if one.name not in placed),
    )
    if not (order.destroys or order.creates):
        return OperationDone()
    with closing(open_directory(os.path.join(work.home, PERSISTENT))) as parent:
        with contextlib.suppress(FileExistsError):
            os.mkdir(MADE, 0o700, dir_fd=parent)
        with closing(open_directory(MADE, dir_fd=parent)) as made:
            for unwanted in order.destroys:
                failed = _destroy(parent, made, unwanted.name, work)
                if failed is not None:
                    return failed
            for wanted in order.creates:
                failed = _create(parent, made, wanted, work)
                if failed is not None:
                    return failed
    return OperationDone()


def _destroy_placed(filesystem: OrderFilesystem, name: str, work: WorkerTask) -> OperationFailed | None:
    """Remove a persistent buffer from a shared filesystem.

    Its directory name is never reused, so a late attempt finds nothing.
    """
    shown = f"the persistent buffer {name}"
    try:
        parent, directory = filesystems.open_parent(filesystem, switch=work.accounts == "switch", make=True)
        with closing(parent):
            path = os.path.join(filesystem.path, filesystem.directory)
            failed = _remove_persistent(work, parent, directory, path, shown, filesystem.quota)
            os.fsync(parent)
            return failed
    except (RemovalFailed, ImageFailed, AdapterFailed, FilesystemRefused) as error:
        return OperationFailed(str(error), operation="destroy_persistent")


def _remove_persistent(
    work: WorkerTask, parent: int, name: str, path: str, shown: str, quota: str = QUOTA_AUTO
) -> OperationFailed | None:
    """Remove a persistent buffer with its owner's rights, or unconditionally if an operator destroys it."""
    options = work.order.options
    if options is not None and options.by_operator:
        remove_as_operator(work, parent, name, shown=shown, quota=quota)
        return None
    failed = _remove_as_user(work, parent, name, path, shown, quota)
    return None if failed is None else replace(failed, operation="destroy_persistent")


def _create_placed(filesystem: OrderFilesystem, wanted: CreatePersistent, work: WorkerTask) -> OperationFailed | None:
    """Create a persistent buffer on a shared filesystem, or finish one begun by an earlier attempt or another mover."""
    account = account_for(work.accounts, work.order.user)
    try:
        parent, name = filesystems.open_parent(filesystem, switch=account.switch, make=True)
        with closing(parent):
            limited = wanted.units == PoolUnit.BYTES.word and wanted.capacity_bytes > 0
            control = capacity.WATCH
            if limited:
                control = capacity.find_control(parent, filesystem.quota, work.tools).word
            with contextlib.suppress(FileExistsError):
                capacity.make(parent, name, control, blocks_of(wanted.capacity_bytes), work.tools)
            with closing(capacity.open_buffer(parent, name)) as directory:
                seed = f"{filesystem.identity}.{filesystem.directory}"
                capacity.hold(directory, control, seed, blocks_of(wanted.capacity_bytes), work.tools)
                capacity.hold_inodes(directory, control, seed, inodes_of(wanted.capacity_bytes), work.tools)
                lay_out(directory, filesystem.layout, [mode.name.lower() for mode in wanted.access], work.tools)
                _give(directory, account, keeps_group=capacity.keeps_group(control, work.tools))
                os.fsync(directory)
            os.fsync(parent)
    except FileRefused as error:
        return OperationFailed(str(error), final=True, operation="create_persistent")
    except (FilesystemRefused, ImageFailed, AdapterFailed) as error:
        return OperationFailed(str(error), operation="create_persistent")
    except OSError as error:
        sentence = f"persistent buffer {wanted.name} cannot be created on {filesystem.name}: {error.strerror}"
        return OperationFailed(sentence, operation="create_persistent")
    return None


def _give(directory: int, account: UnixAccount, *, keeps_group: bool) -> None:
    """Give a persistent buffer to its user once, so that a late attempt does not undo the owner's changes."""
    if account.switch and os.fstat(directory).st_uid == account.uid:
        return
    if account.switch:
        os.fchown(directory, account.uid, -1 if keeps_group else account.gid)
    os.fchmod(directory, PERSISTENT_MODE | (stat.S_ISGID if keeps_group else 0))


def _destroy(parent: int, made: int, name: str, work: WorkerTask) -> OperationFailed | None:
    try:
        _check(name)
        path = os.path.join(work.home, PERSISTENT, name)
        failed = _remove_persistent(work, parent, name, path, f"the persistent buffer {name}")
        if failed is not None:
            return failed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=made)
    except (RemovalFailed, ImageFailed, ValueError) as error:
        return OperationFailed(str(error), operation="destroy_persistent")
    return None


def _create(parent: int, made: int, wanted: CreatePersistent, work: WorkerTask) -> OperationFailed | None:
    account, name = account_for(work.accounts, work.order.user), wanted.name
    try:
        _check(name)
        if (read_bounded(made, name) or b"").strip() != _maker(work):
            # The directory belongs to a buffer cleared with `forebay buffer clear`; the new owner must not read it.
            _take_away(work, parent, name)
            write_durably(made, name, _maker(work))
        limited = wanted.units == PoolUnit.BYTES.word and wanted.capacity_bytes > 0
        control = work.capacity_control if limited else capacity.WATCH
        with contextlib.suppress(FileExistsError):
            capacity.make(parent, name, control, blocks_of(wanted.capacity_bytes))
        with closing(capacity.open_buffer(parent, name)) as directory:
            if account.switch:
                os.fchown(directory, account.uid, account.gid)
            os.fchmod(directory, PERSISTENT_MODE)
            seed = f"{work.storage_id}.persistent.{name}"
            capacity.hold(directory, control, seed, blocks_of(wanted.capacity_bytes))
            capacity.hold_inodes(directory, control, seed, inodes_of(wanted.capacity_bytes))
            os.fsync(directory)
        os.fsync(parent)
    except (ValueError, FileRefused) as error:
        return OperationFailed(str(error), final=True, operation="create_persistent")
    except (RemovalFailed, ImageFailed) as error:
        return OperationFailed(str(error), operation="create_persistent")
    except OSError as error:
        sentence = f"the persistent buffer {name} cannot be created: {error.strerror}"
        return OperationFailed(sentence, operation="create_persistent")
    return None


def _maker(work: WorkerTask) -> bytes:
    """Return an identifier of the creating job. Job IDs are never reused."""
    return f"{work.cluster} {work.order.job}".encode()


def _take_away(work: WorkerTask, parent: int, name: str) -> None:
    """Rename a directory so that no path leads to it, then remove what its owner may remove.

    The rest stays where only the agent can read it.

    Raises:
        RemovalFailed: A file cannot be removed.
        OSError: The directory cannot be renamed.
    """
    gone = f"{CLEARED}{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        capacity.move(parent, name, gone)
    for left in names_in(parent):
        if left.startswith(CLEARED):
            shown = f"the content of an earlier persistent buffer ({left})"
            kept = remove_as_user(work, parent, left, user=None, shown=shown)
            if kept:
                path = os.path.join(work.home, PERSISTENT, left)
                print(
                    f"{path} is kept because its owner may not remove {', '.join(kept)}; "
                    "return the files to their owners, then remove the directory",
                    file=sys.stderr,
                )


def _remove_as_user(
    work: WorkerTask, parent: int, name: str, path: str, shown: str, quota: str
) -> OperationFailed | None:
    """Remove a buffer with its user's rights; return a failure if some of its content has to be kept."""
    kept = remove_as_user(work, parent, name, user=work.order.user, shown=shown, quota=quota)
    if not kept:
        return None
    return failure(
        f"{shown} is kept in {path} because user {work.order.user} may not remove {', '.join(kept)}; "
        "an operator must remove it on the node and release the job",
        final=True,
    )


def _check(name: str) -> None:
    """Raise ValueError if `name` cannot name a directory here. The controller has already checked it."""
    fault = name_fault(name)
    if fault is not None or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot name a persistent buffer: it {fault or 'names another directory'}")


EXIT_ENDED = 143
"""Exit code after SIGTERM, as shells report it; no result is written."""


_LASTING: Final = frozenset(
    {
        errno.ENOENT,
        errno.EACCES,
        errno.EPERM,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EROFS,
        errno.EXDEV,
    }
)
"""Errors for which retrying is pointless."""


def perform(work: WorkerTask) -> Outcome:
    """Carry out the operation and return its result; errors become an `OperationFailed`."""
    try:
        if work.order.provision is not None and work.order.stage != SWEEP:
            return external_provider.perform(work)
        return _OPERATIONS[work.order.stage](work)
    except TransferFailed as error:
        return failure(str(error), final=is_final(error), receipt=error.receipt)
    except (
        AccountRefused,
        PathRefused,
        RemovalFailed,
        ImageFailed,
        AdapterFailed,
        WriterFenced,
        FenceFailed,
        FilesystemRefused,
    ) as error:
        return failure(str(error), final=is_final(error))
    except OSError as error:
        traceback.print_exc()
        # Failures of the job's files are handled above and name the files. This one concerns the agent's own records.
        where = f" ({error.filename})" if error.filename else ""
        remedy = "; free space on its disk" if is_disk_full(error) else ""
        return failure(
            f"{work.order.stage} failed: {error.strerror or error}{where} in the agent's directory {work.home}{remedy}"
        )


def is_final(error: BaseException) -> bool:
    """Return whether automatic retries are pointless because an operator or user must first fix the cause.

    A full disk, an I/O error or a changing source is transient. A missing or unreadable source, or data larger than the
    buffer, is not.
    """
    cause = root_cause(error)
    if isinstance(cause, OSError):
        return cause.errno in _LASTING
    return type(cause) in (AccountRefused, PathRefused, TransferFailed, FenceFailed)


def _parent(work: WorkerTask, *, make: bool = False) -> tuple[int, str]:
    return filesystems.open_parent_of(work.home, work.order, switch=work.accounts == "switch", make=make)


def _records(work: WorkerTask, home: int) -> int:
    """Open the directory that holds the transfer records; on a shared filesystem each attempt has its own."""
    if work.order.filesystem is None:
        return os.dup(home)
    return filesystems.open_records(work.order.filesystem, work.order.attempt)


def _stage_in(work: WorkerTask) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    buffers, name = _parent(work, make=True)
    capacity_bytes = capacity_of(work.order)
    shared, tools = work.order.filesystem, work.tools
    control = work.capacity_control if capacity_bytes else capacity.WATCH
    if shared is not None and capacity_bytes:
        control = capacity.find_control(buffers, shared.quota, tools).word
    try:
        capacity.make(buffers, name, control, blocks_of(capacity_bytes), tools)
        # A new buffer holds nothing from an earlier attempt.
        workspace.forget(home, work.order.job, ("stage_in",))
    except FileExistsError:
        pass
    buffer = capacity.open_buffer(buffers, name)
    os.fchmod(buffer, 0o700)
    # On a shared filesystem every mover must derive the same seed.
    seed = _marker(work) if shared is None else f"{shared.identity}.{shared.directory}"
    capacity.hold(buffer, control, seed, blocks_of(capacity_bytes), tools)
    if shared is not None:
        lay_out(buffer, shared.layout, work.order.access, tools)
    if account.switch and has_space(work.order):
        keeps_group = capacity.keeps_group(control, tools)
        os.fchown(buffer, account.uid, -1 if keeps_group else account.gid)
        os.fchmod(buffer, 0o700 | (stat.S_ISGID if keeps_group else 0))
    os.fsync(buffers)
    run = _carrier(work, home)
    _become(account, work, home, buffers)
    return stage_in(work.order, buffer, run._replace(commands=_commands(work, account)))


def _stage_out(work: WorkerTask) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    try:
        buffers, name = _parent(work)
        buffer = capacity.open_buffer(buffers, name)
    except FileNotFoundError:
        where = (
            "on this node" if work.order.filesystem is None else f"in shared filesystem {work.order.filesystem.name}"
        )
        return failure(f"the buffer of job {work.order.job} is not {where}; nothing can be staged out")
    run = _carrier(work, home)
    _become(account, work, home, buffers)
    return stage_out(work.order, buffer, run._replace(commands=_commands(work, account)))


def _commands(work: WorkerTask, account: UnixAccount) -> StageCommands | None:
    """Return the order's stage commands, or None if it has none."""
    order = work.order
    if order.special is None or not order.special.commands:
        return None
    environment = environment_of(
        replace(order, environment=order.special.environment),
        account,
        buffer=filesystems.buffer_path(work.home, order),
        node=work.node,
        marker=_marker(work),
    )
    environment[OPERATION_VARIABLE] = f"{_marker(work)}.{order.attempt}"
    shared = SharedCounters(work.progress)

    def alive() -> None:
        counters = shared.read()
        shared.write(counters._replace(steps=counters.steps + 1))

    watch = IoWatch(alive, _pace or Pace(-1, shared, SystemClock()))
    return StageCommands(environment, work.process, clock=SystemClock(), poll=watch.poll)


def _sweep(work: WorkerTask) -> Outcome:
    """Remove temporary files of a killed transfer, as the user who owns them."""
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    identity = identity_of(home)
    _become(account, work, home)
    assert work.left is not None
    everything = claimant_of(work.cluster, work.order.job, ANY_ATTEMPT, work.storage_id)
    variables = persistent_variables(work.home, work.left.uses, work.left.placed)
    return OperationDone(files=sweep_orphans(everything, work.left, variables, identity))


def _become(account: UnixAccount, work: WorkerTask, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    become(account, work.process)
    # The kernel clears the parent-death signal when credentials change.
    die_with_parent(work.agent)


def _carrier(work: WorkerTask, home: int) -> TransferRun:
    """Return the transfer setup. Call it before switching accounts: the agent owns the records."""
    order, shared = work.order, SharedCounters(work.progress)
    with closing(_records(work, home)) as records:
        kept = Workspace.open(records, order.job, order.attempt, order.stage)
    context = TransferContext(
        tag=orphan_tag(order.job, work.storage_id),
        workspace=kept,
        clock=SystemClock(),
        progress=shared.write,
        at=shared.at,
        pace=_pace or Pace(-1, shared, SystemClock()),
        stage=Stage[order.stage.upper()],
        attempt=order.attempt,
    )
    claimant = claimant_of(work.cluster, order.job, order.attempt, work.storage_id)
    persistent = persistent_variables(work.home, order.uses, order.persistent)
    for name, filesystem in order.persistent:
        if name in order.uses:
            # Fail if another filesystem is mounted at the path of the shared filesystem.
            os.close(filesystems.open_filesystem(filesystem))
    run = TransferRun(
        context, claimant, identity_of(home), persistent, local=work.local, shared=order.filesystem is not None
    )
    return run if _pace is None else run._replace(await_order=_pace.await_order, seen_by_pace=_seen_by_pace)


def _post_run(work: WorkerTask) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    left = _end_scripts(work, account.uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    sync_written(work.home, work.order, switch=work.accounts == "switch")
    return OperationDone()


def _teardown(work: WorkerTask) -> Outcome:
    """Remove the buffer with its user's rights; report files that the user may not remove and keep them.

    Works on descriptors and never follows a link.
    """
    buffers, name = _parent(work, make=True)
    uid = _owner(work, buffers, name)
    left = [] if uid is None else _end_scripts(work, uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    shown = f"the buffer of job {work.order.job}"
    quota = QUOTA_AUTO if work.order.filesystem is None else work.order.filesystem.quota
    failed = _remove_as_user(work, buffers, name, filesystems.buffer_path(work.home, work.order), shown, quota)
    if failed is not None:
        return failed
    home = open_directory(work.home)
    workspace.forget(home, work.order.job)
    workspace.prune_receipts(home)
    os.close(home)
    if work.order.filesystem is not None:
        filesystems.forget_records(work.order.filesystem)
    return OperationDone()


def _end_scripts(work: WorkerTask, uid: int) -> list[int]:
    """Kill all remaining processes of the job's scripts; return the IDs of those that cannot be killed.

    Scans every process of the machine only if some of the job's may be outside its cgroups.
    """
    if work.cgroups:
        return CgroupTree(work.cgroups).end_scripts(work.order.job)
    return kill_job(_marker(work), uid, cgroup=cgroup_of_script(work.home, work.order.job))


def _owner(work: WorkerTask, buffers: int, name: str) -> int | None:
    """Return the user ID of the job's processes. If the account no longer exists, use the owner of the buffer."""
    try:
        return account_for(work.accounts, work.order.user).uid
    except AccountRefused:
        with contextlib.suppress(FileNotFoundError):
            capacity.see_mounted(buffers, name)
            owner = os.stat(name, dir_fd=buffers, follow_symlinks=False).st_uid
            return owner or None
        return None


def _marker(work: WorkerTask) -> str:
    return f"{work.storage_id}.{work.order.job}"


_OPERATIONS = {
    "stage_in": _stage_in,
    "stage_out": _stage_out,
    "post_run": _post_run,
    "teardown": _teardown,
    external_provider.PERSISTENT_CHANGE: _change_persistent,
    SWEEP: _sweep,
}


_pace: Pace | None = None
"""Pace of the running transfer, for the signal handler."""


_is_seen_by_pace = False
"""True while SIGTERM is only passed to the pace."""


def _end(_number: int, _frame: FrameType | None) -> None:
    # Ignore further signals, which would interrupt the cleanup.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _pace is not None:
        _pace.end(TransferStopped)
        if _is_seen_by_pace:
            return
        _pace.check()
    raise TransferStopped


@contextlib.contextmanager
def _seen_by_pace() -> Iterator[None]:
    """Let SIGTERM take effect only where the transfer checks its pace, so that data is never left half moved."""
    global _is_seen_by_pace
    assert _pace is not None
    _is_seen_by_pace = True
    try:
        yield
    finally:
        _is_seen_by_pace = False
    _pace.check()


def _allow_descriptors() -> None:
    """Raise the limit of open files to what an order may need: two for each destination."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


_WORKS: Final = msgspec.json.Decoder(WorkerTask)
"""Built at import, once in the fork server: msgspec needs 10 ms to inspect the types."""


def main(arguments: Sequence[str]) -> int:
    """Read the task, carry it out and write the result; return the exit code.

    Each argument is a descriptor through which this process enters its cgroup before doing anything else.
    """
    try:
        ignore_hangup()
        signal.signal(signal.SIGTERM, _end)
        # Ctrl-C in a terminal is meant for the agent, which ends its workers itself.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for entrance in arguments:
            join(int(entrance))
        work = _WORKS.decode(sys.stdin.buffer.read(2 * FILE_BYTES_MAX))
        die_with_parent(work.agent)
        global _pace
        _pace = Pace(work.control, SharedCounters(work.progress), SystemClock())
        os.umask(0o022)
        _allow_descriptors()
        outcome = perform(work)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        write_all(sys.stdout.fileno(), msgspec.json.encode(outcome))
        return 0
    except (TransferStopped, TransferPaused):
        return EXIT_ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

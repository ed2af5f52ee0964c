"""One operation in its own process: told on standard input, answered on standard output, never outliving its agent.

Run as `python -m cluster.agent.worker.worker` by the agent. What touches a job's files runs as the account that the job
has here.

Persistent buffers of the native provider are a directory each, in the agent's own or in a place, which outlives the
jobs that use it.
The owner and its group may read and write it; the owner may change that. Nothing is ever removed through a link."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final

import msgspec
from msgspec.structs import replace

from cluster.agent.files import (
    PERSISTENT,
    FileRefused,
    ImageRefused,
    PathRefused,
    PlaceRefused,
    RemovalFailed,
    capacity,
    identity_of,
    places,
    read_bounded,
    sync_written,
    write_durably,
)
from cluster.agent.limits import DESCRIPTORS, FILE_BYTES_MAX
from cluster.agent.messages import failure
from cluster.agent.processes import (
    OPERATION_VARIABLE,
    Account,
    AccountRefused,
    CgroupTree,
    account_for,
    become,
    cgroup_of_script,
    environment_of,
    join,
    kill_job,
    persistent_variables,
)
from cluster.agent.transfer import (
    Context,
    Fenced,
    FenceFailed,
    IoWatch,
    Pace,
    Paused,
    SharedCounters,
    Stopped,
    TransferFailed,
    Workspace,
    root_cause,
    workspace,
)
from cluster.agent.worker import external_provider
from cluster.agent.worker.buffer_removal import remove_as_operator, remove_as_user
from cluster.agent.worker.buffer_usage import blocks_of, inodes_of
from cluster.agent.worker.orphans import ANY_ATTEMPT, SWEEP, sweep, tag
from cluster.agent.worker.staging import (
    Commands,
    TransferRun,
    capacity_of,
    claimant_of,
    has_space,
    stage_in,
    stage_out,
)
from cluster.agent.worker.work import Outcome, Work
from cluster.system import (
    SystemClock,
    closing,
    die_with_parent,
    ignore_hangup,
    is_disk_full,
    names_in,
    open_directory,
    write_all,
)
from replica.messages import OperationDone, OperationFailed
from replica.model import CreatePersistent, OrderPlace, PoolUnit, Stage
from replica.values import name_fault

PERSISTENT_MODE: Final = 0o770
"""Of the directory of a persistent buffer: its user and their group."""


MADE: Final = ".made"
"""Beside the directories of persistent buffers: which job made each. No buffer's name begins with a dot."""

CLEARED: Final = ".cleared-"
"""How the names of directories begin that a buffer of another life left, until they are removed."""


def _change_persistent(work: Work) -> Outcome:
    """Destroy and create what the order says, destroying first; return what failed. Repeating it does no harm."""
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


def _destroy_placed(place: OrderPlace, name: str, work: Work) -> OperationFailed | None:
    """Remove a persistent buffer from a place. Its directory is of this life of the name alone, so who is late with it
    finds nothing.
    """
    shown = f"the persistent buffer {name}"
    try:
        parent, directory = places.open_parent(place, switch=work.accounts == "switch", make=True)
        with closing(parent):
            path = os.path.join(place.path, place.directory)
            failed = _remove_persistent(work, parent, directory, path, shown)
            os.fsync(parent)
            return failed
    except (RemovalFailed, ImageRefused, PlaceRefused) as error:
        return OperationFailed(str(error), operation="destroy_persistent")


def _remove_persistent(work: Work, parent: int, name: str, path: str, shown: str) -> OperationFailed | None:
    """Remove a persistent buffer: with its owner's rights, or with everything in it if an operator destroys it."""
    options = work.order.options
    if options is not None and options.by_operator:
        remove_as_operator(work, parent, name, shown=shown)
        return None
    failed = _remove_as_user(work, parent, name, path, shown)
    return None if failed is None else replace(failed, operation="destroy_persistent")


def _create_placed(place: OrderPlace, wanted: CreatePersistent, work: Work) -> OperationFailed | None:
    """Make a persistent buffer in a place; what an earlier attempt, or another mover, has begun is gone on with."""
    account = account_for(work.accounts, work.order.user)
    try:
        parent, name = places.open_parent(place, switch=account.switch, make=True)
        with closing(parent):
            limited = wanted.units == PoolUnit.BYTES.word and wanted.capacity_bytes > 0
            control = capacity.find_control(parent).word if limited else capacity.WATCH
            with contextlib.suppress(FileExistsError):
                capacity.make(parent, name, control, blocks_of(wanted.capacity_bytes))
            with closing(capacity.open_buffer(parent, name)) as directory:
                seed = f"{place.identity}.{place.directory}"
                capacity.hold(directory, control, seed, blocks_of(wanted.capacity_bytes))
                capacity.hold_inodes(directory, control, inodes_of(wanted.capacity_bytes))
                _give(directory, account)
                os.fsync(directory)
            os.fsync(parent)
    except FileRefused as error:
        return OperationFailed(str(error), final=True, operation="create_persistent")
    except (PlaceRefused, ImageRefused) as error:
        return OperationFailed(str(error), operation="create_persistent")
    except OSError as error:
        sentence = f"the persistent buffer {wanted.name} cannot be made in place {place.name}: {error.strerror}"
        return OperationFailed(sentence, operation="create_persistent")
    return None


def _give(directory: int, account: Account) -> None:
    """Give a persistent buffer to its user, once: whoever comes late leaves alone what the owner has changed since."""
    if account.switch and os.fstat(directory).st_uid == account.uid:
        return
    os.fchmod(directory, PERSISTENT_MODE)
    if account.switch:
        os.fchown(directory, account.uid, account.gid)


def _destroy(parent: int, made: int, name: str, work: Work) -> OperationFailed | None:
    try:
        _check(name)
        path = os.path.join(work.home, PERSISTENT, name)
        failed = _remove_persistent(work, parent, name, path, f"the persistent buffer {name}")
        if failed is not None:
            return failed
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=made)
    except (RemovalFailed, ImageRefused, ValueError) as error:
        return OperationFailed(str(error), operation="destroy_persistent")
    return None


def _create(parent: int, made: int, wanted: CreatePersistent, work: Work) -> OperationFailed | None:
    account, name = account_for(work.accounts, work.order.user), wanted.name
    try:
        _check(name)
        if (read_bounded(made, name) or b"").strip() != _maker(work):
            # What lies there is of a buffer that was forgotten (`forebay buffer clear`), and nobody else's to read.
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
            capacity.hold_inodes(directory, control, inodes_of(wanted.capacity_bytes))
            os.fsync(directory)
        os.fsync(parent)
    except (ValueError, FileRefused) as error:
        return OperationFailed(str(error), final=True, operation="create_persistent")
    except (RemovalFailed, ImageRefused) as error:
        return OperationFailed(str(error), operation="create_persistent")
    except OSError as error:
        sentence = f"the persistent buffer {name} cannot be made: {error.strerror}"
        return OperationFailed(sentence, operation="create_persistent")
    return None


def _maker(work: Work) -> bytes:
    """Return who makes a persistent buffer: a job's number is never used again."""
    return f"{work.cluster} {work.order.job}".encode()


def _take_away(work: Work, parent: int, name: str) -> None:
    """Give a directory a name that nothing is found by, and remove it, but for what its owner may not remove: that lies
    where nobody but the agent can look. RemovalFailed, OSError.
    """
    gone = f"{CLEARED}{uuid.uuid4().hex}"
    with contextlib.suppress(FileNotFoundError):
        capacity.move(parent, name, gone)
    for left in names_in(parent):
        if left.startswith(CLEARED):
            shown = f"what an earlier persistent buffer held ({left})"
            kept = remove_as_user(work, parent, left, user=None, shown=shown)
            if kept:
                path = os.path.join(work.home, PERSISTENT, left)
                print(
                    f"{path} holds what its owner may not remove, so it is kept: {', '.join(kept)}; "
                    "give it to its owners, then remove the directory",
                    file=sys.stderr,
                )


def _remove_as_user(work: Work, parent: int, name: str, path: str, shown: str) -> OperationFailed | None:
    """Remove a buffer with no more rights than its user has; return what the user may not remove as a failure."""
    kept = remove_as_user(work, parent, name, user=work.order.user, shown=shown)
    if not kept:
        return None
    return failure(
        f"{shown} holds what user {work.order.user} may not remove, so it is kept in {path}: {', '.join(kept)}; "
        "an operator takes it away on the node and releases the job",
        final=True,
    )


def _check(name: str) -> None:
    """Raise ValueError for what cannot be the name of a directory here; the controller has checked it before."""
    fault = name_fault(name)
    if fault is not None or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot name a persistent buffer: it {fault or 'names another directory'}")


EXIT_ENDED = 143
"""Exit code after SIGTERM, as shells give it: there is no result."""


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
"""What the kernel says of a path that is wrong for good."""


def perform(work: Work) -> Outcome:
    """Do the operation and return its result; what is wrong with it is a result too."""
    try:
        if work.order.provision is not None and work.order.stage != SWEEP:
            return external_provider.perform(work)
        return _OPERATIONS[work.order.stage](work)
    except TransferFailed as error:
        return failure(str(error), final=is_final(error), receipt=error.receipt)
    except (AccountRefused, PathRefused, RemovalFailed, ImageRefused, Fenced, FenceFailed, PlaceRefused) as error:
        return failure(str(error), final=is_final(error))
    except OSError as error:
        traceback.print_exc()
        # What happens to the job's files is a failure of its own, with their names: this is about the agent's records.
        where = f" ({error.filename})" if error.filename else ""
        remedy = "; make room on its disk" if is_disk_full(error) else ""
        return failure(
            f"{work.order.stage} failed: {error.strerror or error}{where} in the agent's directory {work.home}{remedy}"
        )


def is_final(error: BaseException) -> bool:
    """Return whether trying again by itself is of no use: somebody has to put right what is wrong first.

    A full disk, an I/O error or a source that changes may go away; a source that does not exist, or may not be read, or
    needs more than the buffer has, does not.
    """
    cause = root_cause(error)
    if isinstance(cause, OSError):
        return cause.errno in _LASTING
    return type(cause) in (AccountRefused, PathRefused, TransferFailed, FenceFailed)


def _parent(work: Work, *, make: bool = False) -> tuple[int, str]:
    return places.open_parent_of(work.home, work.order, switch=work.accounts == "switch", make=make)


def _records(work: Work, home: int) -> int:
    """Return a descriptor of what the records of transfers are kept in: of a place those of each attempt."""
    if work.order.place is None:
        return os.dup(home)
    return places.open_records(work.order.place, work.order.attempt)


def _stage_in(work: Work) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    buffers, name = _parent(work, make=True)
    capacity_bytes = capacity_of(work.order)
    control = work.capacity_control
    if work.order.place is not None:
        control = capacity.find_control(buffers).word
    control = control if capacity_bytes else capacity.WATCH
    try:
        capacity.make(buffers, name, control, blocks_of(capacity_bytes))
        # A buffer that was made just now has nothing of an earlier attempt in it.
        workspace.forget(home, work.order.job, ("stage_in",))
    except FileExistsError:
        pass
    buffer = capacity.open_buffer(buffers, name)
    os.fchmod(buffer, 0o700)
    # Of a place, whichever mover does it: the same again.
    seed = _marker(work) if work.order.place is None else f"{work.order.place.identity}.{work.order.place.directory}"
    capacity.hold(buffer, control, seed, blocks_of(capacity_bytes))
    if account.switch and has_space(work.order):
        os.fchown(buffer, account.uid, account.gid)
    os.fsync(buffers)
    run = _carrier(work, home)
    _become(account, work, home, buffers)
    return stage_in(work.order, buffer, run._replace(commands=_commands(work, account)))


def _stage_out(work: Work) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    try:
        buffers, name = _parent(work)
        buffer = capacity.open_buffer(buffers, name)
    except FileNotFoundError:
        where = "on this node" if work.order.place is None else f"in place {work.order.place.name}"
        return failure(f"the buffer of job {work.order.job} is not {where}; nothing can be staged out")
    run = _carrier(work, home)
    _become(account, work, home, buffers)
    return stage_out(work.order, buffer, run._replace(commands=_commands(work, account)))


def _commands(work: Work, account: Account) -> Commands | None:
    """Return the commands of the order, if it has any."""
    order = work.order
    if order.special is None or not order.special.commands:
        return None
    environment = environment_of(
        replace(order, environment=order.special.environment),
        account,
        buffer=places.buffer_path(work.home, order),
        node=work.node,
        marker=_marker(work),
    )
    environment[OPERATION_VARIABLE] = f"{_marker(work)}.{order.attempt}"
    shared = SharedCounters(work.progress)

    def alive() -> None:
        counters = shared.read()
        shared.write(counters._replace(steps=counters.steps + 1))

    watch = IoWatch(alive, _pace or Pace(-1, shared, SystemClock()))
    return Commands(environment, work.process, clock=SystemClock(), poll=watch.poll)


def _sweep(work: Work) -> Outcome:
    """Remove what a killed transfer left, as the user whose it is."""
    account = account_for(work.accounts, work.order.user)
    home = open_directory(work.home)
    identity = identity_of(home)
    _become(account, work, home)
    assert work.left is not None
    everything = claimant_of(work.cluster, work.order.job, ANY_ATTEMPT, work.storage_id)
    variables = persistent_variables(work.home, work.left.uses, work.left.placed)
    return OperationDone(files=sweep(everything, work.left, variables, identity))


def _become(account: Account, work: Work, *descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
    become(account, work.process)
    # Becoming another user clears it.
    die_with_parent(work.agent)


def _carrier(work: Work, home: int) -> TransferRun:
    """Return what moves the data; made while this is still the agent's account: its records are the agent's."""
    order, shared = work.order, SharedCounters(work.progress)
    with closing(_records(work, home)) as records:
        kept = Workspace.open(records, order.job, order.attempt, order.stage)
    context = Context(
        tag=tag(order.job, work.storage_id),
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
    for name, place in order.persistent:
        if name in order.uses:
            # Something else may be mounted where it lies.
            os.close(places.open_place(place))
    run = TransferRun(
        context, claimant, identity_of(home), persistent, local=work.local, shared=order.place is not None
    )
    return run if _pace is None else run._replace(await_order=_pace.await_order, seen_by_pace=_seen_by_pace)


def _post_run(work: Work) -> Outcome:
    account = account_for(work.accounts, work.order.user)
    left = _end_scripts(work, account.uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    sync_written(work.home, work.order, switch=work.accounts == "switch")
    return OperationDone()


def _teardown(work: Work) -> Outcome:
    """Remove the buffer with the rights of its user: what is in it that he may not remove is kept, and said.

    By descriptors and never through a link.
    """
    buffers, name = _parent(work, make=True)
    uid = _owner(work, buffers, name)
    left = [] if uid is None else _end_scripts(work, uid)
    if left:
        return failure(f"processes of job {work.order.job} cannot be killed: {', '.join(map(str, left[:20]))}")
    shown = f"the buffer of job {work.order.job}"
    failed = _remove_as_user(work, buffers, name, places.buffer_path(work.home, work.order), shown)
    if failed is not None:
        return failed
    home = open_directory(work.home)
    workspace.forget(home, work.order.job)
    workspace.prune_receipts(home)
    os.close(home)
    if work.order.place is not None:
        places.forget_records(work.order.place)
    return OperationDone()


def _end_scripts(work: Work, uid: int) -> list[int]:
    """End whatever lives of the job's scripts; return the ids of what cannot be killed.

    All processes of the machine are looked at only where something of the job's may be outside of its cgroups.
    """
    if work.cgroups:
        return CgroupTree(work.cgroups).end_scripts(work.order.job)
    return kill_job(_marker(work), uid, cgroup=cgroup_of_script(work.home, work.order.job))


def _owner(work: Work, buffers: int, name: str) -> int | None:
    """Return whose processes to look for: the account may have been removed since, the buffer still knows its owner."""
    try:
        return account_for(work.accounts, work.order.user).uid
    except AccountRefused:
        with contextlib.suppress(FileNotFoundError):
            capacity.see_mounted(buffers, name)
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
    external_provider.PERSISTENT_CHANGE: _change_persistent,
    SWEEP: _sweep,
}


_pace: Pace | None = None
"""What the transfer may do, for the handler of a signal."""


_is_seen_by_pace = False
"""Whether SIGTERM only tells the pace."""


def _end(_number: int, _frame: FrameType | None) -> None:
    # Once is enough: a second one must not interrupt whatever unwinds.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if _pace is not None:
        _pace.end(Stopped)
        if _is_seen_by_pace:
            return
        _pace.check()
    raise Stopped


@contextlib.contextmanager
def _seen_by_pace() -> Iterator[None]:
    """Have SIGTERM seen where the transfer asks its pace, so that nothing is left half done where data is moved."""
    global _is_seen_by_pace
    assert _pace is not None
    _is_seen_by_pace = True
    try:
        yield
    finally:
        _is_seen_by_pace = False
    _pace.check()


def _allow_descriptors() -> None:
    """Let as many files be open as an order may need: two for each of its destinations."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


_WORKS: Final = msgspec.json.Decoder(Work)
"""Made when this is loaded, as the fork server does once: msgspec looks through types for 10 ms."""


def main(arguments: Sequence[str]) -> int:
    """Read the work, do it, write the result; return the exit code.

    An argument is the number of a descriptor through which this process enters its cgroup before it does anything.
    """
    try:
        ignore_hangup()
        signal.signal(signal.SIGTERM, _end)
        # Ctrl-C in a terminal is for the agent, which ends its workers itself.
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
    except (Stopped, Paused):
        return EXIT_ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

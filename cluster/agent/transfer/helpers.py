"""Helper processes of a transfer, forked from its process, which assigns them batches to copy.

They inherit all they need: open directories, records, the pace, and the lock that marks a possible writer. They stay in
their parent's process group, and the kernel kills them when the parent dies.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Final, NoReturn

import msgspec

from forebay.cluster.agent.files import PathRefused
from forebay.cluster.agent.limits import COPY_TRIES_MAX
from forebay.cluster.agent.transfer import large_file
from forebay.cluster.agent.transfer.errors import (
    ReadBackFailed,
    SourceChanged,
    TransferFailed,
    TransferPaused,
    root_cause,
)
from forebay.cluster.agent.transfer.fence import WriterFenced
from forebay.cluster.agent.transfer.manifest import ManifestRecord
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.small_files import RecordFailed, SmallFiles
from forebay.cluster.agent.transfer.transfer_state import MovedAmounts, ProgressTally, RecordBatch, TransferState
from forebay.cluster.system import closing, die_with_parent


class Copier:
    """Copies batches one at a time."""

    def __init__(self, transfer: TransferState, tell: Callable[[MovedAmounts], None]) -> None:
        """Begin; `tell` receives progress and is always called by the calling thread."""
        self._transfer = transfer
        self._paths = transfer.paths()
        self._tally = ProgressTally(tell)
        self._small = SmallFiles(transfer, self._paths, self._tally)

    def copy(self, batch: RecordBatch) -> None:
        """Copy a batch; small files are durable only after `finish`. Also raises the exceptions of the pace.

        Raises:
            TransferFailed: A file cannot be copied; the message names it.
            WriterFenced: A newer attempt owns the destination.
            OSError: The agent's own records cannot be written.
        """
        records = self._transfer.records(batch)
        try:
            if batch.large:
                for record in records:
                    self._large(record)
            else:
                self._small.copy(records, self._transfer.leaves(batch, records))
        except RecordFailed as error:
            self._fail(error.record, error.__cause__)
        self._tally.tell()

    def finish(self) -> None:
        """Make all files durable; raises as `copy` does."""
        try:
            self._small.finish()
        except RecordFailed as error:
            self._fail(error.record, error.__cause__)
        self._tally.tell()

    def close(self) -> None:
        """Close open descriptors."""
        self._small.close()
        self._paths.close()

    def _large(self, record: ManifestRecord) -> None:
        try:
            large_file.copy_file(self._transfer, record, self._paths, self._tally)
        except (OSError, TransferFailed, SourceChanged) as error:
            self._fail(record, error)

    def _fail(self, record: ManifestRecord, error: BaseException | None) -> NoReturn:
        if isinstance(error, SourceChanged):
            raise self._transfer.source_changed_error(record, COPY_TRIES_MAX) from error
        assert isinstance(error, OSError | TransferFailed)
        failure = self._transfer.failure_of(record, error)
        if failure is error:
            # Keep its own cause: an error must not be its own cause.
            raise failure
        raise failure from error


POLL_S: Final = 0.1
"""Seconds between two checks while waiting for helpers: the delay of a stop."""

GRACE_S: Final = 0.3
"""Seconds for all helpers to remove the temporary files of their batches: less than the agent's grace period."""

HELPERS_MAX: Final = 64
"""Helpers of one transfer, count: far more than are useful."""

MESSAGE_BYTES_MAX: Final = 64 * 1024
"""Size of a message, bytes: a failure with two escaped paths of 4,096 bytes."""

_FINISH: Final = RecordBatch(0, 0)


class _Failure(msgspec.Struct, array_like=True):
    """Exception in transit to another process: kind, message and cause."""

    kind: str
    message: str
    item: int | None = None
    cause: str = ""
    number: int = 0


class _Message(msgspec.Struct, array_like=True):
    """Message of a helper: amounts moved, idle, or a failure."""

    moved: MovedAmounts | None = None
    idle: bool = False
    failure: _Failure | None = None


class _Terminated(BaseException):
    """SIGTERM arrived and the pace noticed it: unwind and remove temporary files."""


class _Helper:
    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self.told_to_finish = False
        self.finished = False


class Helpers:
    """Pool of helper processes, each with one batch at a time."""

    def __init__(self, transfer: TransferState, count: int) -> None:
        """Start the helpers.

        Raises:
            OSError: Not a single helper can be started.
        """
        self._clock = transfer.context.clock
        self._helpers: dict[int, _Helper] = {}
        self._idle: list[_Helper] = []
        self._finishing = False
        self._poll = select.poll()
        self._decoder = msgspec.msgpack.Decoder(_Message)
        try:
            for _ in range(min(count, HELPERS_MAX)):
                helper = _start(transfer)
                self._helpers[helper.channel.fileno()] = helper
                self._idle.append(helper)
                self._poll.register(helper.channel.fileno(), select.POLLIN)
        except OSError:
            # Fewer helpers are only slower.
            if not self._helpers:
                raise
        except BaseException:
            self._end()
            raise

    @property
    def idle(self) -> bool:
        """True if a helper waits for a batch."""
        return bool(self._idle)

    @property
    def working(self) -> bool:
        """True if a helper has not finished yet."""
        return any(not helper.finished for helper in self._helpers.values())

    def give(self, batch: RecordBatch) -> None:
        """Assign a batch to an idle helper; `wait` raises its errors."""
        self._send(self._idle.pop(0), batch)

    def finish(self) -> None:
        """Announce that no batch is left: each helper makes its files durable."""
        self._finishing = True
        while self._idle:
            self._let_finish(self._idle.pop())

    def wait(self) -> list[MovedAmounts]:
        """Wait at most POLL_S and return the amounts moved.

        An error in a helper is raised here.

        Raises:
            TransferFailed: A file cannot be copied; the message names it.
            WriterFenced: A newer attempt owns the destination.
            TransferStopped, TransferPaused: The transfer has to stop.
            OSError: The agent's own records cannot be written.
        """
        found: list[MovedAmounts] = []
        for descriptor, _ in self._poll.poll(POLL_S * 1000):
            helper = self._helpers[descriptor]
            data = self._receive(helper)
            if not data:
                self._remove_helper(helper)
                continue
            message = self._decoder.decode(data)
            if message.failure is not None:
                _raise(message.failure)
            if message.moved is not None:
                found.append(message.moved)
            if message.idle:
                self._has_nothing_to_do(helper)
        return found

    def _has_nothing_to_do(self, helper: _Helper) -> None:
        if helper.told_to_finish:
            helper.finished = True
        elif self._finishing:
            self._let_finish(helper)
        else:
            self._idle.append(helper)

    def _let_finish(self, helper: _Helper) -> None:
        helper.told_to_finish = True
        self._send(helper, _FINISH)

    def _send(self, helper: _Helper, batch: RecordBatch) -> None:
        # A dead helper is noticed by its closed channel.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            helper.channel.send(msgspec.msgpack.encode(batch))

    def _receive(self, helper: _Helper) -> bytes:
        try:
            return helper.channel.recv(MESSAGE_BYTES_MAX)
        except ConnectionResetError:
            return b""

    def _remove_helper(self, helper: _Helper) -> None:
        self._poll.unregister(helper.channel.fileno())
        if helper.finished:
            return
        _, status = os.waitpid(helper.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        helper.finished, helper.pid = True, 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise TransferFailed(f"a helper process of the transfer {how}; retry the transfer") from ChildProcessError(
            errno.ECHILD, "a helper process ended"
        )

    def __enter__(self) -> Helpers:
        """Return this object."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the helpers: at once if partial files are kept, otherwise after they have removed them."""
        if kind is None or issubclass(kind, TransferPaused | TransferStopped):
            self._end()
            return
        for helper in self._helpers.values():
            if helper.pid:
                # An idle helper notices the closed channel, a busy one the signal.
                helper.channel.close()
                os.kill(helper.pid, signal.SIGTERM)
        self._reap(GRACE_S)
        self._end()

    def _reap(self, wait_s: float) -> None:
        """Wait for helpers that are exiting."""
        until_s = self._clock.monotonic_s() + wait_s
        for helper in self._helpers.values():
            if not helper.pid:
                continue
            with contextlib.suppress(OSError), closing(os.pidfd_open(helper.pid)) as ended:
                left_s = until_s - self._clock.monotonic_s()
                if select.select([ended], [], [], max(0.0, left_s))[0]:
                    os.waitpid(helper.pid, 0)
                    helper.pid = 0

    def _end(self) -> None:
        for helper in self._helpers.values():
            if helper.pid:
                os.kill(helper.pid, signal.SIGKILL)
        for helper in self._helpers.values():
            if helper.pid:
                os.waitpid(helper.pid, 0)
                helper.pid = 0
            helper.channel.close()
        self._helpers.clear()


def _start(transfer: TransferState) -> _Helper:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _be_helper(transfer, theirs, parent)
    theirs.close()
    return _Helper(pid, ours)


def _be_helper(transfer: TransferState, channel: socket.socket, parent: int) -> NoReturn:
    """Run as a helper; never return to the parent's code."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, lambda *_: transfer.context.pace.end(_Terminated))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(parent)
        # Exclude the parent's objects from garbage collection, which would copy its memory, and collect only after each
        # batch.
        gc.freeze()
        gc.disable()
        _serve(transfer, channel)
        code = 0
    except _Terminated:
        code = 143
    except BaseException as error:
        with contextlib.suppress(BaseException):
            _send(channel, _Message(failure=_failure_of(error)))
    finally:
        os._exit(code)


def _serve(transfer: TransferState, channel: socket.socket) -> None:
    decoder = msgspec.msgpack.Decoder(RecordBatch)
    with contextlib.closing(Copier(transfer, lambda moved: _send(channel, _Message(moved=moved)))) as copier:
        while True:
            data = channel.recv(MESSAGE_BYTES_MAX)
            if not data:
                return
            batch = decoder.decode(data)
            if batch == _FINISH:
                copier.finish()
            else:
                copier.copy(batch)
            gc.collect()
            _send(channel, _Message(idle=True))


def _send(channel: socket.socket, message: _Message) -> None:
    channel.send(msgspec.msgpack.encode(message))


def _failure_of(error: BaseException) -> _Failure:
    if isinstance(error, TransferStopped | TransferPaused):
        return _Failure("paused" if isinstance(error, TransferPaused) else "stopped", "")
    if isinstance(error, WriterFenced):
        return _Failure("fenced", str(error))
    if isinstance(error, OSError):
        return _Failure("os", error.strerror or str(error), number=error.errno or 0)
    if not isinstance(error, TransferFailed):
        traceback.print_exception(error)
        return _Failure("failed", f"a helper process of the transfer failed: {error!r}", cause="unknown")
    cause = root_cause(error)
    kind = "read_back" if isinstance(error, ReadBackFailed) else "failed"
    if isinstance(cause, OSError):
        return _Failure(kind, str(error), error.item, cause.strerror or str(cause), cause.errno or 0)
    names: dict[type[BaseException], str] = {
        SourceChanged: "changed",
        ReadBackFailed: "read_back",
        PathRefused: "path",
    }
    return _Failure(kind, str(error), error.item, names.get(type(cause), ""))


def _raise(failure: _Failure) -> NoReturn:
    """Raise a helper's exception with its cause, which decides whether a retry is useful."""
    message = failure.message
    match failure.kind:
        case "paused":
            raise TransferPaused
        case "stopped":
            raise TransferStopped
        case "fenced":
            raise WriterFenced(message)
        case "os":
            raise OSError(failure.number, message)
    error = (ReadBackFailed if failure.kind == "read_back" else TransferFailed)(message, failure.item)
    if failure.number:
        raise error from OSError(failure.number, failure.cause)
    match failure.cause:
        case "changed":
            raise error from SourceChanged()
        case "read_back":
            raise error from ReadBackFailed(message)
        case "path":
            raise error from PathRefused(message)
        case "unknown":
            raise error from RuntimeError(message)
    raise error


WAITING: Final = 1
"""Helpers beyond one per stream: about one of them waits for a sync at any time."""


def copy_all(transfer: TransferState) -> None:
    """Copy every pending file; each is durable at its destination on return. Also raises the exceptions of the pace.

    Raises:
        TransferFailed: A file cannot be copied; the message names it.
        WriterFenced: A newer attempt owns the destination.
    """
    batches = transfer.pending()
    first = list(itertools.islice(batches, 2))
    if len(first) == 2 and transfer.options.streams > 1:
        helpers = _helpers(transfer)
        if helpers is not None:
            _together(transfer, itertools.chain(first, batches), helpers)
            return
    with contextlib.closing(Copier(transfer, transfer.advance)) as copier:
        for batch in itertools.chain(first, batches):
            copier.copy(batch)
        copier.finish()


def _helpers(transfer: TransferState) -> Helpers | None:
    """Start helpers; return None if this user cannot have more processes."""
    try:
        return Helpers(transfer, transfer.options.streams + WAITING)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
            raise
        return None


def _together(transfer: TransferState, batches: Iterator[RecordBatch], helpers: Helpers) -> None:
    with helpers:
        for batch in batches:
            while not helpers.idle:
                _take(transfer, helpers)
            helpers.give(batch)
        helpers.finish()
        while helpers.working:
            _take(transfer, helpers)


def _take(transfer: TransferState, helpers: Helpers) -> None:
    for moved in helpers.wait():
        transfer.advance(moved)
    transfer.context.pace.check()

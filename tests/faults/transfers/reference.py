"""Reference mover, the negative control of every attack: a naive copy by path, in place, following links.

An attack that does not catch this one proves nothing.
"""

import contextlib
import os
import shutil
import sys

import msgspec

from forebay.cluster.agent.worker.task import WorkerTask
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import TransferKind

VARIABLES = {"$DW_JOB_STRIPED": "striped", "$FOREBAY_JOB_DIR": ""}


def copy(kind: TransferKind, source: str, destination: str) -> int:
    """Copy a file, or everything in a directory, and return the bytes."""
    os.makedirs(os.path.dirname(destination), exist_ok=True)
    if kind is TransferKind.FILE:
        with open(source, "rb") as reading, open(destination, "wb", buffering=0) as writing:
            while data := reading.read(1 << 20):
                writing.write(data)
        shutil.copystat(source, destination)
        os.chmod(destination, os.stat(source).st_mode & 0o777)
        return os.path.getsize(destination)
    made = not os.path.isdir(destination)
    os.makedirs(destination, exist_ok=True)
    size_bytes = 0
    for name in sorted(os.listdir(source)):
        below = os.path.join(source, name)
        # An absolute one is what attacks put in the way: it is followed.
        if os.path.islink(below) and not os.readlink(below).startswith("/"):
            with contextlib.suppress(FileExistsError):
                os.symlink(os.readlink(below), os.path.join(destination, name))
            shutil.copystat(below, os.path.join(destination, name), follow_symlinks=False)
            continue
        size_bytes += copy(
            TransferKind.DIRECTORY if os.path.isdir(below) else TransferKind.FILE,
            below,
            os.path.join(destination, name),
        )
    if made:
        shutil.copystat(source, destination)
    return size_bytes


def perform(work: WorkerTask) -> OperationDone | OperationFailed:
    """Do a stage-in or a stage-out, and nothing else."""
    buffer = os.path.join(work.home, "buffers", str(work.order.job))
    try:
        os.makedirs(os.path.join(buffer, "striped"), exist_ok=True)
        size_bytes = 0
        for transfer in work.order.transfers:
            head, _, rest = transfer.inside.partition("/")
            inside = os.path.join(buffer, VARIABLES.get(head, "striped"), rest)
            ways = (transfer.outside, inside) if work.order.stage == "stage_in" else (inside, transfer.outside)
            size_bytes += copy(transfer.kind, *ways)
            if work.order.special is not None and any(choice.move for choice in work.order.special.choices):
                os.unlink(ways[0]) if transfer.kind is TransferKind.FILE else shutil.rmtree(ways[0])
        return OperationDone(size_bytes=size_bytes)
    except OSError as error:
        return OperationFailed(message=f"{error}")


def main() -> int:
    """Read the work as the real worker does, do it, say so."""
    work = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerTask)
    sys.stdout.buffer.write(msgspec.json.encode(perform(work)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

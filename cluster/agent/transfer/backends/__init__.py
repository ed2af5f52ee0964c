"""What may move data beside Forebay itself: rsync, rclone, a site's own program. One way for all of them.

Theory of operation
===================

A program is told what to copy and writes it into a *scratch directory*, which is ours: in the staging directory of the
attempt, so that it is fenced, swept and on the destination's file system like every temporary file. Nothing that a
program says is believed. What lies in the scratch directory is compared with the manifest and with the source (sizes,
and the digests of both sides at the levels that have digests), gets its metadata, is made durable, and takes its name
by the same rename as a file that Forebay copied itself. So the receipts, the checkpoints and what an interrupted
transfer leaves at the destination (absent, old or complete) do not depend on who moved the data.

    tools       what a program is to us, and the three: rsync, rclone, template
    programs    running one: found, watched, held to the rate, ended
    scratch     the scratch directory, by descriptors
    placing     comparing, and putting in place
    moving      batches: run, compare, try again, put in place
"""

from __future__ import annotations

from cluster.agent.transfer.backends.moving import move_by
from cluster.agent.transfer.backends.tools import Backend, Rclone, Rsync, Template
from cluster.agent.transfer.copying import helpers
from cluster.agent.transfer.copying.transfer_state import TransferState
from cluster.agent.transfer.records.errors import TransferFailed

NATIVE = "native"


def copy_all(transfer: TransferState) -> None:
    """Copy every pending file by the backend of its item. TransferFailed names the one that cannot be; Fenced."""
    for name in dict.fromkeys(item.backend for item in transfer.items):
        if name != NATIVE:
            move_by(transfer, backend_of(transfer, name))
    helpers.copy_all(transfer)


def backend_of(transfer: TransferState, name: str) -> Backend:
    """Return the backend of a name. TransferFailed if there is none."""
    if name == "rsync":
        return Rsync(sparse=transfer.options.sparse)
    if name == "rclone":
        return Rclone()
    if name == "template":
        return Template(transfer.options.template)
    raise TransferFailed(f"{name!r} is no backend of this release; use native, rsync, rclone or template")

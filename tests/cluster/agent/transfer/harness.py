"""Items, and a place for their records, without an agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forebay.cluster.agent.files.paths import FileIdentity, Target
from forebay.cluster.agent.transfer.options import ItemKind, TransferItem, TransferOptions
from forebay.cluster.agent.transfer.progress import Counters, no_op
from forebay.cluster.agent.transfer.rate_limit import Pace
from forebay.cluster.agent.transfer.receipts import ReceiptLine, read_lines
from forebay.cluster.agent.transfer.transfer import run_transfer
from forebay.cluster.agent.transfer.transfer_state import TransferContext
from forebay.cluster.agent.transfer.workspace import Workspace
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import TransferReceipt

TAG = ".forebay-7-0123abcd"

SMALL = TransferOptions(chunk_bytes=4096, large_bytes=16384)
"""Files of 16 KiB count as large, so that a test of chunks costs nothing."""


class Unpaced(Pace):
    """No limit, and no end from outside but by `end`."""

    def __init__(self) -> None:
        """Begin with no agent that decides anything."""
        self._ended = self._words = None


class Harness:
    """A source, a destination, and an agent's directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "source"
        self.destination = directory / "destination"
        self.home = directory / "home"
        for made in (self.source, self.destination, self.home):
            made.mkdir()
        self._open: list[int] = []
        self.told: list[Counters] = []
        self.pace: Pace = Unpaced()
        self.planned: Callable[[], object] = no_op
        """Called between the walk and the copying."""
        self.before_removal: Callable[[], object] = no_op
        """Called before each source is removed."""
        self.attempt = 0

    def close(self) -> None:
        """Close the anchors."""
        while self._open:
            os.close(self._open.pop())

    def target(self, path: Path) -> Target:
        """Return the target of a path beneath the harness's directory."""
        anchor = open_directory(self.directory)
        self._open.append(anchor)
        return Target(anchor, str(self.directory), path.relative_to(self.directory).parts)

    def item(
        self,
        kind: ItemKind = ItemKind.DIRECTORY,
        source: Path | None = None,
        destination: Path | None = None,
        *,
        barred: FileIdentity | None = None,
        staging: int = -1,
        move: bool = False,
    ) -> TransferItem:
        """Return an item; of whole source to whole destination if nothing else is said."""
        return TransferItem(
            kind,
            self.target(source or self.source),
            self.target(destination or self.destination),
            barred,
            barred,
            staging,
            move=move,
        )

    @contextmanager
    def workspace(self) -> Iterator[Workspace]:
        """Open the records of the next attempt."""
        self.attempt += 1
        home = open_directory(self.home)
        workspace = Workspace.open(home, 7, self.attempt, "stage_out")
        try:
            yield workspace
        finally:
            workspace.close()
            os.close(home)

    def carry(self, items: Sequence[TransferItem] | None = None, options: TransferOptions = SMALL) -> TransferReceipt:
        """Carry as the next attempt."""
        self.told = []
        with self.workspace() as workspace:
            return run_transfer(
                [self.item()] if items is None else items,
                options,
                TransferContext(
                    TAG,
                    workspace,
                    SystemClock(),
                    progress=self.told.append,
                    pace=self.pace,
                    stage=Stage.STAGE_OUT,
                    attempt=self.attempt,
                    planned=lambda _: self.planned(),
                    before_removal=lambda: self.before_removal(),
                ),
            )

    def lines(self) -> list[ReceiptLine]:
        """Return the receipt lines of the last attempt."""
        descriptor = os.open(self.home / "receipts" / f"7.{self.attempt}.stage_out", os.O_RDONLY)
        try:
            return list(read_lines(descriptor))
        finally:
            os.close(descriptor)

    def parts(self) -> list[Path]:
        """Return the temporary files that are left."""
        return sorted(self.destination.rglob(".forebay-*"))


def tree_of(directory: Path) -> dict[str, bytes | None]:
    """Return every path below a directory with its contents, None for a directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


def plant(directory: Path, tree: dict[str, object]) -> None:
    """Make a tree of files."""
    directory.mkdir(exist_ok=True)
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (directory / name).write_bytes(inner)
        else:
            assert isinstance(inner, dict)
            plant(directory / name, inner)

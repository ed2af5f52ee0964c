"""Part of a transfer that one process copies: batches in, files at their destinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from cluster.agent.limits import COPY_TRIES_MAX
from cluster.agent.transfer.copying import large
from cluster.agent.transfer.copying.small import SmallFiles, Unfinished
from cluster.agent.transfer.copying.tally import Moved, Tally
from cluster.agent.transfer.copying.transfer_state import Batch, TransferState
from cluster.agent.transfer.records.errors import SourceChanged, TransferFailed
from cluster.agent.transfer.records.manifest import Record


class Copier:
    """Copies batches one after the other."""

    def __init__(self, transfer: TransferState, tell: Callable[[Moved], None]) -> None:
        """Begin; `tell` is called with what was done, always by the thread that calls this."""
        self._transfer = transfer
        self._paths = transfer.paths()
        self._tally = Tally(tell)
        self._small = SmallFiles(transfer, self._paths, self._tally)

    def copy(self, batch: Batch) -> None:
        """Copy a batch; small files are certain to be durable only after `finish`.

        TransferFailed names the file that cannot be copied; Fenced, OSError (the agent's own records), or what the pace
        raises.
        """
        records = self._transfer.records(batch)
        try:
            if batch.large:
                for record in records:
                    self._large(record)
            else:
                self._small.copy(records, self._transfer.leaves(batch, records))
        except Unfinished as error:
            self._fail(error.record, error.__cause__)
        self._tally.tell()

    def finish(self) -> None:
        """Make all of it durable; otherwise as `copy`."""
        try:
            self._small.finish()
        except Unfinished as error:
            self._fail(error.record, error.__cause__)
        self._tally.tell()

    def close(self) -> None:
        """Close what is open."""
        self._small.close()
        self._paths.close()

    def __enter__(self) -> Copier:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""
        self.close()

    def _large(self, record: Record) -> None:
        try:
            large.copy_file(self._transfer, record, self._paths, self._tally)
        except (OSError, TransferFailed, SourceChanged) as error:
            self._fail(record, error)

    def _fail(self, record: Record, error: BaseException | None) -> NoReturn:
        if isinstance(error, SourceChanged):
            raise self._transfer.changed(record, COPY_TRIES_MAX) from error
        assert isinstance(error, OSError | TransferFailed)
        failure = self._transfer.failed(record, error)
        if failure is error:
            # Its cause is what it was: nothing is the cause of itself.
            raise failure
        raise failure from error

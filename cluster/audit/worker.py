"""`python -m cluster.audit.worker`: this release as a worker of another one (`cluster.audit.release`)."""

import sys
from collections.abc import Iterator
from typing import IO, Final

import msgspec

from forebay.cluster.audit.deciding import CommandOutcome, Deciding, ask_by_position
from forebay.cluster.audit.release import (
    DIALOGUE,
    Answer,
    AskDigests,
    Back,
    Fold,
    FoldResult,
    GivenCommand,
    LoadState,
    Mark,
    Question,
    TableDigests,
    WorkerDone,
    WorkerFailed,
    WorkerHello,
    read_frame,
    request_of,
    write_frame,
)
from forebay.cluster.system import TREE, collect_for_a_reader
from forebay.replica.messages import ReleaseNeeded, Request, features
from forebay.replica.state import EMPTY, State, table_digests
from forebay.replica.values import LedgerViolation
from forebay.snapshots import Assembly, ImageRejected
from forebay.wal import CodecError, EntryKind, decode_batch, kind_of

_questions: Final = msgspec.msgpack.Decoder(Question)
_encoder: Final = msgspec.msgpack.Encoder()


class Worker:
    """Present state and saved state of a fold."""

    def __init__(self) -> None:
        self._deciding = Deciding(EMPTY)
        self._marked = EMPTY

    def answer(self, question: Question) -> Answer:
        """Execute a request. Exceptions about an invalid ledger or image propagate."""
        match question:
            case LoadState(slices):
                self._deciding = Deciding(_state_of(slices))
            case Fold(entries, commands):
                return FoldResult(tuple(self._folded(entries, commands)))
            case AskDigests():
                return TableDigests(table_digests(self._deciding.state))
            case Mark():
                self._marked = self._deciding.state
            case Back():
                self._deciding = Deciding(self._marked)
        return WorkerDone()

    def _folded(
        self, entries: tuple[bytes, ...], commands: tuple[tuple[GivenCommand | None, ...], ...]
    ) -> Iterator[tuple[bytes, ...]]:
        for data, given in zip(entries, commands, strict=True):
            if kind_of(data) is not EntryKind.BATCH:
                yield ()
                continue
            batch = decode_batch(data)
            if batch.base != self._deciding.state.revision:
                yield ()  # void: another entry settled its revisions
                continue
            unknown: dict[int, str] = {}
            requests: list[Request | None] = [None] * len(batch.entries)
            for place, one in enumerate(given):
                try:
                    requests[place] = None if one is None else request_of(one)
                except (LookupError, msgspec.MsgspecError) as error:
                    unknown[place] = f"this release does not know the command: {error}"
            outcomes = self._deciding.settle(batch, ask_by_position(requests))
            for place, fault in unknown.items():
                outcomes[place] = CommandOutcome(fault=fault)
            yield tuple(b"" if one is None else _encoder.encode(one) for one in outcomes)


def _state_of(slices: tuple[tuple[int, bytes], ...]) -> State:
    if not slices:
        return EMPTY
    assembly = Assembly()
    for section, payload in slices:
        assembly.add(section, payload)
    assembly.finish()
    return assembly.image().state


def serve(reads: IO[bytes], writes: IO[bytes]) -> None:
    """Answer requests until the stream ends."""
    write_frame(writes, WorkerHello(DIALOGUE, str(TREE), features.FEATURE_LEVEL_KNOWN))
    worker = Worker()
    while (data := read_frame(reads)) is not None:
        try:
            answer = worker.answer(_questions.decode(data))
        except (CodecError, ReleaseNeeded, LedgerViolation, ImageRejected, msgspec.MsgspecError) as error:
            answer = WorkerFailed(str(error))
        write_frame(writes, answer)


if __name__ == "__main__":
    collect_for_a_reader()
    serve(sys.stdin.buffer, sys.stdout.buffer)

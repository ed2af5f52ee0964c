"""Another release as a worker process, called over a pipe to decide commands and fold a ledger.

The process is `python -m cluster.audit.worker` of the other tree, with that tree's packages and virtual environment.
This process imports no code of that tree. A state is sent as the slices of a snapshot image, history as the bytes of
the ledger, commands as MessagePack under their names. Every frame has one reply.
"""

import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

import msgspec

from forebay.cluster.audit.deciding import CommandOutcome
from forebay.cluster.system import python_of
from forebay.replica.messages import Actor, Command, Request, kind_of
from forebay.replica.messages import commands as c
from forebay.replica.state import State
from forebay.snapshots import Image, to_sections

DIALOGUE: Final = 1
"""Version of the pipe protocol."""

FRAME_BYTES_MAX: Final = 1 << 30
"""Limit of one frame, bytes: larger than a portion of full batches and its results."""

LENGTH_BYTES: Final = 8

ENDING_S: Final = 10
"""Time limit for a process to end after it closed its pipe, seconds; its last output is then complete."""

WORKER: Final = "forebay.cluster.audit.worker"


class GivenCommand(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Command as sent over the pipe: its name, and its fields as encoded for its digest."""

    id: bytes
    actor: Actor
    kind: str
    command: msgspec.Raw


class WorkerHello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of the worker, with the tree that it was loaded from."""

    dialogue: int
    tree: str
    feature_level: int


class LoadState(msgspec.Struct, frozen=True, tag="begin"):
    """Load a state from the slices of a snapshot; without slices, begin with an empty state."""

    slices: tuple[tuple[int, bytes], ...]


class Fold(msgspec.Struct, frozen=True, tag="fold"):
    """Settle these ledger entries, and decide the given commands, by batch and position."""

    entries: tuple[bytes, ...]
    commands: tuple[tuple[GivenCommand | None, ...], ...]


class AskDigests(msgspec.Struct, frozen=True, tag="digests"):
    """Return the digest of each table of the state."""


class Mark(msgspec.Struct, frozen=True, tag="mark"):
    """Save the present state."""


class Back(msgspec.Struct, frozen=True, tag="back"):
    """Go back to the saved state."""


class FoldResult(msgspec.Struct, frozen=True, tag="folded"):
    """Results of a Fold: encoded `CommandOutcome`s by batch and position, empty if not decided."""

    outcomes: tuple[tuple[bytes, ...], ...]


class TableDigests(msgspec.Struct, frozen=True, tag="table_digests"):
    """Digests of the non-empty tables of the state."""

    tables: Mapping[str, bytes]


class WorkerDone(msgspec.Struct, frozen=True, tag="done"):
    """Request completed."""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Request that is impossible for that release, with the cause."""

    sentence: str


Question = LoadState | Fold | AskDigests | Mark | Back
Answer = WorkerHello | FoldResult | TableDigests | WorkerDone | WorkerFailed

_encoder: Final = msgspec.msgpack.Encoder()
_answers: Final = msgspec.msgpack.Decoder(Answer)
_outcomes: Final = msgspec.msgpack.Decoder(CommandOutcome)


class ReleaseFailed(Exception):
    """Failure of the other release; the text is a sentence that names its tree."""


class BadTree(Exception):
    """Directory without a release; the text is a sentence."""


def write_frame(file: IO[bytes], message: Question | Answer) -> None:
    """Write one message."""
    data = _encoder.encode(message)
    file.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    file.write(data)
    file.flush()


def read_frame(file: IO[bytes]) -> bytes | None:
    """Return the bytes of the next message, None at the end of the stream.

    Raises:
        ValueError: The message is invalid.
    """
    head = file.read(LENGTH_BYTES)
    if not head:
        return None
    size = int.from_bytes(head, "big")
    if len(head) < LENGTH_BYTES or size > FRAME_BYTES_MAX:
        raise ValueError("the data is not a message")
    data = file.read(size)
    if len(data) < size:
        raise ValueError("a message is truncated")
    return data


def given_command(request: Request) -> GivenCommand:
    """Convert a request to its transfer form."""
    command = msgspec.Raw(_encoder.encode(request.command))
    return GivenCommand(request.id, request.actor, kind_of(request.command), command)


def request_of(one: GivenCommand) -> Request:
    """Convert a request from its transfer form.

    Raises:
        LookupError: This release does not know the command.
        msgspec.MsgspecError: This release does not know a field of it.
    """
    kind: type[Command] = c.KINDS[one.kind]
    return Request(one.id, one.actor, msgspec.msgpack.decode(one.command, type=kind))


def slices_of(state: State) -> tuple[tuple[int, bytes], ...]:
    """Return a state as the slices of an image; none for an empty state."""
    if not state.revision:
        return ()
    # The position in the ledger is irrelevant here, but an image needs one.
    image = Image(state, index=1, term=1, chain_digest=bytes(32))
    return tuple((piece.section, piece.payload) for piece in to_sections(image))


def _known(outcome: bytes) -> CommandOutcome:
    """Decode an outcome; if this release does not know its events, return an outcome with that fault."""
    try:
        return _outcomes.decode(outcome)
    except msgspec.MsgspecError as error:
        return CommandOutcome(fault=f"this release does not know its events: {error}")


class Release:
    """Worker of another tree; a context manager that ends it on exit."""

    def __init__(self, tree: Path) -> None:
        """Use a tree.

        Raises:
            BadTree: It has no release.
        """
        self.tree = tree.resolve()
        if not self.tree.is_dir():
            raise BadTree(f"{tree} is not a directory")
        if not (self.tree / "forebay" / "cluster" / "audit").is_dir():
            raise BadTree(f"{tree} has no release of Forebay: there is no forebay/cluster/audit in it")
        if not (self.tree / "forebay" / "cluster" / "audit" / "worker.py").is_file():
            raise BadTree(f"the release in {tree} cannot be used: it has no forebay/cluster/audit/worker.py")
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None

    def __enter__(self) -> "Release":
        python, environment = python_of(self.tree)
        self._errors = tempfile.TemporaryFile()
        try:
            self._process = subprocess.Popen(
                [python, "-P", "-m", WORKER],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
            )
            hello = self._answer()
        except OSError as error:
            self._errors.close()
            raise ReleaseFailed(f"{python} cannot be started: {error.strerror}") from error
        except BaseException:
            self.__exit__()
            raise
        if not isinstance(hello, WorkerHello) or hello.dialogue != DIALOGUE or Path(hello.tree) != self.tree:
            self.__exit__()
            where = (
                f"it uses the packages of {hello.tree}"
                if isinstance(hello, WorkerHello)
                else "its first message is not a greeting"
            )
            raise ReleaseFailed(f"the release in {self.tree} cannot be used: {where}")
        return self

    def __exit__(self, *exception: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()
        if self._errors is not None:
            self._errors.close()

    def begin(self, state: State) -> None:
        """Start the worker's fold with a state."""
        self._ask(LoadState(slices_of(state)))

    def send(self, batches: Iterable[tuple[bytes, Sequence[Request | None]]]) -> None:
        """Send batches from the ledger with their commands to decide; `outcomes` returns the results."""
        batches = list(batches)
        commands = tuple(
            tuple(None if one is None else given_command(one) for one in requests) for _, requests in batches
        )
        self._send(Fold(tuple(data for data, _ in batches), commands))

    def outcomes(self) -> list[list[CommandOutcome | None]]:
        """Return the results of the batches sent last."""
        answer = self._answer()
        assert isinstance(answer, FoldResult), answer
        return [[_known(one) if one else None for one in batch] for batch in answer.outcomes]

    def fold(self, entries: Iterable[bytes]) -> None:
        """Settle entries in the worker, and wait for the end."""
        entries = tuple(entries)
        self._ask(Fold(entries, ((),) * len(entries)))

    def digests(self) -> Mapping[str, bytes]:
        """Return the table digests of the worker's state, as `replica.state.table_digests` does."""
        answer = self._ask(AskDigests())
        assert isinstance(answer, TableDigests), answer
        return answer.tables

    def mark(self) -> None:
        """Save the worker's state."""
        self._ask(Mark())

    def back(self) -> None:
        """Return the worker to its saved state."""
        self._ask(Back())

    def _ask(self, question: Question) -> Answer:
        self._send(question)
        return self._answer()

    def _send(self, question: Question) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            write_frame(self._process.stdin, question)
        except OSError:
            raise self._ended() from None

    def _answer(self) -> Answer:
        assert self._process is not None and self._process.stdout is not None
        try:
            data = read_frame(self._process.stdout)
            answer: Answer | None = None if data is None else _answers.decode(data)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise ReleaseFailed(f"the release in {self.tree} sent an invalid message: {error}") from error
        if answer is None:
            raise self._ended()
        if isinstance(answer, WorkerFailed):
            raise ReleaseFailed(f"the release in {self.tree} cannot continue: {answer.sentence}")
        return answer

    def _ended(self) -> ReleaseFailed:
        assert self._process is not None and self._errors is not None
        try:
            code = self._process.wait(ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read(65_536).decode("utf-8", "replace").strip().splitlines()
        return ReleaseFailed(
            f"the release in {self.tree} ended ({code}): {lines[-1] if lines else 'without a message'}"
        )

"""What a witness decides: whether a checkpoint goes on from the one that it cosigned last (C2SP tlog-witness).

It believes a log by its signatures: a checkpoint of a Forebay ledger has those of a majority of the replicas, each by
its own ledger. It refuses what is smaller, what is of the same size and another root, and what does not go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cluster.security.proofs import (
    COSIGNATURE_KEY,
    NOTE_KEY,
    SIZE_TYPE,
    AddCheckpoint,
    Checkpoint,
    NoteError,
    ProofError,
    WitnessRequestError,
    VerifierKey,
    cosign,
    parse_checkpoint,
    parse_key,
    parse_note,
    parse_request,
    verifier_of,
    verify_consistency,
    verify_note,
)
from cluster.security.witness.keys import WitnessError
from cluster.security.witness.checkpoint_store import Evidence, CheckpointStore, SeenCheckpoint
from cluster.system import Clock
from replica.values import MICROSECONDS_PER_SECOND, plain

LOGGER = logging.getLogger(__name__)

TEXT_TYPE: Final = "text/plain; charset=utf-8"


class WitnessedLog(NamedTuple):
    """A log that is witnessed: the keys that may sign its checkpoints, and how many of them must have."""

    origin: str
    keys: tuple[VerifierKey, ...]
    least: int


class WitnessResponse(NamedTuple):
    """What is answered: a status of HTTP, and a body of that type."""

    status: int
    body: str
    content_type: str = TEXT_TYPE


def log_of(origin: str, keys: Sequence[VerifierKey]) -> WitnessedLog:
    """Return the log whose replicas have these keys: a majority of them must sign. WitnessError."""
    distinct = tuple(dict.fromkeys(keys))
    remedy = "write the keys of all its replicas, as `forebay audit keys` prints them"
    if not distinct:
        raise WitnessError(f"the log {origin} has no keys", remedy)
    for key in distinct:
        if key.name != origin or key.kind != NOTE_KEY:
            raise WitnessError(f"{key} is no key of a replica of {origin}", remedy)
    return WitnessedLog(origin, distinct, len(distinct) // 2 + 1)


def logs_in(text: str) -> list[WitnessedLog]:
    """Return the logs whose keys a text has, one on each line, by their names; WitnessError.

    Lines that begin with # are passed over, and keys of other witnesses.
    """
    keys: dict[str, list[VerifierKey]] = {}
    for line in (line.strip() for line in text.splitlines()):
        if line and not line.startswith("#"):
            try:
                key = parse_key(line)
            except NoteError as error:
                raise WitnessError(str(error), "write keys as `forebay audit keys` prints them") from error
            if key.kind == NOTE_KEY:
                keys.setdefault(key.name, []).append(key)
    return [log_of(origin, found) for origin, found in keys.items()]


class CheckpointWitness:
    """One witness; its calls wait for the disk, so they are made in a thread, and take turns."""

    def __init__(self, name: str, private: Ed25519PrivateKey, logs: Iterable[WitnessedLog], seen: CheckpointStore, clock: Clock) -> None:
        self._name = name
        self._private = private
        self._logs = {log.origin: log for log in logs}
        self._seen = seen
        self._clock = clock
        self._turn = threading.Lock()

    def renew(self, logs: Iterable[WitnessedLog]) -> None:
        """Cosign these logs, with these keys, from the next request on; what was cosigned of others is kept."""
        self._logs = {log.origin: log for log in logs}

    @property
    def key(self) -> VerifierKey:
        """What others verify its cosignatures with."""
        return verifier_of(self._name, self._private, COSIGNATURE_KEY)

    def add_checkpoint(self, body: bytes) -> WitnessResponse:
        """Answer a request: with a cosignature once it is noted on the disk, or with why there is none."""
        try:
            asked = parse_request(body)
            text, signatures = parse_note(asked.note)
            checkpoint = parse_checkpoint(text)
        except (WitnessRequestError, NoteError) as error:
            return WitnessResponse(400, f"{error}\n")
        log = self._logs.get(checkpoint.origin)
        if log is None:
            return WitnessResponse(404, "this log is not witnessed here\n")
        try:
            count = len(verify_note(asked.note, log.keys)[1])
        except NoteError as error:
            return WitnessResponse(403, f"{error}\n")
        if count < log.least:
            return WitnessResponse(403, f"{count} of its replicas have signed it, and {log.least} are a majority\n")
        if asked.old_size > checkpoint.size:
            return WitnessResponse(400, f"the checkpoint is of {checkpoint.size} leaves, and cannot go on from more\n")
        known = {(key.name, key.key_id) for key in log.keys}
        own = [one.line() for one in signatures if (one.name, one.key_id) in known]
        with self._turn:
            try:
                return self._go_on(asked, text, checkpoint, text + "\n" + "".join(own))
            except WitnessError as error:
                LOGGER.error("nothing is cosigned: %s", error)
                return WitnessResponse(500, "this witness cannot note what it cosigns\n")

    def _go_on(self, asked: AddCheckpoint, text: str, checkpoint: Checkpoint, note: str) -> WitnessResponse:
        last = self._seen.last(checkpoint.origin)
        at_s = self._clock.now() // MICROSECONDS_PER_SECOND
        conflict = WitnessResponse(409, f"{last.size}\n", SIZE_TYPE)
        if asked.old_size != last.size:
            if checkpoint.size < last.size:
                LOGGER.warning(
                    "%s was asked for %d leaves after %d were cosigned: an old checkpoint, or the log was set back",
                    plain(checkpoint.origin),
                    checkpoint.size,
                    last.size,
                )
            return conflict
        try:
            verify_consistency(last.size, checkpoint.size, last.root, checkpoint.root, asked.proof)
        except ProofError as error:
            is_split = checkpoint.size == last.size and checkpoint.root != last.root
            why = f"another root of {last.size} leaves was cosigned" if is_split else str(error)
            if checkpoint.root != last.root:
                self._seen.keep(Evidence(checkpoint.origin, at_s, why, note))
            LOGGER.error("%s does not go on from what was cosigned: %s", plain(checkpoint.origin), why)
            return conflict if is_split else WitnessResponse(422, f"{error}\n")
        signature = cosign(text, self._name, self._private, at_s)
        after = SeenCheckpoint(checkpoint.origin, checkpoint.size, checkpoint.root, at_s, note)
        if not self._seen.go_on(last, after):
            # Another process has the same database, and was quicker.
            return WitnessResponse(409, f"{self._seen.last(checkpoint.origin).size}\n", SIZE_TYPE)
        return WitnessResponse(200, signature.line())

"""Decision of a witness whether a checkpoint extends the last one that it cosigned (C2SP tlog-witness).

The signatures make a log trusted: a majority of the replicas signs each checkpoint of a Forebay ledger, each from its
own ledger. The witness rejects a smaller size, another root for the same size, and inconsistent growth.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.security.proofs import (
    COSIGNATURE_KEY,
    NOTE_KEY,
    SIZE_TYPE,
    AddCheckpoint,
    Checkpoint,
    NoteError,
    ProofError,
    VerifierKey,
    WitnessRequestError,
    cosign,
    parse_checkpoint,
    parse_key,
    parse_note,
    parse_request,
    verifier_of,
    verify_consistency,
    verify_note,
)
from forebay.cluster.system import Clock
from forebay.cluster.witness.checkpoint_store import CheckpointStore, Evidence, SeenCheckpoint
from forebay.cluster.witness.keys import WitnessError
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

LOGGER = logging.getLogger(__name__)

TEXT_TYPE: Final = "text/plain; charset=utf-8"


class WitnessedLog(NamedTuple):
    """A watched log: the keys that may sign its checkpoints, and the number of signatures required."""

    origin: str
    keys: tuple[VerifierKey, ...]
    least: int


class WitnessResponse(NamedTuple):
    """HTTP response: status, body and content type."""

    status: int
    body: str
    content_type: str = TEXT_TYPE


def log_of(origin: str, keys: Sequence[VerifierKey]) -> WitnessedLog:
    """Return the log with these replica keys; a majority of them must sign.

    Raises:
        WitnessError: The keys do not belong to replicas of the log.
    """
    distinct = tuple(dict.fromkeys(keys))
    remedy = "write the keys of all its replicas, as `forebay audit keys` prints them"
    if not distinct:
        raise WitnessError(f"the log {origin} has no keys", remedy)
    for key in distinct:
        if key.name != origin or key.kind != NOTE_KEY:
            raise WitnessError(f"{key} is not a key of a replica of {origin}", remedy)
    return WitnessedLog(origin, distinct, len(distinct) // 2 + 1)


def logs_in(text: str) -> list[WitnessedLog]:
    """Return the logs of a key list, one key per line, by name; lines with # and keys of witnesses are ignored.

    Raises:
        WitnessError: A line is not a key.
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
    """Witness of configured logs. Calls block on the disk, so they run in a thread, one at a time."""

    def __init__(
        self, name: str, private: Ed25519PrivateKey, logs: Iterable[WitnessedLog], seen: CheckpointStore, clock: Clock
    ) -> None:
        self._name = name
        self._private = private
        self._logs = {log.origin: log for log in logs}
        self._seen = seen
        self._clock = clock
        self._turn = threading.Lock()

    def renew(self, logs: Iterable[WitnessedLog]) -> None:
        """Replace the logs and their keys from the next request on. Stored checkpoints of other logs are kept."""
        self._logs = {log.origin: log for log in logs}

    @property
    def key(self) -> VerifierKey:
        """Return the public key of this witness's cosignatures."""
        return verifier_of(self._name, self._private, COSIGNATURE_KEY)

    def add_checkpoint(self, body: bytes) -> WitnessResponse:
        """Respond with a cosignature after storing the checkpoint durably, or with the reason of a rejection."""
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
            return WitnessResponse(
                403, f"{count} replicas of the log signed the checkpoint, and a majority is {log.least}\n"
            )
        if asked.old_size > checkpoint.size:
            return WitnessResponse(400, f"the checkpoint has {checkpoint.size} leaves, fewer than the old size\n")
        known = {(key.name, key.key_id) for key in log.keys}
        own = [one.line() for one in signatures if (one.name, one.key_id) in known]
        with self._turn:
            try:
                return self._go_on(asked, text, checkpoint, text + "\n" + "".join(own))
            except WitnessError as error:
                LOGGER.error("nothing is cosigned: %s", error)
                return WitnessResponse(500, "this witness cannot record its cosignatures\n")

    def _go_on(self, asked: AddCheckpoint, text: str, checkpoint: Checkpoint, note: str) -> WitnessResponse:
        last = self._seen.last(checkpoint.origin)
        at_s = self._clock.now() // MICROSECONDS_PER_SECOND
        conflict = WitnessResponse(409, f"{last.size}\n", SIZE_TYPE)
        if asked.old_size != last.size:
            if checkpoint.size < last.size:
                LOGGER.warning(
                    "%s: a cosignature of %d leaves was requested after %d were cosigned: an old checkpoint, or the "
                    "log was rolled back",
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
            LOGGER.error("%s does not extend its cosigned checkpoint: %s", plain(checkpoint.origin), why)
            return conflict if is_split else WitnessResponse(422, f"{error}\n")
        signature = cosign(text, self._name, self._private, at_s)
        after = SeenCheckpoint(checkpoint.origin, checkpoint.size, checkpoint.root, at_s, note)
        if not self._seen.go_on(last, after):
            # Another process with the same database has cosigned meanwhile.
            return WitnessResponse(409, f"{self._seen.last(checkpoint.origin).size}\n", SIZE_TYPE)
        return WitnessResponse(200, signature.line())

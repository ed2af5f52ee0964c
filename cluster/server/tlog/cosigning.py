"""Cosignatures of witnesses: the leader requests missing ones, within bounds, and never waits for them.

If a request continues from another size than the witness has cosigned, the witness answers 409 with that size. If its
size is larger than this ledger, the cluster was rolled back. If its size, or a proof from it, leads to another root,
the earlier history differs from the one that the witness saw. Both are logged with the witness's name, because the
replicas cannot detect them: all of them may have been altered alike. An unsigned answer only counts against the
cluster, never for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from forebay.cluster.security.proofs import (
    AddCheckpoint,
    Checkpoint,
    NoteError,
    Signature,
    VerifiedSignature,
    VerifierKey,
    WitnessRequestError,
    cosignature_in,
    parse_note,
    parse_size,
    verify_note,
)
from forebay.cluster.system import Clock

LOGGER = logging.getLogger(__name__)

BEFORE_PUBLICATION_S: Final = 2.0
"""Time limit for witnesses before a checkpoint is published, seconds; late cosignatures are added afterwards."""

ASK_S: Final = 8.0
"""Time limit of a witness, seconds: a checkpoint follows every ten seconds."""

ROUNDS_MAX: Final = 3
"""Maximum number of requests to a witness about one checkpoint: a second one if it reports another size, and a third
one if that size has changed meanwhile.
"""

RETRY_S: Final = 10.0
RETRY_S_MAX: Final = 300.0
"""Initial and maximum pause before a failed witness is asked again, seconds; doubled each time."""

ERROR_CHARACTERS_MAX: Final = 200
"""Maximum length of a quotation from a witness."""


class Witness(NamedTuple):
    """Configured witness: its name, and the key that verifies its cosignatures."""

    name: str
    key: VerifierKey


class WitnessReply(Protocol):
    """HTTP answer of a witness (`cluster.client.WitnessAnswer`)."""

    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


Submit = Callable[[str, bytes], Awaitable[WitnessReply]]
"""Sends a request to a witness. Raises NoAnswer, or LookupError if no address is configured."""

Consistency = Callable[[int, int], Awaitable[Sequence[bytes]]]
"""Returns the consistency proof between two sizes of this replica's tree.

Raises LookupError or TimeoutError if there is none yet.
"""


class NoAnswer(Exception):
    """The witness did not answer as required; the message gives the reason."""


class _Disputed(Exception):
    """The witness cosigned a history that differs from this ledger."""


class _Later(Exception):
    """The cosignature is missing for now, without a fault."""


@dataclass(slots=True)
class _Known:
    """State of the requests to one witness."""

    witness: Witness
    pause_s: float
    """Pause after a failure, seconds."""
    size: int = 0
    """Largest size that the witness is known to have cosigned."""
    at_s: int | None = None
    """Time of the witness's last cosignature, seconds since the epoch."""
    due_s: float = 0.0
    """Time of the next request, on the monotonic clock."""
    is_prompt: bool = True
    """True if the witness answered the last request in time."""
    is_asked: bool = False
    error: str = ""
    dispute: str = ""


class Cosigning:
    """Requests of one replica to its witnesses."""

    def __init__(
        self,
        witnesses: Iterable[Witness],
        needed: int,
        *,
        submit: Submit,
        consistency: Consistency,
        applied_index: Callable[[], int],
        clock: Clock,
    ) -> None:
        """Initialize for these witnesses. `needed`: number of cosignatures of a witnessed checkpoint."""
        self._known = [_Known(one, RETRY_S) for one in witnesses]
        self.needed = needed
        self._submit = submit
        self._consistency = consistency
        self._applied_index = applied_index
        self._clock = clock
        self._last_verified: tuple[str, list[VerifiedSignature]] = "", []

    def renew(self, witnesses: Iterable[Witness], needed: int) -> None:
        """Use these witnesses from now on. The state of witnesses that remain is kept."""
        known = {one.witness: one for one in self._known}
        self._known = [known.get(one) or _Known(one, RETRY_S) for one in witnesses]
        self.needed = needed
        self._last_verified = "", []

    @property
    def witnesses(self) -> tuple[Witness, ...]:
        """Present witnesses."""
        return tuple(one.witness for one in self._known)

    @property
    def disputes(self) -> dict[str, str]:
        """Contradictions reported by witnesses: a sentence for each, by name."""
        return {one.witness.name: one.dispute for one in self._known if one.dispute}

    @property
    def errors(self) -> dict[str, str]:
        """Reasons why witnesses did not cosign at their last request, by name."""
        return {one.witness.name: one.error for one in self._known if one.error}

    def cosigned_by(self, note: str) -> tuple[str, ...]:
        """Return the names of the witnesses that cosigned a note, and record its ledger size for each."""
        found = {one.key: one.at_s for one in self._verified(note)}
        if not found:
            return ()
        size = int(note.split("\n", 2)[1])
        names = []
        for one in self._known:
            if one.witness.key in found:
                names.append(one.witness.name)
                one.size, one.at_s = max(one.size, size), found[one.witness.key]
        return tuple(names)

    def lines_of(self, note: str) -> dict[VerifierKey, Signature]:
        """Return the cosignatures in a note by witness key, one for each witness."""
        keys = {(one.key.name, one.key.key_id): one.key for one in self._verified(note)}
        return {
            keys[one.name, one.key_id]: one for one in parse_note(note.encode())[1] if (one.name, one.key_id) in keys
        }

    async def collect(
        self, checkpoint: Checkpoint, note: str, *, within_s: float = ASK_S, only_prompt: bool = False
    ) -> list[Signature]:
        """Request missing cosignatures of a note from due witnesses; return those received in time."""
        asked = self._asked_now(note, only_prompt=only_prompt)
        if not asked:
            return []
        found = await asyncio.gather(*(self._within(one, checkpoint, note, within_s) for one in asked))
        return [one for one in found if one is not None]

    def _asked_now(self, note: str, *, only_prompt: bool) -> list[_Known]:
        if not self._known:
            return []
        now_s, have = self._clock.monotonic_s(), {one.key for one in self._verified(note)}
        return [
            one
            for one in self._known
            if one.due_s <= now_s
            and not one.is_asked
            and one.witness.key not in have
            and (one.is_prompt or not only_prompt)
        ]

    async def _within(self, one: _Known, checkpoint: Checkpoint, note: str, within_s: float) -> Signature | None:
        began_s, one.is_asked = self._clock.monotonic_s(), True
        try:
            async with asyncio.timeout(within_s):
                signature = await self._ask(one, checkpoint, note)
        except TimeoutError:
            # Ask a slow witness again at once with more time. The next publication does not wait for it.
            was_prompt, one.is_prompt = one.is_prompt, False
            self._failed(one, f"no answer within {within_s:g} s", pause=not was_prompt)
        except _Disputed as error:
            one.dispute, one.error = str(error), ""
            LOGGER.critical("THE LEDGER CONTRADICTS WHAT THE WITNESS %s HAS COSIGNED: %s", one.witness.name, error)
            self._pause(one)
        except _Later as error:
            LOGGER.info("the witness %s will be asked again: %s", one.witness.name, error)
            one.due_s = self._clock.monotonic_s() + RETRY_S
        except (NoAnswer, NoteError, WitnessRequestError, LookupError) as error:
            self._failed(one, str(error))
        else:
            if one.dispute:
                LOGGER.warning("the witness %s cosigns again", one.witness.name)
            one.error = one.dispute = ""
            one.is_prompt = self._clock.monotonic_s() - began_s <= BEFORE_PUBLICATION_S
            one.pause_s, one.due_s = RETRY_S, 0.0
            return signature
        finally:
            one.is_asked = False
        return None

    async def _ask(self, one: _Known, checkpoint: Checkpoint, note: str) -> Signature:
        old_size = one.size if one.size <= checkpoint.size else 0
        for _ in range(ROUNDS_MAX):
            answer = await self._submit(one.witness.name, await self._request(old_size, checkpoint.size, note))
            if answer.status == 200:
                signature, verified = cosignature_in(checkpoint.text(), answer.body, one.witness.key)
                one.size, one.at_s = checkpoint.size, verified.at_s
                return signature
            if answer.status == 422 and old_size:
                raise _Disputed(f"the history before entry {old_size} differs from the one that the witness cosigned")
            if answer.status != 409:
                words = answer.body[:ERROR_CHARACTERS_MAX].decode(errors="replace")
                detail = "".join(filter(str.isprintable, words)).strip()
                raise NoAnswer(f"it answered with status {answer.status}" + (f": {detail}" if detail else ""))
            size = parse_size(answer.body)
            if size > self._applied_index():
                raise _Disputed(
                    f"the witness cosigned {size} entries, and this ledger has {self._applied_index()}: the ledger "
                    "was rolled back"
                )
            one.size = size
            if size > checkpoint.size:
                raise _Later(f"the witness has already cosigned {size} entries; this checkpoint has {checkpoint.size}")
            if size == old_size and size == checkpoint.size:
                raise _Disputed(f"the witness cosigned another root of the first {size} entries")
            old_size = size
        raise NoAnswer(f"it still reports {old_size} entries after {ROUNDS_MAX} requests")

    async def _request(self, old_size: int, size: int, note: str) -> bytes:
        try:
            proof = await self._consistency(old_size, size) if 0 < old_size < size else ()
        except (LookupError, TimeoutError) as error:
            raise _Later(f"the proof from {old_size} to {size} is not available yet: {error}") from error
        return AddCheckpoint(old_size, tuple(proof), note.encode()).encode()

    def _failed(self, one: _Known, sentence: str, *, pause: bool = True) -> None:
        if sentence != one.error:
            LOGGER.warning("the witness %s has not cosigned: %s", one.witness.name, sentence)
        one.error = sentence
        if pause:
            self._pause(one)

    def _pause(self, one: _Known) -> None:
        one.due_s = self._clock.monotonic_s() + one.pause_s
        one.pause_s = min(2 * one.pause_s, RETRY_S_MAX)

    def _verified(self, note: str) -> list[VerifiedSignature]:
        if not note or not self._known:
            return []
        if note != self._last_verified[0]:
            try:
                found = verify_note(note.encode(), [one.witness.key for one in self._known])[1]
            except NoteError:
                found = []
            self._last_verified = note, found
        return self._last_verified[1]

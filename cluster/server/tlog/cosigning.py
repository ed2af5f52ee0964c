"""Cosignatures of witnesses: the leader asks those who lack a checkpoint for theirs, within bounds, and never waits.

A witness says 409 and what it has cosigned where it is asked to go on from something else: with more than this ledger
has, the cluster was set back; where that size, or a proof from there, leads to another root, the history before it is
another one than the witness saw. Both are told by name, since no replica can find them out: all of them may have been
altered alike. What a witness answers is only believed against the cluster, never for it, without a signature.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from cluster.security.proofs import (
    AddCheckpoint,
    Checkpoint,
    NoteRefused,
    RequestRefused,
    Signature,
    Verified,
    VerifierKey,
    cosignature_in,
    parse_note,
    parse_size,
    verify_note,
)
from cluster.system import Clock

LOGGER = logging.getLogger(__name__)

BEFORE_PUBLICATION_S: Final = 2.0
"""How long a checkpoint waits for its witnesses before it is published, seconds; those who are slow follow later."""

ASK_S: Final = 8.0
"""How long a witness may take, seconds: a checkpoint comes every ten."""

ROUNDS_MAX: Final = 3
"""Requests to a witness about one checkpoint, count: a second one where it says what it has, a third where that has
changed meanwhile."""

RETRY_S: Final = 10.0
RETRY_S_MAX: Final = 300.0
"""Until a witness that gave nothing is asked again, seconds: doubled each time, up to the second."""

ERROR_CHARACTERS_MAX: Final = 200
"""What is repeated of a witness's own words, characters."""


class Witness(NamedTuple):
    """A witness as it is configured: its name, and what its cosignatures are verified with."""

    name: str
    key: VerifierKey


class Answered(Protocol):
    """What a witness answered (`cluster.client.WitnessAnswer`)."""

    @property
    def status(self) -> int: ...
    @property
    def body(self) -> bytes: ...


Submit = Callable[[str, bytes], Awaitable[Answered]]
"""Sends a request to a witness; raises NoAnswer, or LookupError where there is nobody who could."""

Consistency = Callable[[int, int], Awaitable[Sequence[bytes]]]
"""Proof of consistency between two sizes of the own tree; LookupError or TimeoutError where there is none yet."""


class NoAnswer(Exception):
    """A witness could not be asked; the sentence says why."""


class _Disputed(Exception):
    """A witness has seen what is not in this ledger."""


class _Later(Exception):
    """Nothing is wrong, and there is no cosignature now."""


@dataclass(slots=True)
class _Known:
    """What is known of a witness."""

    witness: Witness
    pause_s: float
    """How long it is left alone where it gives nothing, seconds."""
    size: int = 0
    """What it has cosigned, as far as is known here."""
    at_s: int | None = None
    """The time of its last cosignature, seconds of the epoch."""
    due_s: float = 0.0
    """Not asked before, on the monotonic clock."""
    is_prompt: bool = True
    """Whether it answered in time when it was asked last."""
    is_asked: bool = False
    error: str = ""
    dispute: str = ""


class Cosigning:
    """The witnesses of one replica, and what is known of each."""

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
        """`needed`: how many of them must have cosigned a checkpoint that is called witnessed."""
        self._known = [_Known(one, RETRY_S) for one in witnesses]
        self.needed = needed
        self._submit = submit
        self._consistency = consistency
        self._applied_index = applied_index
        self._clock = clock
        self._last_verified: tuple[str, list[Verified]] = "", []

    def renew(self, witnesses: Iterable[Witness], needed: int) -> None:
        """Ask these from now on; what is known of those that were there before stays."""
        known = {one.witness: one for one in self._known}
        self._known = [known.get(one) or _Known(one, RETRY_S) for one in witnesses]
        self.needed = needed
        self._last_verified = "", []

    @property
    def witnesses(self) -> tuple[Witness, ...]:
        """Who is asked."""
        return tuple(one.witness for one in self._known)

    @property
    def disputes(self) -> dict[str, str]:
        """What witnesses have seen that is not in this ledger: a sentence for each, by its name."""
        return {one.witness.name: one.dispute for one in self._known if one.dispute}

    @property
    def errors(self) -> dict[str, str]:
        """Why others did not cosign when they were asked last."""
        return {one.witness.name: one.error for one in self._known if one.error}

    def cosigned_by(self, note: str) -> tuple[str, ...]:
        """Return the names of the witnesses that have cosigned a note, and remember how far they are."""
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
        """Return the cosignatures of witnesses in a note, one of each."""
        keys = {(one.key.name, one.key.key_id): one.key for one in self._verified(note)}
        return {
            keys[one.name, one.key_id]: one for one in parse_note(note.encode())[1] if (one.name, one.key_id) in keys
        }

    async def collect(
        self, checkpoint: Checkpoint, note: str, *, within_s: float = ASK_S, only_prompt: bool = False
    ) -> list[Signature]:
        """Ask those who have not cosigned a note and are due; return what they gave within this time."""
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
            # Whoever was slow is not waited for next time, and asked again at once, with more time.
            was_prompt, one.is_prompt = one.is_prompt, False
            self._failed(one, f"no answer within {within_s:g} s", pause=not was_prompt)
        except _Disputed as error:
            one.dispute, one.error = str(error), ""
            LOGGER.critical("THE LEDGER IS NOT WHAT THE WITNESS %s HAS SEEN: %s", one.witness.name, error)
            self._pause(one)
        except _Later as error:
            LOGGER.info("the witness %s cosigns later: %s", one.witness.name, error)
            one.due_s = self._clock.monotonic_s() + RETRY_S
        except (NoAnswer, NoteRefused, RequestRefused, LookupError) as error:
            self._failed(one, str(error))
        else:
            if one.dispute:
                LOGGER.warning("the witness %s goes along again", one.witness.name)
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
                raise _Disputed(f"the history before entry {old_size} is another one than that which it cosigned")
            if answer.status != 409:
                words = answer.body[:ERROR_CHARACTERS_MAX].decode(errors="replace")
                raise NoAnswer(f"it answers {answer.status}: {''.join(filter(str.isprintable, words))}")
            size = parse_size(answer.body)
            if size > self._applied_index():
                raise _Disputed(
                    f"it has cosigned {size} entries, and this ledger has {self._applied_index()}: it was set back"
                )
            one.size = size
            if size > checkpoint.size:
                raise _Later(f"it has cosigned {size} entries already, and this checkpoint is of {checkpoint.size}")
            if size == old_size and size == checkpoint.size:
                raise _Disputed(f"it has cosigned another root of the first {size} entries")
            old_size = size
        raise NoAnswer(f"it says after {ROUNDS_MAX} requests that it has {old_size} entries")

    async def _request(self, old_size: int, size: int, note: str) -> bytes:
        try:
            proof = await self._consistency(old_size, size) if 0 < old_size < size else ()
        except (LookupError, TimeoutError) as error:
            raise _Later(f"the proof from {old_size} to {size} is not to be had yet: {error}") from error
        return AddCheckpoint(old_size, tuple(proof), note.encode()).encoded()

    def _failed(self, one: _Known, sentence: str, *, pause: bool = True) -> None:
        if sentence != one.error:
            LOGGER.warning("the witness %s has not cosigned: %s", one.witness.name, sentence)
        one.error = sentence
        if pause:
            self._pause(one)

    def _pause(self, one: _Known) -> None:
        one.due_s = self._clock.monotonic_s() + one.pause_s
        one.pause_s = min(2 * one.pause_s, RETRY_S_MAX)

    def _verified(self, note: str) -> list[Verified]:
        if not note or not self._known:
            return []
        if note != self._last_verified[0]:
            try:
                found = verify_note(note.encode(), [one.witness.key for one in self._known])[1]
            except NoteRefused:
                found = []
            self._last_verified = note, found
        return self._last_verified[1]

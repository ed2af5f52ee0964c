"""Signed notes, checkpoints and cosignatures (v1).

As specified by C2SP: signed-note, tlog-checkpoint, tlog-cosignature. Keys are Ed25519. A key is identified by its name
and a key ID: four bytes derived from name, kind and public key.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from forebay.cluster.security.proofs.tree import HASH_BYTES, MAX_SIZE

NOTE_KEY = 0x01
COSIGNATURE_KEY = 0x04
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64
KEY_ID_BYTES = 4
# A note has three lines and one signature per replica and witness; this bound on parsing is far larger.
MAX_NOTE_BYTES = 64 * 1024
MAX_SIGNATURES = 64
MAX_COSIGNED_AT_S = 2**63 - 1

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,19}")
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f]")
_SIGNATURE_LINE = re.compile(r"— (?P<name>[^\s+]+) (?P<value>[A-Za-z0-9+/]+={0,2})")


class NoteError(ValueError):
    """A note, checkpoint or key is malformed, or a signature does not match its key."""


class UnsignedNoteError(NoteError):
    """A note without a signature of a known key."""


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """Public key of a trusted signer: name, kind (NOTE_KEY or COSIGNATURE_KEY) and 32 bytes."""

    name: str
    kind: int
    public: bytes

    def __post_init__(self) -> None:
        if not self.name or "+" in self.name or any(one.isspace() or one < " " for one in self.name):
            raise NoteError(f"{self.name!r} cannot be the name of a key: it is empty, or contains a space or a plus")
        if self.kind not in {NOTE_KEY, COSIGNATURE_KEY} or len(self.public) != PUBLIC_KEY_BYTES:
            raise NoteError(f"the key {self.name} is not an Ed25519 key of kind 1 or 4")

    @property
    def key_id(self) -> bytes:
        text = self.name.encode() + b"\n" + bytes([self.kind]) + self.public
        return hashlib.sha256(text).digest()[:KEY_ID_BYTES]

    def __str__(self) -> str:
        """Return the verifier form, `name+key id+key`."""
        return f"{self.name}+{self.key_id.hex()}+{_encode_base64(bytes([self.kind]) + self.public)}"


def parse_key(text: str) -> VerifierKey:
    """Parse a key in verifier form.

    Raises:
        NoteError: The text is not a key, or the ID does not match.
    """
    name, id_hex, encoded = [*text.split("+", 2), "", ""][:3]
    held = _decode_base64(encoded, f"the key {name!r}")
    key = VerifierKey(name, held[0] if held else 0, held[1:])
    if key.key_id.hex() != id_hex:
        raise NoteError(f"the key {name} has the ID {key.key_id.hex()}, but is written with {id_hex!r}")
    return key


@dataclass(frozen=True, slots=True)
class Signature:
    """Unverified signature line: after the key ID, 64 bytes, or 72 for a cosignature."""

    name: str
    key_id: bytes
    value: bytes

    def line(self) -> str:
        return f"— {self.name} {_encode_base64(self.key_id + self.value)}\n"


@dataclass(frozen=True, slots=True)
class VerifiedSignature:
    """A verified signature; `at_s` is a cosigner's signing time, seconds since 1970, None for others."""

    key: VerifierKey
    at_s: int | None


def verifier_of(name: str, private: Ed25519PrivateKey, kind: int = NOTE_KEY) -> VerifierKey:
    return VerifierKey(name, kind, private.public_key().public_bytes_raw())


def sign(text: str, name: str, private: Ed25519PrivateKey) -> Signature:
    """Sign a note's text, which ends with a newline."""
    _check_text(text)
    return Signature(name, verifier_of(name, private).key_id, private.sign(text.encode()))


def cosign(text: str, name: str, private: Ed25519PrivateKey, at_s: int) -> Signature:
    """Cosign (v1) a checkpoint's text at `at_s`, seconds since 1970."""
    if not 0 <= at_s <= MAX_COSIGNED_AT_S:
        raise NoteError(f"a cosignature cannot have the time {at_s} s")
    parse_checkpoint(text)
    value = at_s.to_bytes(8, "big") + private.sign(_cosigned_text(text, at_s))
    return Signature(name, verifier_of(name, private, COSIGNATURE_KEY).key_id, value)


def write_note(text: str, signatures: Iterable[Signature]) -> str:
    _check_text(text)
    return text + "\n" + "".join(one.line() for one in signatures)


def parse_note(held: bytes) -> tuple[str, list[Signature]]:
    """Return the text and the unverified signatures of a note.

    Raises:
        NoteError: The bytes are not a note.
    """
    if len(held) > MAX_NOTE_BYTES:
        raise NoteError(f"a note has at most {MAX_NOTE_BYTES} bytes")
    try:
        whole = held.decode()
    except UnicodeDecodeError as error:
        raise NoteError("the note is not UTF-8") from error
    text, empty_line, below = whole.rpartition("\n\n")
    if not empty_line or not below.endswith("\n"):
        raise NoteError("a note must have a text, an empty line and signature lines")
    text += "\n"
    _check_text(text)
    lines = below[:-1].split("\n")
    if len(lines) > MAX_SIGNATURES:
        raise NoteError(f"a note has at most {MAX_SIGNATURES} signatures")
    return text, [_parse_signature(line) for line in lines]


def verify_note(held: bytes, keys: Sequence[VerifierKey]) -> tuple[str, list[VerifiedSignature]]:
    """Return the text and one verified signature of each known signer; unknown keys are ignored.

    Raises:
        UnsignedNoteError: No known key has signed.
        NoteError: A known key's signature is false.
    """
    text, signatures = parse_note(held)
    known = {(key.name, key.key_id): key for key in keys}
    verified: dict[VerifierKey, VerifiedSignature] = {}
    for one in signatures:
        key = known.get((one.name, one.key_id))
        if key is not None:
            verified.setdefault(key, _verify(text, one, key))
    if not verified:
        raise UnsignedNoteError("the note has no signature of a known key")
    return text, list(verified.values())


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Checkpoint of a log: origin, size in leaves, and root (32 bytes)."""

    origin: str
    size: int
    root: bytes

    def __post_init__(self) -> None:
        if not self.origin or "\n" in self.origin:
            raise NoteError("the origin of a checkpoint must be a non-empty line")
        if not 0 <= self.size <= MAX_SIZE or len(self.root) != HASH_BYTES:
            raise NoteError(f"a checkpoint must have a size below 2^64 and a root of {HASH_BYTES} bytes")

    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{_encode_base64(self.root)}\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """Parse a note's text as a checkpoint; further lines are extensions of other logs and are ignored."""
    _check_text(text)
    lines = text[:-1].split("\n")
    if len(lines) < 3 or not all(lines):
        raise NoteError("a checkpoint must have at least three non-empty lines: origin, size, root")
    if not _DECIMAL.fullmatch(lines[1]):
        raise NoteError(f"the size of a checkpoint must be a decimal number, not {lines[1][:40]!r}")
    return Checkpoint(lines[0], int(lines[1]), _decode_base64(lines[2], "the root of the checkpoint"))


def _verify(text: str, signature: Signature, key: VerifierKey) -> VerifiedSignature:
    value, message, at_s = signature.value, text.encode(), None
    if key.kind == COSIGNATURE_KEY:
        at_s = int.from_bytes(value[:8], "big")
        value, message = value[8:], _cosigned_text(text, at_s)
        if at_s > MAX_COSIGNED_AT_S:
            raise NoteError(f"the cosignature of {key.name} has no valid time")
        parse_checkpoint(text)
    if len(value) != SIGNATURE_BYTES:
        raise NoteError(f"the signature of {key.name} has {len(value)} bytes instead of {SIGNATURE_BYTES}")
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(value, message)
    except InvalidSignature as error:
        raise NoteError(f"the signature of {key.name} does not match this text") from error
    return VerifiedSignature(key, at_s)


def _cosigned_text(text: str, at_s: int) -> bytes:
    return f"cosignature/v1\ntime {at_s}\n{text}".encode()


def _parse_signature(line: str) -> Signature:
    found = _SIGNATURE_LINE.fullmatch(line)
    if found is None:
        raise NoteError(f"{line[:80]!r} is not a signature line (— name base64)")
    held = _decode_base64(found["value"], f"the signature of {found['name']}")
    if len(held) <= KEY_ID_BYTES:
        raise NoteError(f"the signature of {found['name']} is empty")
    return Signature(found["name"], held[:KEY_ID_BYTES], held[KEY_ID_BYTES:])


def _check_text(text: str) -> None:
    if not text.endswith("\n") or _CONTROL.search(text):
        raise NoteError("the text of a note must end with a newline and contain no other control characters")


def _encode_base64(held: bytes) -> str:
    return base64.b64encode(held).decode()


def _decode_base64(text: str, what: str) -> bytes:
    try:
        held = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise NoteError(f"{what} is not base64") from error
    # Unused bits in the last character would allow two spellings of one signature.
    if _encode_base64(held) != text:
        raise NoteError(f"{what} is not canonical base64")
    return held

"""Requests to a witness and its responses, as specified by C2SP tlog-witness, and the key file of a cosigner."""

import base64
import re
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.security.proofs.notes import (
    COSIGNATURE_KEY,
    MAX_NOTE_BYTES,
    NoteError,
    Signature,
    VerifiedSignature,
    VerifierKey,
    parse_note,
    verifier_of,
    verify_note,
)
from forebay.cluster.security.proofs.tree import HASH_BYTES, MAX_SIZE

MAX_PROOF_HASHES = 63
"""Maximum number of hashes in a consistency proof: the protocol's limit."""

MAX_REQUEST_BYTES = MAX_NOTE_BYTES + 4096
"""Maximum size of a request, bytes: a line with a size, MAX_PROOF_HASHES lines of 45 bytes, and a note."""

MAX_ANSWER_BYTES = 8192
"""Maximum size read of a witness's response, bytes: some signature lines, or a size."""

SIZE_TYPE = "text/x.tlog.size"
"""Content type of a 409 response, which contains the size that the witness has cosigned."""

_OLD = re.compile(r"old (0|[1-9][0-9]{0,19})")
_SIZE = re.compile(rb"(0|[1-9][0-9]{0,19})\n")
_SIGNER = re.compile(r"PRIVATE\+KEY\+(?P<name>[^+\s]+)\+(?P<id>[0-9a-f]{8})\+(?P<key>[A-Za-z0-9+/]+=*)")


class WitnessRequestError(ValueError):
    """The request violates the protocol."""


@dataclass(frozen=True, slots=True)
class AddCheckpoint:
    """Request to a witness to continue from a tree of `old_size` leaves to the checkpoint in `note`."""

    old_size: int
    proof: tuple[bytes, ...]
    note: bytes

    def encode(self) -> bytes:
        """Return the body of the request."""
        lines = [f"old {self.old_size}", *(base64.b64encode(one).decode() for one in self.proof), "", ""]
        return "\n".join(lines).encode() + self.note


def parse_request(body: bytes) -> AddCheckpoint:
    """Parse a request's body; the note is not checked.

    Raises:
        WitnessRequestError: The body violates the protocol.
    """
    if len(body) > MAX_REQUEST_BYTES:
        raise WitnessRequestError(f"a request may have at most {MAX_REQUEST_BYTES} bytes")
    head, empty, note = body.partition(b"\n\n")
    try:
        old, *lines = head.decode("ascii").split("\n")
    except UnicodeDecodeError as error:
        raise WitnessRequestError("the lines before the checkpoint are not ASCII") from error
    found = _OLD.fullmatch(old)
    if not empty or found is None or int(found[1]) > MAX_SIZE:
        raise WitnessRequestError(
            "a request must begin with a line `old SIZE`, and have an empty line before its checkpoint"
        )
    if len(lines) > MAX_PROOF_HASHES:
        raise WitnessRequestError(f"a consistency proof may have at most {MAX_PROOF_HASHES} hashes")
    return AddCheckpoint(int(found[1]), tuple(map(_hash, lines)), note)


def parse_size(body: bytes) -> int:
    """Return the size in a 409 response.

    Raises:
        WitnessRequestError: The size is invalid.
    """
    found = _SIZE.fullmatch(body)
    if found is None or int(found[1]) > MAX_SIZE:
        raise WitnessRequestError(f"{body[:40]!r} is not a size")
    return int(found[1])


def cosignature_in(text: str, answer: bytes, key: VerifierKey) -> tuple[Signature, VerifiedSignature]:
    """Return the cosignature of a checkpoint's text by `key` from a 200 response.

    Raises:
        NoteError: The cosignature is missing or invalid.
    """
    held = text.encode() + b"\n" + answer
    verified = verify_note(held, [key])[1][0]
    own = next(one for one in parse_note(held)[1] if (one.name, one.key_id) == (key.name, key.key_id))
    return own, verified


def write_signer(name: str, private: Ed25519PrivateKey) -> str:
    """Return the text of a cosigner's key file, in the format of C2SP signed-note, of kind COSIGNATURE_KEY."""
    public = verifier_of(name, private, COSIGNATURE_KEY)
    held = bytes([COSIGNATURE_KEY]) + private.private_bytes_raw()
    return f"PRIVATE+KEY+{name}+{public.key_id.hex()}+{base64.b64encode(held).decode()}\n"


def parse_signer(text: str) -> tuple[str, Ed25519PrivateKey]:
    """Parse the output of `write_signer`.

    Raises:
        NoteError: The text is invalid.
    """
    found = _SIGNER.fullmatch(text.removesuffix("\n"))
    held = b"" if found is None else base64.b64decode(found["key"])
    if found is None or len(held) != 1 + HASH_BYTES or held[0] != COSIGNATURE_KEY:
        raise NoteError("this is not the key of a cosigner: one line, PRIVATE+KEY+name+id+key")
    private = Ed25519PrivateKey.from_private_bytes(held[1:])
    if verifier_of(found["name"], private, COSIGNATURE_KEY).key_id.hex() != found["id"]:
        raise NoteError(f"the key {found['name']} does not match the ID that it is written with")
    return found["name"], private


def _hash(line: str) -> bytes:
    try:
        held = base64.b64decode(line, validate=True)
    except ValueError as error:
        raise WitnessRequestError(f"{line[:50]!r} is not a hash in base64") from error
    if len(held) != HASH_BYTES or base64.b64encode(held).decode() != line:
        raise WitnessRequestError(f"{line[:50]!r} is not a hash of {HASH_BYTES} bytes in base64")
    return held

"""Private key of a witness: one file, accessible to its owner only, with the name for cosignatures."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.security.proofs import (
    COSIGNATURE_KEY,
    NoteError,
    VerifierKey,
    parse_signer,
    verifier_of,
    write_signer,
)
from forebay.cluster.system import new_private_file, sync_directory

KEY_MODE: Final = 0o600
OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
KEY_BYTES_MAX: Final = 4096


class WitnessError(Exception):
    """The witness cannot work. `sentence` gives the problem, `remedy` the solution."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(f"{sentence}; {remedy}")
        self.sentence = sentence
        self.remedy = remedy


def make_key(path: Path, name: str) -> VerifierKey:
    """Create a key in a new file, and return its public key.

    Raises:
        WitnessError: The name or the file cannot be used.
    """
    private = Ed25519PrivateKey.generate()
    try:
        key = verifier_of(name, private, COSIGNATURE_KEY)
    except NoteError as error:
        raise WitnessError(str(error), "write it as an address, such as witness.example.org/forebay") from error
    try:
        with new_private_file(path, KEY_MODE) as file:
            file.write(write_signer(name, private).encode())
            file.flush()
            os.fsync(file.fileno())
        sync_directory(path.absolute().parent)
    except FileExistsError as error:
        raise WitnessError(f"{path} already exists", "use another file: a key is never overwritten") from error
    except OSError as error:
        raise WitnessError(f"{path} cannot be written ({error.strerror})", "use a file that you may write") from error
    return key


def read_key(path: Path) -> tuple[str, Ed25519PrivateKey]:
    """Return name and key from a file that only its owner can access.

    Raises:
        WitnessError: The file is unreadable, accessible to others, or not a key.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            held = file.read(KEY_BYTES_MAX)
    except OSError as error:
        remedy = "make one with `forebay audit witness key`"
        raise WitnessError(f"the key {path} cannot be read ({error.strerror})", remedy) from error
    if mode & OTHERS:
        raise WitnessError(f"the key {path} has mode {mode:04o}, so others may use it", f"run: chmod 600 {path}")
    try:
        return parse_signer(held.decode())
    except ValueError as error:
        remedy = "use the file that `forebay audit witness key` wrote"
        raise WitnessError(f"{path} is not a witness key ({error})", remedy) from error

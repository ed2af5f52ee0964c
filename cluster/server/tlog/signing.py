"""Signatures of one replica over the roots of its own ledger, with its key and its last signature.

A replica never signs two roots of one size. Each signature is on disk before it is sent. A replica thus detects that
its ledger was rewritten, or rolled back to before a signed entry, and stops. Two different checkpoints of one size, or
two inconsistent checkpoints, prove misbehaviour of the replica.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.security.proofs import (
    Checkpoint,
    NoteError,
    Signature,
    VerifierKey,
    parse_checkpoint,
    sign,
    verifier_of,
    verify_note,
    write_note,
)
from forebay.cluster.server.storage import StorageRefused
from forebay.cluster.system import replace_private
from forebay.wal import FIRST_INCARNATION, Incarnation, Member, lineage_of, parse_lineage

SIGNING_DIRECTORY: Final = "signing"
"""Directory of a replica's key and last signature, inside its own. It cannot be rebuilt."""

_ORIGIN: Final = "forebay/"

KEY_NAME: Final = "key"
SIGNED_NAME: Final = "signed"
KEY_BYTES: Final = 32


class SignRefused(Exception):
    """This replica does not sign the checkpoint now; the message gives the reason."""


class LedgerAltered(Exception):
    """Signed entries differ from the present ledger, or the ledger differs from the majority's."""


def origin_of(cluster_id: str, incarnation: Incarnation = FIRST_INCARNATION) -> str:
    """Return the origin of a cluster's checkpoints, which is also the name of its keys.

    Each incarnation has its own origin: signatures from before the loss of a majority may cover more entries than were
    recovered, and must not be confused with later signatures.
    """
    return f"{_ORIGIN}{lineage_of(cluster_id, incarnation)}"


def parse_origin(origin: str) -> tuple[str, Incarnation] | None:
    """Parse an origin of `origin_of` into the cluster's ID and incarnation; return None for other text."""
    return parse_lineage(origin.removeprefix(_ORIGIN)) if origin.startswith(_ORIGIN) else None


class Signer:
    """Key and signatures of one replica."""

    def __init__(self, directory: Path, origin: str) -> None:
        """Read the key, or create it if it does not exist.

        Raises:
            StorageRefused: The files were altered, or cannot be read or written.
        """
        self.origin: Final = origin
        self._directory = directory
        with _refused_where_unusable(directory):
            self._private = private_key(directory)
            self.last = self._read_last()
        """Last signed checkpoint; None before the first one."""
        self._turn = asyncio.Lock()

    @property
    def key(self) -> VerifierKey:
        """Key that verifies this replica's signatures."""
        return verifier_of(self.origin, self._private)

    def check_held(self, last_index: int) -> None:
        """Check that no entry after `last_index`, the last entry of the ledger, was signed.

        A tree contains only entries of the journal's last checkpoint, so a crash or power cut cannot cause this.

        Raises:
            StorageRefused: More entries were signed.
        """
        if self.last is not None and self.last.size > last_index:
            raise StorageRefused(
                f"{self._directory / SIGNED_NAME} says that this replica has signed {self.last.size} entries, and its "
                f"ledger has {last_index}: the ledger was rolled back, and lacks acknowledged entries; keep the "
                "directory for an examination, and bring the replica back with `forebay cluster replace`"
            )

    async def sign(self, size: int, root: Callable[[int], Awaitable[bytes]]) -> tuple[Checkpoint, Signature]:
        """Sign the checkpoint of the first `size` entries; return checkpoint and signature, durable on return.

        `root` returns the root of this replica's own tree at a size.

        Raises:
            SignRefused: A larger size was already signed, or the disk fails.
            LedgerAltered: Signed entries are no longer in the ledger.
        """
        async with self._turn:
            last = self.last
            if last is not None and size < last.size:
                raise SignRefused(
                    f"a checkpoint of {last.size} entries is already signed, and a smaller one must not be"
                )
            if last is not None and await root(last.size) != last.root:
                raise LedgerAltered(
                    f"the first {last.size} entries have a root that differs from the signed one: the ledger was "
                    "altered; keep the directory for an examination, and bring the replica back with `forebay cluster "
                    "replace`"
                )
            found = Checkpoint(self.origin, size, await root(size))
            signature = sign(found.text(), self.origin, self._private)
            if found != last:
                # Finish the write even if the caller is cancelled, so that disk and memory agree.
                try:
                    await asyncio.shield(asyncio.to_thread(self._write, write_note(found.text(), [signature])))
                except OSError as error:
                    raise SignRefused(f"the signed checkpoint cannot be recorded: {error}") from error
                self.last = found
            return found, signature

    def _write(self, note: str) -> None:
        replace_private(self._directory / SIGNED_NAME, note.encode())

    def _is_earlier(self, origin: str) -> bool:
        """Return whether an origin belongs to an earlier incarnation, whose signed entries this ledger continues."""
        mine, theirs = parse_origin(self.origin), parse_origin(origin)
        if mine is None or theirs is None:
            return False
        return mine[0] == theirs[0] and theirs[1].number < mine[1].number

    def _read_last(self) -> Checkpoint | None:
        path = self._directory / SIGNED_NAME
        try:
            held = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            first = held.decode(errors="replace").partition("\n")[0]
            origin = first if self._is_earlier(first) else self.origin
            found = parse_checkpoint(verify_note(held, [verifier_of(origin, self._private)])[0])
        except NoteError as error:
            raise StorageRefused(
                f"{path} was not written by this replica ({error}), which cannot know what it has signed: keep its "
                "directory for an examination, and bring the replica back with `forebay cluster replace`"
            ) from error
        if found.origin != origin:
            raise StorageRefused(f"{path} belongs to {found.origin}, and this replica to {self.origin}")
        return found


@contextmanager
def _refused_where_unusable(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageRefused(
            f"{error.filename or directory} cannot be read or written ({error.strerror}): check the permissions of "
            "the replica's account and the free space of the disk"
        ) from error


def private_key(directory: Path, member: Member | None = None) -> Ed25519PrivateKey:
    """Return a replica's key from its directory `signing`; create the key if it does not exist.

    `member` is the replica as a member of the cluster, if known.

    Raises:
        StorageRefused: The key was altered, or is missing although it was used or the cluster has its public key.
    """
    with _refused_where_unusable(directory):
        if member is not None and member.key and not (directory / KEY_NAME).exists():
            raise StorageRefused(
                f"{directory / KEY_NAME} is missing, and the cluster knows {member.id} by that key: restore "
                f"{directory} from a copy; or keep the replica's directory for an examination, and bring the replica "
                f"back with `forebay cluster replace {member.name}`"
            )
        directory.mkdir(mode=0o700, exist_ok=True)
        return _key_in(directory)


def _key_in(directory: Path) -> Ed25519PrivateKey:
    path = directory / KEY_NAME
    with suppress(FileNotFoundError):
        held = path.read_bytes()
        try:
            return Ed25519PrivateKey.from_private_bytes(base64.b64decode(held.strip(), validate=True))
        except ValueError as error:
            raise StorageRefused(
                f"{path} is not this replica's key; bring the replica back with `forebay cluster replace`"
            ) from error
    if (directory / SIGNED_NAME).exists():
        raise StorageRefused(
            f"{path} is missing, but checkpoints were signed with it; restore it from a copy, or bring the replica "
            "back with `forebay cluster replace`"
        )
    made = Ed25519PrivateKey.generate()
    replace_private(path, base64.b64encode(made.private_bytes_raw()) + b"\n")
    return made

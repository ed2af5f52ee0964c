"""Commands `forebay audit checkpoint`, `keys` and `consistency`: transparency-log data that others can verify."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import format_time, note, show_json
from forebay.cluster.client import Client
from forebay.cluster.schemas import LogKeysAnswer
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security.proofs import (
    NOTE_KEY,
    Checkpoint,
    NoteError,
    ProofError,
    Tile,
    TileError,
    VerifiedSignature,
    VerifierKey,
    consistency_proof,
    nodes_in_tiles,
    parse_checkpoint,
    parse_key,
    parse_note,
    root_of,
    verify_consistency,
    verify_note,
)
from forebay.cluster.system import format_instant
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, plain

TILE_PREFIX = "tile/"

WITNESSES_MAX = 16
"""Largest --witnesses: the maximum number of witnesses of a cluster."""


class CosignatureOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Cosignature of a witness: its configured name, its key, and the time as ISO 8601 in UTC."""

    witness: str
    key: str
    at: str | None


class CheckpointOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `audit checkpoint --json`: the last checkpoint with its signatures and cosignatures."""

    note: str
    size: int
    root: str
    signed_by: tuple[str, ...]
    witnessed_by: tuple[CosignatureOutput, ...]
    witnesses_needed: int
    witnessed: bool
    """True if the required number of witnesses have cosigned the checkpoint; false if no cosignature is required."""


@click.command("checkpoint")
@JSON_OPTION
def show_checkpoint(as_json: bool) -> None:
    """Print the last signed checkpoint of the ledger.

    Keep it where the cluster's operators cannot change it. Later, `forebay audit consistency` proves that the entries
    before it were not altered.
    """

    async def ask(client: Client) -> tuple[str, LogKeysAnswer]:
        found = await client.call(ops.READ_CHECKPOINT)
        return found, await client.call(ops.LIST_LOG_KEYS)

    found, listed = session().ask(ask)
    keys = {one.replica: parse_key(one.key) for one in listed.keys}
    witnesses = {one.witness: parse_key(one.key) for one in listed.witnesses}
    checkpoint, verified = _read(found, [*keys.values(), *witnesses.values()], "the checkpoint of the cluster")
    shown = CheckpointOutput(
        note=found,
        size=checkpoint.size,
        root=checkpoint.root.hex(),
        signed_by=tuple(name for name, key in keys.items() if key in verified),
        witnessed_by=tuple(
            CosignatureOutput(witness=name, key=key.name, at=_cosigned_at(verified[key]))
            for name, key in witnesses.items()
            if key in verified
        ),
        witnesses_needed=listed.witnesses_needed,
        witnessed=0 < listed.witnesses_needed <= sum(key in verified for key in witnesses.values()),
    )
    if as_json:
        show_json(shown)
        return
    click.echo(found, nl=False)
    note(f"{checkpoint.size} entries, signed by {', '.join(map(plain, shown.signed_by))}.")
    for one in shown.witnessed_by:
        note(f"Cosigned by the witness {plain(one.witness)} ({plain(one.key)}) at {format_time(one.at)}.")
    if not shown.witnesses_needed:
        note("UNWITNESSED: no witness is configured, so only the replicas confirm that the ledger was not altered.")
    elif not shown.witnessed:
        count = f"{len(shown.witnessed_by)} of {shown.witnesses_needed} required witnesses"
        note(f"UNWITNESSED: {count} cosigned the checkpoint.")


@click.command("keys")
@JSON_OPTION
def show_keys(as_json: bool) -> None:
    """Print the keys that sign checkpoints.

    verify_proof.py and witnesses need them. Send them to auditors through another channel than the proofs. The keys of
    witnesses follow; compare them with the keys that the witnesses' operators publish.
    """

    async def ask(client: Client) -> LogKeysAnswer:
        return await client.call(ops.LIST_LOG_KEYS)

    listed = session().ask(ask)
    if as_json:
        show_json(listed)
        return
    for one in listed.keys:
        click.echo(f"# {plain(one.replica)}\n{plain(one.key)}")
    for other in listed.witnesses:
        click.echo(f"# witness {plain(other.witness)}\n{plain(other.key)}")


class ConsistencyOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `audit consistency --json` for a ledger that extends the kept checkpoint."""

    size_before: int
    """Entries that the kept checkpoint covers."""
    size: int
    origin: str
    """Origin of the last checkpoint; it differs from the kept checkpoint's origin after a recovery of the cluster."""
    cosigned_by: tuple[CosignatureOutput, ...]


@click.command("consistency")
@click.option(
    "--from",
    "old",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="NOTE",
    help="Compare with this kept checkpoint.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Trust the keys in this file, from `audit keys`.  [default: the cluster's]",
)
@click.option(
    "--witnesses",
    "least",
    type=click.IntRange(0, WITNESSES_MAX),
    default=0,
    metavar="K",
    help="Fail unless K witnesses have cosigned the last checkpoint.",
)
@JSON_OPTION
def consistency(old: Path, keys: Path | None, least: int, as_json: bool) -> None:
    """Verify that the ledger extends a kept checkpoint.

    This proves that no entry before the checkpoint was altered or removed. The signatures of the kept and the present
    checkpoint are verified, too. The exit code is 7 if the ledger does not extend the kept checkpoint.
    """
    try:
        kept = old.read_bytes()
        believed = None if keys is None else [parse_key(line) for line in _lines(keys)]
    except OSError as error:
        raise bad_input(f"{error.filename} cannot be read: {error.strerror}", "name another file") from error
    except NoteError as error:
        raise bad_input(str(error), "use the output of `forebay audit keys`", place="--keys") from error

    async def ask(client: Client) -> tuple[Checkpoint, Checkpoint, list[VerifiedSignature]]:
        listed = await client.call(ops.LIST_LOG_KEYS)
        known = believed
        if known is None:
            texts = [one.key for one in listed.keys] + [one.key for one in listed.witnesses]
            known = [*map(parse_key, texts)]
        before, _ = _read(kept.decode(errors="replace"), known, str(old))
        after, verified = _read(await client.call(ops.READ_CHECKPOINT), known, "the checkpoint of the cluster")
        cosigned = [one for one in verified.values() if one.at_s is not None]
        if len(cosigned) < least:
            raise Failure(
                ExitCode.VERIFICATION_FAILED,
                f"the last checkpoint has {len(cosigned)} valid cosignatures, and --witnesses requires {least}",
                "try again in a minute; `forebay cluster probe` shows why witnesses did not cosign",
            )
        recovered = before.origin != after.origin and after.origin.startswith(_base(before.origin) + "/")
        if before.origin != after.origin and not recovered:
            raise bad_input(
                f"{old} is a checkpoint of {before.origin}, and the cluster is {after.origin}",
                "give a checkpoint of this cluster",
                place="--from",
            )
        if before.size > after.size:
            lost = f"; the cluster was since recovered as {after.origin} and lost its last entries"
            raise Failure(
                ExitCode.VERIFICATION_FAILED,
                f"the kept checkpoint covers {before.size} entries, but the cluster's last one only {after.size}"
                f"{lost if recovered else ''}",
                "try again in a minute; if the error persists, the ledger was set back to an earlier state",
            )
        tiles: dict[Tile, bytes] = {}
        while True:
            try:
                read = nodes_in_tiles(after.size, tiles.__getitem__)
                proof = consistency_proof(before.size, after.size, read)
                if root_of(after.size, read) != after.root:
                    raise ProofError("the cluster's tiles do not match its checkpoint")
                verify_consistency(before.size, after.size, before.root, after.root, proof)
                return before, after, cosigned
            except KeyError as error:
                (wanted,) = error.args
                path = wanted.path.removeprefix(TILE_PREFIX)
                tiles[wanted] = await client.call(ops.READ_TILE, tile=path)

    try:
        before, after, cosigned = session().ask(ask)
    except (ProofError, TileError) as error:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"the ledger does not extend {old}: {error}",
            "keep the checkpoint and the directories of all replicas as evidence",
        ) from error
    if as_json:
        witnesses = tuple(
            CosignatureOutput(witness=one.key.name, key=one.key.name, at=_cosigned_at(one)) for one in cosigned
        )
        show_json(
            ConsistencyOutput(size_before=before.size, size=after.size, origin=after.origin, cosigned_by=witnesses)
        )
        return
    since = "" if before.origin == after.origin else f" The cluster was since recovered as {after.origin}."
    more = after.size - before.size
    click.echo(f"The first {before.size} entries are unchanged; {more} entries follow.{since}")
    for one in cosigned:
        at = format_time(_cosigned_at(one))
        click.echo(f"Witness {plain(one.key.name)} cosigned the {after.size} entries at {at}.")


def _cosigned_at(one: VerifiedSignature) -> str | None:
    return None if one.at_s is None else format_instant(Instant(one.at_s * MICROSECONDS_PER_SECOND))


def _read(held: str, keys: list[VerifierKey], what: str) -> tuple[Checkpoint, dict[VerifierKey, VerifiedSignature]]:
    """Return the checkpoint in a note, and its valid signatures by key.

    Raises:
        Failure: verification failed, if the note is malformed or no key of a replica has signed it.
    """
    try:
        parse_note(held.encode())
        text, verified = verify_note(held.encode(), keys)
        if not any(one.key.kind == NOTE_KEY for one in verified):
            raise NoteError("no replica with a known key has signed it")
        return parse_checkpoint(text), {one.key: one for one in verified}
    except NoteError as error:
        raise Failure(
            ExitCode.VERIFICATION_FAILED, f"{what} is not valid: {error}", "compare the keys: forebay audit keys"
        ) from error


def _base(origin: str) -> str:
    """Return the origin of the cluster's first incarnation."""
    return "/".join(origin.split("/")[:2])


def _lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

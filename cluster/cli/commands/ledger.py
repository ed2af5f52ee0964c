"""`forebay ledger checkpoint|keys|prove|consistency`: what others can check of the ledger, asked of the cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from cluster.cli.audit_commands import write_proof
from cluster.cli.commands.options import JSON_OPTION
from cluster.cli.exits import ExitCode, Failure, bad_input
from cluster.cli.session import session
from cluster.cli.text import note, show_json
from cluster.client import Client
from cluster.proofs import (
    Checkpoint,
    NoteRefused,
    ProofRefused,
    Tile,
    TileRefused,
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
from cluster.schemas import operations as ops
from replica.values import plain

TILE_PREFIX = "tile/"


class CheckpointShown(msgspec.Struct, frozen=True, kw_only=True):
    """The last checkpoint, and which replicas have signed it."""

    note: str
    size: int
    root: str
    signed_by: tuple[str, ...]


@click.command("checkpoint")
@JSON_OPTION
def show_checkpoint(as_json: bool) -> None:
    """Print the last checkpoint of the ledger: a signed note.

    Keep it where nobody of the cluster can change it: `forebay ledger consistency` shows later that nothing before it
    was altered.
    """

    async def ask(client: Client) -> tuple[str, dict[str, VerifierKey]]:
        found = await client.call(ops.READ_CHECKPOINT)
        listed = await client.call(ops.LIST_LOG_KEYS)
        return found, {one.replica: parse_key(one.key) for one in listed.keys}

    found, keys = session().ask(ask)
    checkpoint, verified = _read(found, list(keys.values()), "the checkpoint of the cluster")
    signed_by = tuple(name for name, key in keys.items() if key in verified)
    if as_json:
        show_json(CheckpointShown(note=found, size=checkpoint.size, root=checkpoint.root.hex(), signed_by=signed_by))
        return
    click.echo(found, nl=False)
    note(f"{checkpoint.size} entries, signed by {', '.join(map(plain, signed_by))}.")


@click.command("keys")
@JSON_OPTION
def show_keys(as_json: bool) -> None:
    """Print the keys that the replicas sign checkpoints with, for verify_proof.py and for witnesses.

    Give them to auditors by another way than the proofs.
    """

    async def ask(client: Client) -> Any:
        return await client.call(ops.LIST_LOG_KEYS)

    listed = session().ask(ask)
    if as_json:
        show_json(listed)
        return
    for one in listed.keys:
        click.echo(f"# {plain(one.replica)}\n{plain(one.key)}")


@click.command("consistency")
@click.option(
    "--from",
    "old",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="NOTE",
    help="A checkpoint that was kept.",
)
@click.option(
    "--keys",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Keys, as `ledger keys` prints them.",
)
def consistency(old: Path, keys: Path | None) -> None:
    """Prove that the ledger goes on from a checkpoint that was kept: nothing before it was altered or taken away.

    The signatures of both are verified by the keys that are given; without them the cluster is asked for its keys. The
    exit code is 7 if the ledger does not go on from it.
    """
    try:
        kept = old.read_bytes()
        believed = None if keys is None else [parse_key(line) for line in _lines(keys)]
    except OSError as error:
        raise bad_input(f"{error.filename} cannot be read: {error.strerror}", "name another file") from error
    except NoteRefused as error:
        raise bad_input(str(error), "write keys as `forebay ledger keys` prints them", place="--keys") from error

    async def ask(client: Client) -> tuple[Checkpoint, Checkpoint]:
        listed = await client.call(ops.LIST_LOG_KEYS)
        known = believed if believed is not None else [parse_key(one.key) for one in listed.keys]
        before, _ = _read(kept.decode(errors="replace"), known, str(old))
        after, _ = _read(await client.call(ops.READ_CHECKPOINT), known, "the checkpoint of the cluster")
        if before.origin != after.origin:
            raise bad_input(f"{old} is of {before.origin}, and the cluster is {after.origin}", "name another note")
        if before.size > after.size:
            raise Failure(
                ExitCode.VERIFICATION_FAILED,
                f"{before.size} entries were signed once, and the cluster has signed {after.size}",
                "ask again in a minute; then somebody has set the ledger back",
            )
        tiles: dict[Tile, bytes] = {}
        while True:
            try:
                read = nodes_in_tiles(after.size, tiles.__getitem__)
                proof = consistency_proof(before.size, after.size, read)
                if root_of(after.size, read) != after.root:
                    raise ProofRefused("the tiles of the cluster are not those of its checkpoint")
                verify_consistency(before.size, after.size, before.root, after.root, proof)
                return before, after
            except KeyError as error:
                (wanted,) = error.args
                path = wanted.path.removeprefix(TILE_PREFIX)
                tiles[wanted] = await client.call(ops.READ_TILE, tile=path)

    try:
        before, after = session().ask(ask)
    except (ProofRefused, TileRefused) as error:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"the ledger does not go on from {old}: {error}",
            "keep the note and the directories of all replicas for an inquiry",
        ) from error
    click.echo(f"The first {before.size} entries are as they were signed; {after.size - before.size} came after them.")


def prove_online(job: str, output: Path) -> None:
    """Ask the cluster for the proof of a job, and write it. Failure."""

    async def ask(client: Client) -> bytes:
        return await client.call(ops.PROVE_JOB, id=job)

    write_proof(output, session().ask(ask))


def _read(held: str, keys: list[VerifierKey], what: str) -> tuple[Checkpoint, set[VerifierKey]]:
    try:
        parse_note(held.encode())
        text, verified = verify_note(held.encode(), keys)
        return parse_checkpoint(text), {one.key for one in verified}
    except NoteRefused as error:
        raise Failure(
            ExitCode.VERIFICATION_FAILED, f"{what} is not believed: {error}", "see `forebay ledger keys`"
        ) from error


def _lines(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]

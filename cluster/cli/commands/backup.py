"""Commands `forebay cluster snapshot` and `forebay backup create`: write a snapshot, and fetch one as a backup."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from forebay.cluster.cli.commands.local_cluster import module_command
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import fields_table, present, snapshot_fields
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import ReplicaConfig
from forebay.cluster.schemas import StoredSnapshotView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address, make_private_directory, name_beside, new_private_file, sync_directory
from forebay.replica.values import plain


@click.command("snapshot")
@click.option("--name", help="Use this replica.  [default: the first that answers]")
@JSON_OPTION
def snapshot(name: str | None, as_json: bool) -> None:
    """Have a replica write a snapshot now (operators)."""
    current = session()
    address: Address | None = None if name is None else current.config().replica(name).api
    view = current.ask(lambda client: client.call(ops.SAVE_SNAPSHOT, replica=address))
    present(view, as_json, lambda: fields_table(snapshot_fields(view)))


FETCH_KEEP_MAX = 10_000
"""Largest --keep: one backup an hour for a year."""

_SNAPSHOT_NAME = re.compile(r"snapshot-[0-9]{20}-[0-9]+\.fbs", re.ASCII)


class BackupAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `backup create --json`."""

    path: str
    replica: str
    index: int
    size_bytes: int
    fetched: bool
    """False if the backup already existed."""
    removed: tuple[str, ...]
    """Names of the older backups that --keep removed."""


@click.command("create")
@click.option("--name", help="Fetch from this replica.  [default: the first that answers]")
@click.option(
    "--into",
    "directory",
    type=click.Path(path_type=Path, file_okay=False),
    required=True,
    help="Write the backup to this directory.",
)
@click.option("--keep", type=click.IntRange(1, FETCH_KEEP_MAX), help="Keep the newest N backups and remove older ones.")
@click.option("--save", "saves", is_flag=True, help="Have the replica write a new snapshot first.")
@JSON_OPTION
def create(name: str | None, directory: Path, keep: int | None, saves: bool, as_json: bool) -> None:
    """Fetch and verify a replica's newest snapshot (operators).

    The backup gets its final name once it is complete, verified and synced. A snapshot that is already in the directory
    is not fetched again. `forebay backup restore` rebuilds a cluster from a backup.
    """
    current = session()
    make_private_directory(directory)
    config = current.config()
    replicas = config.replicas if name is None else (config.replica(name),)
    replica, row = current.ask(lambda client: newest_snapshot(client, replicas, saves=saves))
    target = directory / row.name
    part = name_beside(target)
    is_there = target.exists()
    if not is_there:
        try:
            current.ask(lambda client: receive_snapshot(client, replica, row, part))
            _verify(part)
            part.replace(target)
            sync_directory(directory)
        finally:
            part.unlink(missing_ok=True)
    removed = _prune(directory, keep, target)
    view = BackupAnswer(
        path=str(target),
        replica=replica.name,
        index=row.index,
        size_bytes=row.size_bytes,
        fetched=not is_there,
        removed=removed,
    )
    present(view, as_json, lambda: plain(f"{target}: entry {row.index} of {replica.name}, {row.size_bytes} bytes"))


async def newest_snapshot(
    client: Client, replicas: Sequence[ReplicaConfig], *, saves: bool
) -> tuple[ReplicaConfig, StoredSnapshotView]:
    """Return the first replica that has a snapshot, and its newest snapshot.

    With `saves` the replica writes a new snapshot first.

    Raises:
        Failure: if no replica has a snapshot, or its name is invalid.
        ApiError: if no replica answered.
    """
    last: ApiError | None = None
    for replica in replicas:
        try:
            if saves:
                await client.call(ops.SAVE_SNAPSHOT, replica=replica.api)
            found = (await client.call(ops.LIST_SNAPSHOTS, replica=replica.api, once=len(replicas) > 1)).snapshots
        except ApiError as error:
            last = error
            continue
        if found and _SNAPSHOT_NAME.fullmatch(found[0].name) is None:
            sentence = f"{replica.name} sent {plain(found[0].name)!r}, which is not the name of a snapshot"
            raise Failure(ExitCode.VERIFICATION_FAILED, sentence, "fetch from another replica: --name NAME")
        if found:
            return replica, found[0]
    if last is not None:
        raise last
    raise Failure(ExitCode.NOT_FOUND, "no replica has a snapshot yet", "add --save to write one")


async def receive_snapshot(client: Client, replica: ReplicaConfig, row: StoredSnapshotView, part: Path) -> None:
    """Copy a replica's snapshot into the file `part` and sync it.

    Raises:
        Failure: if the file cannot be written, or the replica sent another number of bytes.
        ApiError: if the replica did not answer.
    """
    try:
        with new_private_file(part) as file:
            while file.tell() < row.size_bytes:
                data = await client.call(ops.FETCH_SNAPSHOT, name=row.name, offset=file.tell(), replica=replica.api)
                if not data or file.tell() + len(data) > row.size_bytes:
                    break
                file.write(data)
            if file.tell() != row.size_bytes:
                raise Failure(
                    ExitCode.VERIFICATION_FAILED,
                    f"{replica.name} sent {file.tell()} of {row.size_bytes} bytes",
                    "fetch it again, or from another replica",
                )
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise bad_input(f"{part} cannot be written: {error.strerror}", "free space", place="--into") from error


def _verify(part: Path) -> None:
    """Check the whole file in another process, as a replica does at its start.

    Raises:
        Failure: verification failed, if the snapshot is damaged.
    """
    words = module_command("forebay.cluster.cli", "backup", "inspect", "--check", "--json", "--", str(part))
    checked = subprocess.run(words, capture_output=True, text=True, check=False)
    if checked.returncode != ExitCode.OK:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"the fetched snapshot is damaged: {checked.stderr.strip()}",
            "fetch it from another replica: --name NAME",
        )


def _prune(directory: Path, keep: int | None, newest: Path) -> tuple[str, ...]:
    """Remove all but the `keep` newest snapshots and return their names; leave other files alone."""
    if keep is None:
        return ()
    names = sorted(one.name for one in directory.iterdir() if _SNAPSHOT_NAME.fullmatch(one.name))
    removed = tuple(name for name in names[:-keep] if name != newest.name)
    for name in removed:
        (directory / name).unlink()
    return removed

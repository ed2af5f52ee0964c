"""Commands `forebay run witness` and `forebay audit witness`: run a transparency-log witness, show what it cosigned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from forebay.cluster.cli.commands.local_cluster import become, module_command
from forebay.cluster.cli.commands.options import LOG_FORMAT_OPTION
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.text import format_time, note, present, show, show_json, table
from forebay.cluster.system import format_instant, hold_termination
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, plain

if TYPE_CHECKING:
    from forebay.cluster.witness import WitnessError

_FILE = click.Path(path_type=Path, dir_okay=False)
_DB = click.option(
    "--db", type=_FILE, metavar="FILE", help="Use this database of cosigned checkpoints.  [default: KEY.db]"
)


class WitnessedLogView(msgspec.Struct, frozen=True, kw_only=True):
    """Log with its last cosigned checkpoint, as `audit witness list --json` prints it."""

    origin: str
    size: int
    root: str
    at: str | None
    note: str


class RejectedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoint with valid signatures that contradicts a cosigned checkpoint."""

    origin: str
    at: str | None
    why: str
    note: str


class WitnessAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `audit witness list --json`."""

    key: str
    logs: tuple[WitnessedLogView, ...]
    evidence: tuple[RejectedCheckpoint, ...]


class WitnessKeyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `audit witness key --json`."""

    key: str
    """Verifier key of the witness's cosignatures."""


@click.command("witness")
@click.option("--key", type=_FILE, required=True, metavar="FILE", help="Cosign with this key.")
@_DB
@click.option(
    "--listen",
    required=True,
    metavar="ADDRESS",
    help="Listen on this address; requires --certificate unless it is loopback.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    metavar="ORIGIN=KEY,…",
    help="Cosign the ledger of this origin, whose replicas have these keys.",
)
@click.option(
    "--keys",
    type=_FILE,
    multiple=True,
    metavar="FILE",
    help="Read ledger and keys from the output of `forebay audit keys`.",
)
@click.option("--certificate", type=_FILE, metavar="PEM", help="Present this certificate to clients.")
@click.option("--certificate-key", type=_FILE, metavar="PEM", help="Use this private key for --certificate.")
@LOG_FORMAT_OPTION
def run(
    key: Path,
    db: Path | None,
    listen: str,
    logs: tuple[str, ...],
    keys: tuple[Path, ...],
    certificate: Path | None,
    certificate_key: Path | None,
) -> None:
    """Run a transparency-log witness.

    Run it on a machine that the cluster's operators do not control. The witness cosigns a checkpoint that a majority of
    the ledger's replicas have signed, if it extends the last cosigned checkpoint. It never cosigns a ledger that was
    rewritten or set back. The protocol is tlog-witness of C2SP.
    """
    if not logs and not keys:
        raise bad_input("no ledger is given", "add --keys FILE or --log ORIGIN=KEY")
    words = [f"--key={key}", f"--db={_database(key, db)}", f"--listen={listen}"]
    words += [f"--log={one}" for one in logs] + [f"--keys={one}" for one in keys]
    words += [] if certificate is None else [f"--certificate={certificate}"]
    words += [] if certificate_key is None else [f"--certificate-key={certificate_key}"]
    hold_termination()
    become(module_command("forebay.cluster.witness", *words))


@click.command("key")
@click.option("--key", type=_FILE, required=True, metavar="FILE", help="Write the key to this new file.")
@_DB
@click.option("--name", required=True, help="Cosign under this name, such as witness.example.org/forebay.")
@JSON_OPTION
def create_key(key: Path, db: Path | None, name: str, as_json: bool) -> None:
    """Create a witness's key and its empty database.

    Prints the verifier key, which clusters and auditors need. Keep the key and the database together: a witness that
    lost its database needs a new key.
    """
    from forebay.cluster.witness import CheckpointStore, WitnessError, make_key

    database = _database(key, db)
    if database.exists():
        raise bad_input(f"{database} exists already", "name a new file with --db", place="--db")
    try:
        public = make_key(key, name)
        CheckpointStore.create(database, str(public))
    except WitnessError as error:
        raise bad_input(error.sentence, error.remedy) from error
    present(WitnessKeyAnswer(key=str(public)), as_json, lambda: str(public))
    note(
        f"Next: forebay run witness --key {plain(str(key))} --listen ADDRESS --keys FILE; send the key above to the "
        "clusters' operators and auditors."
    )


@click.command("list")
@click.option("--key", type=_FILE, required=True, metavar="FILE", help="Use the key of this witness.")
@_DB
@JSON_OPTION
def list_logs(key: Path, db: Path | None, as_json: bool) -> None:
    """List the cosigned logs and the rejected checkpoints."""
    from forebay.cluster.security.proofs import COSIGNATURE_KEY, verifier_of
    from forebay.cluster.witness import CheckpointStore, WitnessError, read_key

    try:
        public = str(verifier_of(*read_key(key), COSIGNATURE_KEY))
        seen = CheckpointStore(_database(key, db), public)
        try:
            logs, evidence = seen.read_all()
        finally:
            seen.close()
    except WitnessError as error:
        raise _refused(error) from error
    if as_json:
        show_json(
            WitnessAnswer(
                key=public,
                logs=tuple(
                    WitnessedLogView(origin=o, size=size, root=root.hex(), at=_format_seconds(at_s), note=held)
                    for o, size, root, at_s, held in logs
                ),
                evidence=tuple(
                    RejectedCheckpoint(origin=o, at=_format_seconds(at_s), why=why, note=held)
                    for o, at_s, why, held in evidence
                ),
            )
        )
        return
    rows = [(one.origin, one.size, one.root.hex()[:16], format_time(_format_seconds(one.at_s))) for one in logs]
    show(table(("LOG", "ENTRIES", "ROOT", "COSIGNED"), rows, right=frozenset({"ENTRIES"})))
    for one in evidence:
        note(f"REJECTED at {format_time(_format_seconds(one.at_s))}: {plain(one.origin)}: {plain(one.why)}")
        click.echo(one.note, nl=False)


def _database(key: Path, db: Path | None) -> Path:
    return key.with_name(f"{key.name}.db") if db is None else db


def _format_seconds(at_s: int) -> str | None:
    return format_instant(Instant(at_s * MICROSECONDS_PER_SECOND))


def _refused(error: WitnessError) -> Failure:
    return Failure(ExitCode.REFUSED, error.sentence, error.remedy)

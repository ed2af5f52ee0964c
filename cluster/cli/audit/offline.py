"""Options of the commands that read a replica's directory: verify, replay, prove, archive, report, recover, restore.

Each command replaces this process with `python -m cluster.audit`, so that `cluster.cli` imports neither `wal` nor
`snapshots`.
"""

import json
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from forebay.cluster.cli.commands.local_cluster import become, module_command
from forebay.cluster.cli.confirmation import YES_OPTION
from forebay.cluster.cli.files import write_whole
from forebay.cluster.cli.global_options import JSON_OPTION, is_json
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import PAST_FORMS, note, present
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import proofs
from forebay.replica.values import plain

VERIFIER: Final = Path(proofs.__file__ or "").with_name("verify_proof.py")
"""Path of the stand-alone program that checks proofs."""

REVISION_MAX: Final = 2**63 - 1

_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Read this replica's directory (./r1) or its wal directory; the replica may be running.",
)
_NAME = click.option("--name", help="Read the directory of this configured replica.")
_RELEASE = click.option(
    "--release",
    type=click.Path(path_type=Path),
    metavar="TREE",
    help="Compare with the release unpacked in this directory.",
)
SINCE_FORMS: Final = "a revision, a time (2026-01-31T16:00:00Z), or an age before the end (90m, 12h, 7d)"
WINDOW_FORMS: Final = f"a revision, {PAST_FORMS}, or an age before the end (90m, 12h, 7d)"


_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False)
_ARCHIVE = click.option("--archive", type=_DIRECTORY, metavar="DIR", help="Read missing entries from this archive.")
_KEYS: Final = "Trust the replicas' keys in this file, from `forebay audit keys`."


def start_audit(name: str, options: dict[str, Any]) -> None:
    """Replace this process with the one that runs the command; `options` are its parsed options by name."""
    current = session()
    given = {**options, "as_json": is_json(click.get_current_context()), "config": current.config_path}
    become(module_command("forebay.cluster.audit", name, encode_options(given)))


_PATH: Final = "path"


def encode_options(options: dict[str, Any]) -> str:
    """Encode parsed options as JSON; a path becomes an object."""
    return msgspec.json.encode(options, enc_hook=lambda path: {_PATH: str(path)}).decode()


def decode_options(text: str) -> dict[str, Any]:
    """Return the options in the output of `encode_options`."""

    def decode_object(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(decode_object, value))
        return Path(value[_PATH]) if isinstance(value, dict) else value

    return {name: decode_object(value) for name, value in json.loads(text).items()}


@click.command("verify")
@_DATA
@_NAME
@click.option("--cluster", metavar="ID", help="Fail if the ledger is of another cluster.")
@click.option(
    "--expect",
    metavar="DIGEST@INDEX",
    help="Fail unless the digest of the ledger up to this entry begins with these digits.",
)
@click.option("--complete", is_flag=True, help="Fail if any entry is missing.")
@click.option("--deep", is_flag=True, help="Also replay the ledger and compare all derived data.")
@click.option("--archive", type=_DIRECTORY, metavar="DIR", help="Verify this archive, alone or with --data.")
@click.option("--keys", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=_KEYS)
@JSON_OPTION
def verify(**options: Any) -> None:
    """Verify the hash chain of a replica's ledger.

    Checks every checksum, digest, index, term and revision from the first entry present to the last one applied. Only
    --expect, with a digest noted elsewhere, can show that the ledger was not rewritten as a whole.

    With --deep the ledger is replayed once. Each snapshot and recorded state digest is compared with the replayed
    state; the index by job and the Merkle tree are rebuilt and compared with the replica's. After a gap the replay
    continues from the next snapshot, and a note says so.

    With --archive, the SHA-256 of each segment, the hash chain, the revisions and the root of each checkpoint are
    verified; with --keys also the checkpoints' signatures. Together with --data, the archive must match the digests of
    the ledger, and entries in the archive do not count as missing.
    """
    start_audit("verify", options)


@click.command("replay")
@_DATA
@_NAME
@click.option("--at", type=click.IntRange(0, REVISION_MAX), metavar="REVISION", help="Stop at this revision.")
@click.option("--from-snapshot", type=click.Path(path_type=Path), help="Start from this snapshot.")
@click.option("--expect", metavar="DIGEST", help="Fail unless the state digest begins with these hex digits.")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Use at most this many processes.  [default: one for each core]",
)
@_ARCHIVE
@_RELEASE
@JSON_OPTION
def replay(**options: Any) -> None:
    """Replay a ledger from the start, and print its digests.

    A running replica shows the same state digest at the same revision (`forebay cluster probe --digest`).

    The ledger records a digest of the state about once a minute if there are changes. The replay compares its states
    with these digests. If one differs, it prints the two revisions between which the states first differ, and exits
    with 7. Large states are compared less often; the last one is always compared.

    A long ledger is replayed in parallel parts, which start from states that the replica keeps beside the ledger. The
    replay of the preceding part verifies each of these states; after a mismatch, one process replays the whole ledger.

    With --release the other release replays the ledger as well. If the states differ, the command prints the first
    entry with a difference and exits with 7.
    """
    start_audit("replay", options)


@click.command("redecide")
@_DATA
@_NAME
@_RELEASE
@click.option("--since", metavar="WHEN", help=f"Decide again from this point on: {SINCE_FORMS}.")
@click.option("--from-snapshot", type=click.Path(path_type=Path), help="Start from this snapshot.")
@_ARCHIVE
@JSON_OPTION
def redecide(**options: Any) -> None:
    """Decide recorded commands again, and list differences.

    Rebuilds each command from its events, checks it against the recorded digest, and decides it again, by this release
    or another one (--release), on the state and at the time of the original decision. Scheduling cycles are decided
    again as well. The next command starts from the recorded state, so one difference causes no others.

    The exit code is 7 if the outcome would have differed, and 0 if only texts, reasons or the order of events differ.
    """
    start_audit("redecide", options)


@click.command("dump")
@_DATA
@_NAME
@click.option(
    "--from", "first", type=click.IntRange(1, REVISION_MAX), default=1, help="First entry to print.  [default: 1]"
)
@click.option("--limit", type=click.IntRange(1, REVISION_MAX), help="Print at most this many entries.")
@click.option("--job", type=click.IntRange(1, REVISION_MAX), metavar="N", help="Only entries of this job.")
@_ARCHIVE
def dump(**options: Any) -> None:
    """Print ledger entries as JSON, one line each."""
    start_audit("dump", options)


@click.command("prove")
@_DATA
@_NAME
@click.option(
    "--job", metavar="JOB", required=True, help="Prove the history of this job, which may be purged if --data is given."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    help="Write the proof to this file.",
)
@_ARCHIVE
@JSON_OPTION
def prove(**options: Any) -> None:
    """Write a proof of a job's history for a third party.

    The stand-alone program verify_proof.py checks the proof with the keys that `forebay audit keys` prints. The proof
    contains every command about the job; a scheduling cycle in it also names other jobs. The proof also shows that no
    command is missing, except from the last minute or two before the checkpoint. Without --data, --name or --archive
    the command gets the proof from the cluster.
    """
    if options["data"] is None and options["name"] is None and options["archive"] is None:
        job = options["job"]
        proof = session().ask(lambda client: client.call(ops.PROVE_JOB, id=job))
        write_proof(options["output"], proof, options["as_json"])
        return
    start_audit("prove", options)


@click.command("archive")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_DATA
@_NAME
@click.option("--list", "listed", is_flag=True, help="List the archive's segments and write nothing.")
@JSON_OPTION
def archive(**options: Any) -> None:
    """Archive the ledger up to the last checkpoint.

    DIR may be on another file system. Segments are written atomically, and repeating the command continues where it
    stopped. The replica may be running. `forebay audit verify --archive` verifies an archive without the replica.
    """
    start_audit("archive", options)


@click.command("prune")
@_DATA
@_NAME
@click.option("--below", type=click.IntRange(1, REVISION_MAX), metavar="INDEX", help="Remove entries before this one.")
@click.option(
    "--older-than", metavar="AGE", help="Remove entries at least this much older than the last one: 90m, 12h, 90d."
)
@click.option(
    "--archive",
    "archives",
    type=_DIRECTORY,
    multiple=True,
    required=True,
    metavar="DIR",
    help="Verify that this archive has the entries; give at least two archives.",
)
@click.option("--keys", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help=_KEYS)
@click.option("--dry-run", is_flag=True, help="Show what would be removed, and remove nothing.")
@YES_OPTION
@JSON_OPTION
def prune(**options: Any) -> None:
    """Remove old entries that are archived elsewhere.

    Requires a later checkpoint signed by a majority of the keys, a later snapshot confirmed by a state digest in the
    ledger, and two archives with the entries, which are verified now. The command names the requirements that are not
    met. It removes whole tiles of 256 entries. The first 64 entries, tree leaves, digests at both ends and the index by
    job stay, so proofs remain possible.

    A running replica removes the entries itself, gradually. An interrupted removal is completed later. The space in
    the data file is used again.
    """
    start_audit("prune", options)


@click.command("retain")
@click.option("--name", required=True, help="Archive this replica's ledger.")
@JSON_OPTION
def retain(**options: Any) -> None:
    """Archive and prune according to [retention].

    Run it from a timer, once a day. It archives to each directory, then removes entries that exceed the age keep_days
    or the size keep, as `forebay audit prune` does.
    """
    start_audit("retain", options)


@click.command("restore")
@_DATA
@_NAME
@click.option(
    "--archive", type=_DIRECTORY, required=True, metavar="DIR", help="Read the missing part from this archive."
)
@JSON_OPTION
def restore_ledger(**options: Any) -> None:
    """Restore the pruned part of a stopped replica's tree.

    Use it for a replica that joined after the pruning or lost its tree: without the leaves of old entries a replica can
    neither sign checkpoints nor prove anything. The entries themselves stay in the archive.
    """
    start_audit("restore", options)


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Also load the backup and check all invariants.")
@JSON_OPTION
def inspect(**options: Any) -> None:
    """Verify a backup and show its contents."""
    start_audit("inspect", options)


@click.command("jobs")
@_DATA
@_NAME
@click.option("-S", "--from", "first", metavar="TIME", help=f"Start of the period: {PAST_FORMS}.")
@click.option("-E", "--to", "last", metavar="TIME", help="End of the period, in the same forms.")
@click.option("-u", "--user", help="Only jobs of this user.")
@click.option("-A", "--account", help="Only jobs of this account.")
@click.option("-s", "--state", metavar="STATE", help="Only jobs in this state at the end of the period.")
@_ARCHIVE
@JSON_OPTION
def jobs(**options: Any) -> None:
    """List the jobs of a period, as accounting does.

    Shows the jobs as they were at the end of the period, including jobs purged since. The period defaults to the
    whole ledger.
    """
    start_audit("jobs", options)


@click.command("report")
@_DATA
@_NAME
@click.option("--from", "first", metavar="TIME", help=f"Start of the period: {PAST_FORMS}.  [default: of the ledger]")
@click.option("--to", "last", metavar="TIME", help="End of the period, in the same forms.  [default: of the ledger]")
@click.option("--job", "jobs", type=click.IntRange(1), multiple=True, metavar="N", help="Draw this job; repeatable.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the page to this file.")
@_ARCHIVE
@JSON_OPTION
def report(**options: Any) -> None:
    """Draw a period of the ledger as an HTML page.

    The page shows job stages, pending jobs by reason, pool usage, leaders' terms and transfers, each as a chart and a
    table. It needs no network and no other file. With --json the figures are printed instead.

    Without --job the jobs that waited longest are drawn.
    """
    start_audit("report", options)


@click.command("recover")
@click.option("--name", required=True, help="Recover from this replica of this machine; it must be stopped.")
@click.option("--confirm", metavar="ID", help="Run the plan with this ID.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@click.option("--by", metavar="OPERATOR", help="Record this operator in the ledger.  [default: this account]")
@click.option(
    "--leave-behind",
    multiple=True,
    metavar="NAME",
    help="Recover without this replica, even if it has more entries; repeatable.",
)
@JSON_OPTION
def recover(**options: Any) -> None:
    """Rebuild the cluster from one surviving replica.

    First prints the last entry and time that this replica has, and what may be lost. It changes nothing without
    --confirm, --yes or a confirmation on the terminal. The result is a cluster of one replica and a new incarnation:
    add the other replicas again, with empty directories. Every entry that this replica acknowledged is kept.

    Rejected if another replica answers and has a leader or more entries. Certificates, agents and clients keep working.
    """
    start_audit("recover", options)


@click.command("whatif")
@_DATA
@_NAME
@click.option("--from", "first", metavar="WHEN", help=f"Period start: {WINDOW_FORMS}.  [default: of the ledger]")
@click.option("--to", "last", metavar="WHEN", help="End of the period, in the same forms.  [default: of the ledger]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a configuration key, a pool (Pool=fast:+2TiB, fast:-2TiB, fast:8TiB) or the nodes (Nodes=+16); "
    "repeatable.",
)
@click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Apply this burst_buffer.conf, as `config apply` does.",
)
@click.option(
    "--html",
    "html",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="PAGE",
    help="Also write an HTML page to this file.",
)
@JSON_OPTION
def whatif(**options: Any) -> None:
    """Simulate a past period with a different configuration.

    Submits and other requests arrive at their recorded times, and the agents' work takes as long as recorded; every
    decision is made again. The period is simulated twice: without changes, to measure the error of the simulation, and
    with the changes, which apply from the start. The assumptions are printed with the figures. Neither the cluster nor
    the replica's directory, which may be in use, is changed.
    """
    start_audit("whatif", options)


@click.command("restore")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Create this replica of this machine; it must have no data.")
@click.option("--confirm", metavar="ID", help="Run the plan with this ID.")
@click.option("--yes", is_flag=True, help="Skip the confirmation.")
@click.option("--by", metavar="OPERATOR", help="Record this operator in the ledger.  [default: this account]")
@JSON_OPTION
def restore_backup(**options: Any) -> None:
    """Rebuild the cluster from a backup.

    First prints the contents and time of the snapshot. It changes nothing without --confirm, --yes or a confirmation on
    the terminal. The result is a cluster of one replica and a new incarnation, whose history begins with the snapshot;
    add the other replicas again. The command needs the configuration and certificates of the snapshot's cluster. If the
    directory of a replica survives, use `forebay cluster recover` instead, which keeps more.
    """
    start_audit("restore-backup", options)


class ProofAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `audit prove --json`."""

    path: str
    records: int
    size_bytes: int


def write_proof(output: Path, held: bytes, as_json: bool) -> None:
    """Write a proof with `write_whole`, and print its path and number of records."""
    write_whole(output, held)
    proof = ProofAnswer(path=str(output), records=len(json.loads(held)["records"]), size_bytes=len(held))
    present(proof, as_json, lambda: f"{plain(proof.path)}: {proof.records} records, {proof.size_bytes} bytes")
    note(f"Next: send it with {VERIFIER} to an auditor who has the output of `forebay audit keys`.")

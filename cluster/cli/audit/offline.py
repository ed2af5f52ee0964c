"""Options of the commands that read a replica's directory: verify, replay, prove, archive, report, recover, restore.

Each command replaces this process with `python -m cluster.audit`, so that `cluster.cli` imports neither `wal` nor
`snapshots`.
"""

import json
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from cluster.cli.commands.local_cluster import become, module_command
from cluster.cli.confirmation import YES_OPTION
from cluster.cli.files import write_whole
from cluster.cli.global_options import JSON_OPTION, is_json
from cluster.cli.session import session
from cluster.cli.text import PAST_FORMS, note, present
from cluster.schemas import operations as ops
from cluster.security import proofs
from replica.values import plain

VERIFIER: Final = Path(proofs.__file__ or "").with_name("verify_proof.py")
"""Path of the stand-alone program that checks proofs."""

REVISION_MAX: Final = 2**63 - 1

_DATA = click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="Replica's directory (./r1) or its wal directory; the replica may be running.",
)
_NAME = click.option("--name", help="Replica of the configuration, instead of --data.")
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
_KEYS: Final = "Keys of the replicas, as `forebay audit keys` prints them."


def start_audit(name: str, options: dict[str, Any]) -> None:
    """Replace this process with the one that runs the command; `options` are its parsed options by name."""
    current = session()
    given = {**options, "as_json": is_json(click.get_current_context()), "config": current.config_path}
    become(module_command("cluster.audit", name, encode_options(given)))


_PATH: Final = "path"


def encode_options(options: dict[str, Any]) -> str:
    """Encode parsed options as JSON; a path becomes an object."""
    return msgspec.json.encode(options, enc_hook=lambda path: {_PATH: str(path)}).decode()


def decode_options(text: str) -> dict[str, Any]:
    """Return the options in the output of `encode_options`."""

    def decoded(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(map(decoded, value))
        return Path(value[_PATH]) if isinstance(value, dict) else value

    return {name: decoded(value) for name, value in json.loads(text).items()}


@click.command("verify")
@_DATA
@_NAME
@click.option("--cluster", metavar="ID", help="Fail unless it is the ledger of this cluster.")
@click.option(
    "--expect",
    metavar="DIGEST@INDEX",
    help="Fail unless the ledger up to this entry has this digest or prefix.",
)
@click.option("--complete", is_flag=True, help="Fail if any entry is missing.")
@click.option("--deep", is_flag=True, help="Also replay it, and compare everything that is derived from it.")
@click.option("--archive", type=_DIRECTORY, metavar="DIR", help="Verify this archive, alone or together with --data.")
@click.option("--keys", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help=_KEYS)
@JSON_OPTION
def verify(**options: Any) -> None:
    """Verify the hash chain of a replica's ledger.

    Every checksum, digest, index and term is checked, from the first entry held to the last one applied, and what
    is recorded of revisions and gaps is derived again. A digest from elsewhere (--expect: of another replica, of a
    note that was kept) shows what no ledger can show of itself: that it was not written anew.

    With --deep all is folded once, each snapshot of the replica compared with the state at its entry, and each
    digest of a state that the ledger records with the state that it is of. Behind history that is not held here the
    next snapshot is taken as it is, and said to be. The index by job is made anew elsewhere, and compared with the
    replica's up to where that has come; so is the tree, with the replica's tiles, and with what it has signed.

    With --archive every byte of the segments is read: their SHA-256, the chain, revisions, and the root of each
    checkpoint that they carry; with --keys its signatures, too. With a ledger behind it, the archive must lead to
    the digests that the ledger has, and what it holds is not missing.
    """
    start_audit("verify", options)


@click.command("replay")
@_DATA
@_NAME
@click.option("--at", type=click.IntRange(0, REVISION_MAX), metavar="REVISION", help="Stop at this revision.")
@click.option("--from-snapshot", type=click.Path(path_type=Path), help="Start from this snapshot.")
@click.option("--expect", metavar="DIGEST", help="Fail unless the state digest starts with these hex digits.")
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Use at most so many processes.  [default: one for each core]",
)
@_ARCHIVE
@_RELEASE
@JSON_OPTION
def replay(**options: Any) -> None:
    """Replay a ledger from the start, and print its digests.

    The state digest must be the one that a live replica shows at the same revision (`forebay cluster probe
    --digest`), whatever machine, release or PYTHONHASHSEED folds it.

    The ledger records the digest of its state about once a minute of change. The replay holds its states against
    them, and where one is another it says between which two revisions they differ first, and ends with 7. Of large
    states not each is compared at first, but the last one always is.

    A long ledger is folded in parts at once, which begin with states that the replica keeps beside it. Such a state
    is believed once the part before has led to its digest; where it has not, all is folded again by one process.

    With --release the other release folds it beside this one, and the states are compared on the way; where they
    are not the same, the first entry that shows it is named, and the exit code is 7.
    """
    start_audit("replay", options)


@click.command("redecide")
@_DATA
@_NAME
@_RELEASE
@click.option("--since", metavar="WHEN", help=f"Only decisions since then: {SINCE_FORMS}.")
@click.option("--from-snapshot", type=click.Path(path_type=Path), help="Start from this snapshot.")
@_ARCHIVE
@JSON_OPTION
def redecide(**options: Any) -> None:
    """Decide recorded commands again, and list differences.

    Each command is made again from its events, and believed only if its digest is the recorded one. It is decided
    on the state before it, at the time at which it was decided, by this release or by another one (--release); so
    are passes of the scheduler. What follows goes on from what the ledger has, so that no difference breeds others.

    The exit code is 7 if something else would have happened, and 0 if only words, reasons or the order of events
    differ.
    """
    start_audit("redecide", options)


@click.command("dump")
@_DATA
@_NAME
@click.option(
    "--from", "first", type=click.IntRange(1, REVISION_MAX), default=1, help="First entry to print.  [default: 1]"
)
@click.option("--limit", type=click.IntRange(1, REVISION_MAX), help="Print at most so many entries.")
@click.option("--job", type=click.IntRange(1, REVISION_MAX), metavar="N", help="Only entries of this job.")
@_ARCHIVE
def dump(**options: Any) -> None:
    """Print ledger entries as JSON, one line each."""
    start_audit("dump", options)


@click.command("prove")
@_DATA
@_NAME
@click.option("--job", metavar="JOB", required=True, help="Job to prove; with --data also one that is purged.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), required=True, help="Write it to this file."
)
@_ARCHIVE
@JSON_OPTION
def prove(**options: Any) -> None:
    """Write a proof of a job's history for a third party.

    For somebody who trusts no replica: verify_proof.py checks it, alone, with the keys that `forebay audit
    keys` prints. It holds the commands that concern the job whole: a pass of the scheduler also names the other
    jobs that it was about. It shows that there are no others up to the last count that the checkpoint covers, a
    minute or two ago. The cluster is asked, or a replica's directory is read.
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
@click.option("--list", "listed", is_flag=True, help="List the archive's segments, and write nothing.")
@JSON_OPTION
def archive(**options: Any) -> None:
    """Archive the ledger up to the last checkpoint.

    DIR may be on another file system; each segment is written whole or not at all, and repeating the command goes
    on where it ended. The replica may be running. What is written says what it is of, has the checkpoint that
    covers it, and is verified without the replica (`forebay audit verify --archive`). With --list the segments of
    DIR are listed, with --json all that they say of themselves.
    """
    start_audit("archive", options)


@click.command("prune")
@_DATA
@_NAME
@click.option("--below", type=click.IntRange(1, REVISION_MAX), metavar="INDEX", help="Remove entries before this one.")
@click.option("--older-than", metavar="AGE", help="Remove entries older than this before the end: 90m, 12h, 90d.")
@click.option(
    "--archive",
    "archives",
    type=_DIRECTORY,
    multiple=True,
    required=True,
    metavar="DIR",
    help="Archive that has the entries; give at least two, each is read.",
)
@click.option("--keys", type=click.Path(path_type=Path, dir_okay=False), required=True, metavar="FILE", help=_KEYS)
@click.option("--dry-run", is_flag=True, help="Check everything, show what would be removed, and remove nothing.")
@YES_OPTION
@JSON_OPTION
def prune(**options: Any) -> None:
    """Remove old entries that are archived elsewhere.

    Never without: a checkpoint beyond them that a majority of the keys has signed and that is what the ledger's
    tree comes to; a snapshot beyond them that a state digest in the ledger binds to it; two archives that have
    them, read and verified now. What is missing is said, with what would be right. Whole tiles of 256 entries go;
    the first 64 entries, leaves, digests at both ends and the index by job stay, so proofs and consistency go on.

    A replica that runs removes them itself, a little at a time; one that is stopped is opened here. What is begun
    is finished whenever it is interrupted. The room in the data file is used again.
    """
    start_audit("prune", options)


@click.command("retain")
@click.option("--name", required=True, help="Replica whose ledger is archived.")
@JSON_OPTION
def retain(**options: Any) -> None:
    """Archive and prune according to [retention].

    For a timer, once a day: archives to each directory, then removes what is older than keep_days, or more than
    keep, as far as `forebay audit prune` may. Where nothing is to go, nothing does.
    """
    start_audit("retain", options)


@click.command("restore")
@_DATA
@_NAME
@click.option("--archive", type=_DIRECTORY, required=True, metavar="DIR", help="Archive that has the missing part.")
@JSON_OPTION
def restore_ledger(**options: Any) -> None:
    """Restore the pruned part of a stopped replica's tree.

    From the archive.

    For a replica that has joined since, or lost its tree: without the leaves of old entries it can prove nothing
    and sign no checkpoint. The entries themselves stay in the archive.
    """
    start_audit("restore", options)


@click.command("inspect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Also load it, and check all invariants.")
@JSON_OPTION
def inspect(**options: Any) -> None:
    """Check a backup, and show what it has."""
    start_audit("inspect", options)


@click.command("jobs")
@_DATA
@_NAME
@click.option("-S", "--from", "first", metavar="TIME", help=f"Start of the period: {PAST_FORMS}.")
@click.option("-E", "--to", "last", metavar="TIME", help="End of the period, likewise.")
@click.option("-u", "--user", help="Only jobs of this user.")
@click.option("-A", "--account", help="Only jobs of this account.")
@click.option("-s", "--state", metavar="STATE", help="Only jobs in this state at the end of the period.")
@_ARCHIVE
@JSON_OPTION
def jobs(**options: Any) -> None:
    """List the jobs of a period, as accounting does.

    As accounting has them, and as they were at the end of the window: also those that were purged since. Without
    -S and -E the window is the whole ledger.
    """
    start_audit("jobs", options)


@click.command("report")
@_DATA
@_NAME
@click.option("--from", "first", metavar="TIME", help=f"Start of the period: {PAST_FORMS}.  [default: of the ledger]")
@click.option("--to", "last", metavar="TIME", help="End of the period, likewise.  [default: of the ledger]")
@click.option("--job", "jobs", type=click.IntRange(1), multiple=True, metavar="N", help="Draw this job; repeatable.")
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="Write the page to this file.")
@_ARCHIVE
@JSON_OPTION
def report(**options: Any) -> None:
    """Draw a period of the ledger as an HTML page.

    Jobs' stages as bars, pending jobs by why they waited, what was held of each pool, leaders' terms, and what was
    moved; the figures of each picture as a table. The page needs no network and no other file. With --json the same
    figures are printed instead.

    Unless jobs are named, those are drawn that waited longest. The newest snapshot before the window is where the
    fold begins.
    """
    start_audit("report", options)


@click.command("recover")
@click.option("--name", required=True, help="Surviving replica of this machine; it must not run.")
@click.option("--confirm", metavar="ID", help="Run the plan with this ID.")
@click.option("--yes", is_flag=True, help="Run without a confirmed plan.")
@click.option("--by", metavar="OPERATOR", help="Operator to record in the ledger.  [default: this account]")
@click.option(
    "--leave-behind",
    multiple=True,
    metavar="NAME",
    help="Give up the entries that only this replica has; repeatable.",
)
@JSON_OPTION
def recover(**options: Any) -> None:
    """Rebuild the cluster from one surviving replica.

    It says what this replica has, up to which entry and time, and what may be lost; without --confirm or --yes
    nothing is changed, unless somebody at the terminal says so. Then it is a cluster of one, a new incarnation of
    the one that was: every other directory of that is refused from then on, and the others are added anew. All
    that this replica ever acknowledged is kept, also what it did not know to be committed.

    Refused where a replica answers that somebody leads, or that has more. Certificates, agents and clients go on.
    """
    start_audit("recover", options)


@click.command("whatif")
@_DATA
@_NAME
@click.option("--from", "first", metavar="WHEN", help=f"Start of the period: {WINDOW_FORMS}.  [default: of the ledger]")
@click.option("--to", "last", metavar="WHEN", help="End of the period, likewise.  [default: of the ledger]")
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the configuration (as `config set`), a pool (Pool=fast:+2TiB, fast:-2TiB, fast:8TiB), or "
    "the nodes (Nodes=+16); repeatable.",
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

    Everything that came from outside comes again when it came, everything that agents did takes as long as it took,
    and all else is decided anew: once with nothing changed, which says how far the answer is to be trusted, and
    once with the changes, which are made as commands where the window begins. What is assumed is printed with the
    figures. Nothing is changed in the cluster or the replica's directory, which may be in use.
    """
    start_audit("whatif", options)


@click.command("restore")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--name", required=True, help="Replica of this machine to create; it must have no data.")
@click.option("--confirm", metavar="ID", help="Run the plan with this ID.")
@click.option("--yes", is_flag=True, help="Run without a confirmed plan.")
@click.option("--by", metavar="OPERATOR", help="Operator to record in the ledger.  [default: this account]")
@JSON_OPTION
def restore_backup(**options: Any) -> None:
    """Rebuild the cluster from a backup.

    It says what the snapshot has, and of which time; without --confirm or --yes nothing is changed, unless
    somebody at the terminal says so. Then it is a cluster of one, a new incarnation, whose history begins with the
    snapshot; the others are added anew. It needs the configuration and certificates of the cluster that the
    snapshot is of. Where a replica's directory is left, `forebay cluster recover` keeps more.
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
    note(f"Next: give it away with {VERIFIER}; whoever checks it has the keys already (`forebay audit keys`).")

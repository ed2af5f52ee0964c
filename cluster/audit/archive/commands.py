"""`forebay audit archive|prune|retain|restore`, and the archive's part of `audit verify`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from threading import Event
from typing import Any, Final

import click

from forebay.cluster.audit.archive.pruning import PrunePlan, prune, prune_plan
from forebay.cluster.audit.archive.restoring import restore
from forebay.cluster.audit.archive.retention import below_of_age, below_of_size, within
from forebay.cluster.audit.archive.verifying import Keys, VerifiedArchive, read_keys, verify_archive
from forebay.cluster.audit.archive.writing import archive_ledger
from forebay.cluster.audit.opening import age_of, directory_of, end_of, environment_of, progress_of, sentences
from forebay.cluster.cli.confirmation import confirm
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.session import Session
from forebay.cluster.cli.text import fields_table, format_time, note, show, show_json, size, table
from forebay.cluster.config import RetentionConfig
from forebay.cluster.security.proofs import NoteError
from forebay.cluster.security.proofs.tiles import TILE_WIDTH
from forebay.cluster.server import PruneNote, answer_to_note, leave_note
from forebay.cluster.system import SystemClock, format_instant
from forebay.replica.values import Instant, seconds
from forebay.wal import (
    KEPT_ENTRIES,
    Archive,
    ArchivedLedger,
    Condition,
    Environment,
    Ledger,
    RecoveryRefused,
    Segment,
    SegmentBroken,
    SegmentManifest,
    SegmentName,
)

AGE_FORMS: Final = "an age counted back from the end of the ledger, such as 90m, 12h or 90d"

TAKEN_S: Final = 30.0
"""Seconds within which a running replica must notice a request file: it checks every two seconds."""

STEP_S: Final = 60.0
"""Seconds without a removal after which a running replica counts as stopped."""

DAY_S: Final = 86_400

LOOK_S: Final = 0.2
"""Interval of progress checks, seconds."""


def archive(options: dict[str, Any]) -> None:
    """Write the missing entries of an archive, or list its segments."""
    directory: Path = options["directory"]
    if options["listed"]:
        with sentences():
            _show_listed(Archive(directory), as_json=options["as_json"])
        return
    home = directory_of(options).parent
    with environment_of(options) as environment, progress_of("archiving") as progress:
        written, held = _write_archive(Ledger(environment), home, directory, progress)
    _show_written(directory, written, held, as_json=options["as_json"])


def _write_archive(ledger: Ledger, home: Path, directory: Path, progress: Any) -> tuple[list[SegmentManifest], Archive]:
    try:
        return archive_ledger(ledger, home, directory, progress=progress)
    except BlockingIOError as error:
        raise Failure(
            ExitCode.REFUSED, f"{directory} is being written by another process", "wait until it has ended"
        ) from error
    except OSError as error:
        if isinstance(error, PermissionError):
            raise
        sentence = f"{directory} cannot be written: {error.strerror or error}"
        remedy = "free space or create its parent directory, and run the command again to continue"
        raise Failure(ExitCode.REFUSED, sentence, remedy) from error


def _show_written(directory: Path, written: Sequence[SegmentManifest], held: Archive, *, as_json: bool) -> None:
    if as_json:
        show_json({"directory": str(directory), "written": [str(one.name) for one in written], **_summary(held)})
        return
    for manifest in written:
        click.echo(str(manifest.name))
    what = "1 segment" if len(written) == 1 else f"{len(written)} segments"
    note(f"{what} written; {directory} has the entries 1 to {held.last_index}.")


def _summary(held: Archive) -> dict[str, Any]:
    return {
        "cluster_id": held.cluster_id,
        "last_index": held.last_index,
        "revision": held.end.revision,
        "ledger_digest": held.end.digest.hex(),
        "segments": [_segment(segment) for segment in held.segments],
    }


def _segment(segment: Segment) -> dict[str, Any]:
    manifest = segment.manifest
    return {
        "file": segment.path.name,
        "sha256": segment.sha256.hex(),
        "size_bytes": segment.size_bytes,
        "data_bytes": manifest.data_bytes,
        "first_index": manifest.first_index,
        "last_index": manifest.last_index,
        "first_term": manifest.first_term,
        "last_term": manifest.last_term,
        "revision_before": manifest.revision_before,
        "revision_after": manifest.revision_after,
        "digest_before": manifest.digest_before,
        "digest_after": manifest.digest_after,
        "first_at": None if manifest.first_at is None else format_instant(manifest.first_at),
        "last_at": None if manifest.last_at is None else format_instant(manifest.last_at),
        "checkpoint": manifest.checkpoint,
    }


def _show_listed(held: Archive, *, as_json: bool) -> None:
    if as_json:
        show_json(_summary(held))
        return
    rows = [
        (
            f"{segment.manifest.first_index} to {segment.manifest.last_index}",
            "-" if segment.manifest.first_at is None else format_time(format_instant(segment.manifest.first_at)),
            "-" if segment.manifest.last_at is None else format_time(format_instant(segment.manifest.last_at)),
            size(segment.size_bytes),
        )
        for segment in held.segments
    ]
    show(table(("ENTRIES", "FROM (UTC)", "TO (UTC)", "FILE"), rows))


def verified_archive(
    options: dict[str, Any], environment: Environment | None
) -> tuple[VerifiedArchive, ArchivedLedger | None]:
    """Verify the archive of `audit verify`, alone or with the ledger that continues it."""
    with sentences(), progress_of("verifying the archive") as progress:
        held = Archive(options["archive"])
        if not held.segments:
            raise SegmentBroken(held.directory, "it contains no segments")
        if options["cluster"] is not None and held.cluster_id != options["cluster"]:
            raise SegmentBroken(held.directory, f"it belongs to cluster {held.cluster_id}, not to {options['cluster']}")
        keys = _keys(options["keys"], held.cluster_id)
        ledger = None if environment is None else ArchivedLedger(environment, held)
        behind = () if ledger is None else ledger.read(held.last_index + 1, limit=ledger.applied_index)
        verified = verify_archive(held, keys=keys, following=behind, progress=progress)
    if keys is not None and not verified.signed:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"no checkpoint of {options['archive']} is signed by a majority of the keys of its origin in {keys.place}",
            "use keys from the time at which the archive was written; each incarnation of the cluster has its own keys",
            place="--keys",
        )
    return verified, ledger


def archive_fields(verified: VerifiedArchive) -> dict[str, Any]:
    """Return an archive's fields in `audit verify --json`."""
    return {
        "segments": verified.segments,
        "entries": verified.entries,
        "last_index": verified.last_index,
        "revision": verified.revision,
        "ledger_digest": verified.digest.hex(),
        "data_bytes": verified.data_bytes,
        "size_bytes": verified.size_bytes,
        "checkpoints": verified.roots,
        "checkpoints_later": verified.later,
        "checkpoints_signed": verified.signed,
        "signed_entries": verified.signed_size,
    }


def archive_rows(verified: VerifiedArchive) -> list[tuple[str, str | int | None]]:
    """Return an archive's table rows for `audit verify`."""
    later = f", {verified.later} cover more entries than it has" if verified.later else ""
    return [
        ("Archive", f"{verified.segments} segments, entries 1 to {verified.last_index}, {size(verified.size_bytes)}"),
        ("ArchiveDigest", verified.digest.hex()),
        ("ArchiveCheckpoints", f"{verified.roots} match the entries, {verified.signed} signed by a majority{later}"),
        ("ArchiveSigned", f"entries 1 to {verified.signed_size}" if verified.signed else "not checked: add --keys"),
    ]


def verify_alone(options: dict[str, Any]) -> None:
    """Verify an archive without a ledger."""
    verified, _ = verified_archive(options, None)
    if options["as_json"]:
        show_json({"verified": True, "archive": archive_fields(verified)})
    else:
        show(fields_table([*archive_rows(verified), ("Revision", verified.revision)]))


def _keys(path: Path | None, cluster_id: str) -> Keys | None:
    if path is None:
        return None
    try:
        return read_keys(path, cluster_id)
    except (OSError, UnicodeDecodeError, NoteError) as error:
        remedy = "write it with `forebay audit keys`"
        raise bad_input(f"{path} does not have the replicas' keys: {error}", remedy, place="--keys") from error


def prune_ledger(options: dict[str, Any]) -> None:
    """Remove entries from a replica that are old, verified and archived."""
    if (options["below"] is None) == (options["older_than"] is None):
        raise bad_input("the entries to prune are not given", "give either --below INDEX or --older-than AGE")
    directory = directory_of(options)
    if not options["dry_run"]:
        confirm(f"Remove old entries from {directory}?", yes=options["yes"])
    with environment_of(options) as environment, progress_of("checking") as progress:
        keys = _keys(options["keys"], environment.identity.cluster_id)
        assert keys is not None  # the option is required
        ledger = Ledger(environment).as_of_now()
        below = options["below"] if options["older_than"] is None else _below_of_age(ledger, options["older_than"])
        plan = prune_plan(environment, directory.parent, below, options["archives"], keys, progress=progress)
        opened = _PrunableStorage(directory, environment)
    done = "would go" if options["dry_run"] else "here"
    if plan.entries and not options["dry_run"]:
        done = opened.prune(plan)
    _show_pruned(plan, done, as_json=options["as_json"])


def _below_of_age(ledger: Ledger, text: str) -> int:
    age_s = age_of(text)
    if age_s is None:
        raise bad_input(f"{text[:40]!r} is not an age", f"write {AGE_FORMS}", place="--older-than")
    return below_of_age(ledger, Instant(end_of(ledger) - seconds(age_s)))


class _PrunableStorage:
    """Storage opened for reading, in which this process or the running replica then prunes."""

    def __init__(self, directory: Path, environment: Environment) -> None:
        self._directory = directory
        self._identity = environment.identity
        self._map_size_bytes = environment.map_size_bytes

    def open(self) -> Environment:
        return Environment.open(
            self._directory,
            cluster_id=self._identity.cluster_id,
            replica=self._identity.replica,
            map_size_bytes=self._map_size_bytes,
            create=False,
        )

    def prune(self, plan: PrunePlan) -> str:
        """Remove the entries of a plan; return which process did so."""
        with sentences(), progress_of("pruning") as progress:
            try:
                environment = self.open()
            except RecoveryRefused as error:
                if error.condition is not Condition.HELD_BY_ANOTHER_PROCESS:
                    raise
            else:
                with environment:
                    prune(environment, plan, progress)
                return "here"
            self._request_pruning(plan, progress)
        return "by the running replica"

    def _request_pruning(self, plan: PrunePlan, progress: Any) -> None:
        home, last, clock = self._directory.parent, plan.pruned.below - 1, SystemClock()
        pruned, digest = plan.pruned, plan.digest.hex()
        leave_note(home, PruneNote(self._identity.cluster_id, pruned.below, digest, pruned.segments))
        until_s, reached, answer = clock.monotonic_s() + TAKEN_S, 0, None
        with Environment.open_readonly(self._directory) as environment:
            while reached < last:
                if answer is None:
                    answer = answer_to_note(home)
                if answer:
                    raise Failure(
                        ExitCode.REFUSED, f"the replica rejects the request: {answer.strip()}", "try again later"
                    )
                gap = next((gap for gap in Ledger(environment).gaps() if gap.first_index < last), None)
                before, reached = reached, 0 if gap is None else gap.last_index
                if reached > before:
                    until_s = clock.monotonic_s() + STEP_S
                    progress(min(reached, last), last)
                elif clock.monotonic_s() > until_s:
                    raise Failure(
                        ExitCode.UNREACHABLE,
                        f"the running replica stopped removing entries, at entry {reached} of {last}",
                        f"nothing is lost: the replica continues with {home / 'prune'} when it runs; see its log",
                    )
                Event().wait(LOOK_S)


def _show_pruned(plan: PrunePlan, done: str, *, as_json: bool) -> None:
    last = plan.pruned.below - 1
    if as_json:
        found = {
            "first_index": plan.first_index,
            "last_index": last,
            "entries": plan.entries,
            "ledger_digest": plan.digest.hex(),
            "checkpoint_size": plan.checkpoint_size,
            "signed_by": plan.signers,
            "snapshot_index": plan.snapshot_index,
            "segments": [str(SegmentName(*one[:2])) for one in plan.pruned.segments],
            "removed": done if plan.entries else "nothing",
        }
        show_json(found)
        return
    rows: list[tuple[str, str | int | None]] = [
        (
            "Pruned",
            f"entries {plan.first_index} to {last}, {done}" if plan.entries else f"no entry below {last + 1} is left",
        ),
        ("LedgerDigest", f"{plan.digest.hex()} at entry {last}"),
        ("Checkpoint", f"of {plan.checkpoint_size} entries, signed by {plan.signers}"),
        ("Snapshot", f"of entry {plan.snapshot_index}, confirmed by the ledger"),
        ("Segments", f"{len(plan.pruned.segments)}, in each archive"),
    ]
    show(fields_table(rows))


def retain(options: dict[str, Any]) -> None:
    """Apply [retention] of the configuration: archive, then prune entries over the configured age or size."""
    config = Session(config_path=options["config"]).config()
    table_ = config.retention
    if table_ is None:
        remedy = "write [retention] with archives, keys, keep_days or keep; see docs/reference/configuration.md"
        raise bad_input(f"{config.file} has no table [retention]", remedy, place="retention")
    directory = directory_of(options)
    home = directory.parent
    archived: dict[str, list[str]] = {}
    with environment_of(options) as environment:
        ledger = Ledger(environment).as_of_now()
        held: list[Archive] = []
        for place in table_.archives:
            with progress_of(f"archiving to {place}") as progress:
                written, archive_ = _write_archive(ledger, home, place, progress)
            held.append(archive_)
            archived[str(place)] = [str(one.name) for one in written]
        wanted, (most, last) = _below_of(table_, ledger), within(environment, home, held)
        below = min(wanted, most)
        keys = _keys(table_.keys, environment.identity.cluster_id)
        assert keys is not None
        plan = None
        if _removes_a_tile(ledger, below):
            with progress_of("checking") as progress:
                plan = prune_plan(environment, home, below, table_.archives, keys, progress=progress)
        elif _removes_a_tile(ledger, wanted):
            sentence = f"{last} ends at entry {most - 1}, so entries below {wanted} cannot be pruned yet"
            raise Failure(ExitCode.REFUSED, sentence, "the entries are archived: try again in some minutes")
        opened = _PrunableStorage(directory, environment)
    done = opened.prune(plan) if plan is not None and plan.entries else ""
    _show_retained(archived, plan, done, as_json=options["as_json"])


def _below_of(table_: RetentionConfig, ledger: Ledger) -> int:
    """Return the first entry that the configuration keeps."""
    below = 1
    if table_.keep_days:
        below = max(below, below_of_age(ledger, Instant(end_of(ledger) - seconds(DAY_S * table_.keep_days))))
    if table_.keep_bytes:
        below = max(below, below_of_size(ledger, int(table_.keep_bytes)))
    return below


def _removes_a_tile(ledger: Ledger, below: int) -> bool:
    """Return whether pruning would remove at least one whole tile."""
    front = next((gap.last_index for gap in ledger.gaps() if gap.first_index <= KEPT_ENTRIES + 1), 0)
    return (below - 1) // TILE_WIDTH * TILE_WIDTH > max(front, KEPT_ENTRIES)


def _show_retained(archived: dict[str, list[str]], plan: PrunePlan | None, done: str, *, as_json: bool) -> None:
    entries = 0 if plan is None else plan.entries
    if as_json:
        below = None if plan is None else plan.pruned.below
        show_json(
            {"archived": archived, "pruned_entries": entries, "pruned_below": below, "removed": done or "nothing"}
        )
        return
    for place, names in archived.items():
        click.echo(f"{place}: {len(names)} segments written")
    click.echo(f"pruned: {entries} entries {done}" if plan is not None and entries else "pruned: nothing")


def restore_ledger(options: dict[str, Any]) -> None:
    """Restore the data that proofs need and that all replicas have pruned."""
    directory = directory_of(options)
    with environment_of(options) as environment:
        opened = _PrunableStorage(directory, environment)
    with sentences(), progress_of("deriving") as progress:
        try:
            with opened.open() as environment:
                held = Archive(options["archive"])
                found = restore(environment, directory.parent, held, progress=progress)
        except RecoveryRefused as error:
            if error.condition is not Condition.HELD_BY_ANOTHER_PROCESS:
                raise
            raise Failure(ExitCode.REFUSED, f"{directory} belongs to a running replica", "stop it first") from error
    if options["as_json"]:
        show_json({"tree_size": found.tree_size, "below": found.below})
        return
    click.echo(f"The tree has the first {found.tree_size} entries; those before {found.below} stay in the archive.")

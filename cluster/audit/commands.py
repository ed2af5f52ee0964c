"""Audit commands: open a replica's directory read-only and print the result."""

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import click
import msgspec

from forebay.cluster.api.render import entry_view, record_view
from forebay.cluster.audit.archive import VerifiedArchive
from forebay.cluster.audit.archive.commands import (
    archive,
    archive_fields,
    archive_rows,
    prune_ledger,
    restore_ledger,
    retain,
    verified_archive,
    verify_alone,
)
from forebay.cluster.audit.deep import Deep, snapshots_in, verify_deep, verify_index, verify_tree
from forebay.cluster.audit.opening import OTHER_REPLICA, age_of, end_of
from forebay.cluster.audit.opening import directory_of as _directory
from forebay.cluster.audit.opening import environment_of as _environment
from forebay.cluster.audit.opening import ledger_of as _ledger
from forebay.cluster.audit.opening import progress_of as _progress
from forebay.cluster.audit.opening import sentences as _sentences
from forebay.cluster.audit.proving import NotProven, proof_of
from forebay.cluster.audit.recovering import recover_command, restore_command
from forebay.cluster.audit.redecide import RedecidingReplay
from forebay.cluster.audit.redecide_text import first_words, show_redecided
from forebay.cluster.audit.release import BadTree, Release, ReleaseFailed
from forebay.cluster.audit.release_fold import fold_with
from forebay.cluster.audit.replay import (
    finish_replay,
    fold,
    from_image,
    from_nothing,
    replay,
)
from forebay.cluster.audit.replay_in_parts import replay_in_parts
from forebay.cluster.audit.report import ReportSource, page_of, read_jobs, read_window
from forebay.cluster.audit.whatif import (
    BadChange,
    ChangeRejected,
    Edge,
    ScenarioChanges,
    TooManyJobs,
    WhatIf,
    WindowRefused,
    show_what_if,
    what_if,
    what_if_page,
)
from forebay.cluster.cli.audit.offline import SINCE_FORMS, WINDOW_FORMS, write_proof
from forebay.cluster.cli.commands.config import parse_settings, read_settings
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input, convert_input
from forebay.cluster.cli.files import write_whole
from forebay.cluster.cli.text import (
    fields_table,
    format_elapsed,
    format_time,
    json_line,
    parse_past,
    show,
    show_json,
    size,
    snapshot_fields,
    table,
)
from forebay.cluster.schemas import LedgerEntryView, SnapshotView, made_of
from forebay.cluster.server import AppliedEntry, snapshot_view
from forebay.cluster.system import SystemClock, format_instant, parse_instant
from forebay.replica.messages import Batch, jobs_of
from forebay.replica.model import JobState
from forebay.replica.state import state_digest
from forebay.replica.values import Instant, Revision, seconds
from forebay.snapshots import inspect as inspect_snapshot
from forebay.snapshots import load_snapshot
from forebay.wal import (
    EntryKind,
    Gap,
    IndexPosition,
    Ledger,
    LedgerEntry,
    LedgerSummary,
    PrunedRange,
    SegmentName,
    decode_batch,
    decode_configuration,
    kind_of,
    revision_after,
)


class CheckedSnapshotView(SnapshotView, frozen=True, kw_only=True):
    """Output of `backup inspect --check --json`, which includes a check of the whole snapshot."""

    cluster_id: str
    state_digest: str
    """Digest that a replica returns for `GET /v1/state-digest?at=` with the snapshot's revision."""


def verify(options: dict[str, Any]) -> None:
    """Recompute the digest chain, compare it with known digests, and print the range of present entries."""
    if options["archive"] is not None and options["data"] is None and options["name"] is None:
        verify_alone(options)
        return
    found = _verified(options)
    if options["complete"] and found.gaps:
        _fail_incomplete(found)
    if options["as_json"]:
        show_json(_verified_fields(found))
    else:
        show(fields_table(_verified_rows(found)))


class _Verified(NamedTuple):
    """Result of `verify`. The fields of a deep verification are None without --deep."""

    ledger: LedgerSummary
    revision: int
    gaps: Sequence[Gap]
    pruned: PrunedRange | None
    archived: VerifiedArchive | None
    compared: Deep | None = None
    indexed: IndexPosition | None = None
    signed: int | None = None


def _verified(options: dict[str, Any]) -> _Verified:
    """Verify a directory, and its archive if one is named."""
    expected = _expected(options["expect"])
    archived: VerifiedArchive | None = None
    with _environment(options) as environment:
        running = Ledger(environment)
        # List snapshots before opening the ledger, so that none is newer than the ledger.
        snapshots = _snapshots(options) if options["deep"] else []
        ledger = running.as_of_now()
        cluster = running.cluster_id
        if options["cluster"] is not None and cluster != options["cluster"]:
            raise Failure(
                ExitCode.VERIFICATION_FAILED,
                f"the ledger belongs to cluster {cluster!r}, not to {options['cluster']!r}",
                "check the directory that --data names",
            )
        with _progress("verifying") as progress:
            verified = ledger.verify(revision_after=revision_after, progress=progress)
        revision, gaps, pruned = ledger.applied_revision, verified.gaps, running.pruned_range()
        if options["archive"] is not None:
            archived, both = verified_archive(options, environment)
            assert both is not None
            running, gaps = both, both.gaps()
            ledger = running.as_of_now()
        if expected is not None:
            _check_expected(ledger, *expected)
        found = _Verified(verified, revision, gaps, pruned, archived)
        if not options["deep"]:
            return found
        with _progress("folding") as progress:
            compared = verify_deep(ledger, gaps, snapshots, progress)
        home = _directory(options).parent
        indexed = verify_index(running, home / "index", home / "snapshots")
        with _progress("deriving") as progress:
            return found._replace(compared=compared, indexed=indexed, signed=verify_tree(running, home, progress))


def _fail_incomplete(found: _Verified) -> NoReturn:
    listed = ", ".join(f"{gap.first_index} to {gap.last_index}" for gap in found.gaps)
    remedy = "a running replica fetches them from its peers; verify a replica that has them"
    if found.pruned is not None and found.gaps[0].first_index < found.pruned.below:
        remedy = f"entries before {found.pruned.below} were pruned: name their archive with --archive"
    raise Failure(
        ExitCode.VERIFICATION_FAILED,
        f"the ledger is sound but incomplete: entries {listed} are missing",
        remedy,
    )


def _verified_fields(found: _Verified) -> dict[str, Any]:
    """Return the result for `--json`."""
    ledger, compared = found.ledger, found.compared
    fields: dict[str, Any] = {
        "verified": True,
        "entries": ledger.entries,
        "first_index": ledger.first_index,
        "last_index": ledger.last_index,
        "revision": found.revision,
        "ledger_digest": ledger.digest.hex(),
        "missing": [
            {"first_index": gap.first_index, "last_index": gap.last_index, "revision_after": gap.revision_after}
            for gap in found.gaps
        ],
        "pruned": None if found.pruned is None else _pruned_view(found.pruned),
    }
    if found.archived is not None:
        fields["archive"] = archive_fields(found.archived)
    if compared is not None:
        fields["state_digest"] = compared.state_digest.hex()
        fields["digests_recorded"], fields["digests_compared"] = compared.digests_recorded, compared.digests_compared
        fields["snapshots"] = [
            {"file": str(one.path), "index": one.entry, "state_digest": one.state_digest.hex(), "proven": one.proven}
            for one in compared.snapshots
        ]
        fields["signed_entries"] = found.signed
        indexed = found.indexed
        fields["job_index"] = None if indexed is None else {"index": indexed.index, "revision": indexed.revision}
    return fields


def _verified_rows(found: _Verified) -> list[tuple[str, str | int | None]]:
    """Return the result as rows of a table."""
    pruned, compared = found.pruned, found.compared
    missing = ", ".join(f"{gap.first_index} to {gap.last_index}" for gap in found.gaps) or "nothing"
    rows: list[tuple[str, str | int | None]] = [
        ("LedgerSummary", verified_words(found.ledger)),
        ("Revision", found.revision),
        ("LedgerDigest", found.ledger.digest.hex()),
        ("NotHeldHere", missing),
    ]
    if pruned is not None:
        rows.append(("PrunedRange", f"before entry {pruned.below}, in {len(pruned.segments)} segments of the archive"))
    if found.archived is not None:
        rows += archive_rows(found.archived)
    if compared is not None:
        rows.append(("StateDigest", compared.state_digest.hex()))
        rows.append(("StateDigests", _digests_words(compared.digests_recorded, compared.digests_compared)))
        rows += [("Snapshot", f"{one.path.name}: {_PROVEN if one.proven else _UNPROVEN}") for one in compared.snapshots]
        up_to = "none yet" if found.indexed is None else f"matches the ledger up to entry {found.indexed.index}"
        rows.append(("JobIndex", up_to))
        rows.append(("Signed", "nothing" if found.signed is None else f"matches the ledger up to entry {found.signed}"))
    return rows


def _digests_words(recorded: int, compared: int) -> str:
    """Format how many states were compared with the digests recorded in the ledger."""
    return f"compared {compared} of {recorded} that the ledger records" if recorded else "the ledger records none"


def _pruned_view(pruned: PrunedRange) -> dict[str, Any]:
    return {"below": pruned.below, "segments": [str(SegmentName(*segment[:2])) for segment in pruned.segments]}


_PROVEN: Final = "matches the ledger"
_UNPROVEN: Final = "not compared: earlier entries are not held here"


def _snapshots(options: dict[str, Any]) -> list[tuple[int, Path]]:
    """Return the snapshots beside the ledger; a running replica may add and delete some."""
    directory = _directory(options)
    return snapshots_in(directory.parent / "snapshots")


def _expected(text: str | None) -> tuple[int, str] | None:
    """Return index and digest of `--expect DIGEST@INDEX`."""
    if text is None:
        return None
    digest, at, index = text.lower().partition("@")
    is_digest = 8 <= len(digest) <= 64 and all(digit in "0123456789abcdef" for digit in digest)
    if not is_digest or not at or not index.isdecimal() or not 0 < len(index) < 20:
        raise bad_input(
            f"{text!r} is not a digest and index",
            "give DIGEST@INDEX with 8 to 64 hexadecimal digits, as `forebay cluster probe --digest --json` shows them",
            place="--expect",
        )
    return int(index), digest


def _check_expected(ledger: Ledger, index: int, digest: str) -> None:
    """Check that the ledger up to an entry has this digest.

    Raises:
        Failure: It has another digest, or the entry is not held here.
    """
    held = next(iter(ledger.read(index, limit=1)), None)
    if held is None or held.index != index:
        raise Failure(
            ExitCode.NOT_FOUND,
            f"entry {index} is not held here: {ledger.applied_index} is the last one applied",
            "`forebay audit verify` lists the entries held here",
        )
    if not held.digest.hex().startswith(digest):
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"the ledger up to entry {index} has digest {held.digest.hex()}, not {digest}",
            OTHER_REPLICA,
        )


def verified_words(verified: LedgerSummary) -> str:
    """Format the verified range; a new replica has none."""
    if not verified.entries:
        return "nothing: the ledger is empty"
    entries = "1 entry" if verified.entries == 1 else f"{verified.entries} entries"
    return f"{entries}, {verified.first_index} to {verified.last_index}"


def replay_ledger(options: dict[str, Any]) -> None:
    """Replay the ledger and print the resulting state digest."""
    expected = options["expect"]
    if expected is not None:
        expected = expected.lower()
        if not 8 <= len(expected) <= 64 or any(digit not in "0123456789abcdef" for digit in expected):
            raise bad_input(f"{expected!r} is not a digest", "give 8 to 64 hexadecimal digits", place="--expect")
    if options["release"] is not None and options["at"] is not None:
        raise bad_input("--release compares up to the end of the ledger", "leave out --at or --release", place="--at")
    compared: int | None = None
    with _release(options) as release, _ledger(options) as ledger, _progress("replaying") as progress:
        path: Path | None = options["from_snapshot"]
        if release is None and options["archive"] is None:
            replayed = replay_in_parts(
                ledger,
                _directory(options),
                start=path,
                at_revision=options["at"],
                processes=options["processes"] or len(os.sched_getaffinity(0)),
                progress=progress,
                doubt=lambda why: click.echo(f"forebay: {why}; one process folds everything again", err=True),
            )
        elif release is None:
            start = None if path is None else load_snapshot(path)
            replayed = replay(ledger, start=start, at_revision=options["at"], progress=progress)
        else:
            start = None if path is None else load_snapshot(path)
            ledger = ledger.as_of_now()
            replayed = from_nothing() if start is None else from_image(ledger, start)
            compared = fold_with(release, ledger, replayed, progress)
            replayed = finish_replay(ledger, replayed)
    state, digest, digests = replayed.state, replayed.state_digest.hex(), replayed.digests
    found = {
        "revision": state.revision,
        "state_digest": digest,
        "digests_recorded": digests.recorded,
        "digests_compared": digests.compared,
        "ledger_digest": replayed.ledger_digest.hex(),
        "at": format_instant(state.at),
        "first_index": replayed.first_index,
        "last_index": replayed.last_index,
        "entries": replayed.entries,
        "batches": replayed.batches,
        "no_ops": replayed.no_ops,
        "void_batches": replayed.void_batches,
        "jobs": len(state.jobs),
        "buffers": len(state.buffers),
    }
    if compared is not None:
        found["release"] = {"tree": str(options["release"]), "states_compared": compared, "states_differ": 0}
    if options["as_json"]:
        show_json(found)
    else:
        kinds = f"{replayed.batches} batches, {replayed.no_ops} no-ops, {replayed.void_batches} void"
        rows: list[tuple[str, str | int | None]] = [
            ("Revision", state.revision),
            ("StateDigest", digest),
            ("StateDigests", _digests_words(digests.recorded, digests.compared)),
            ("LedgerDigest", replayed.ledger_digest.hex()),
            ("At", format_time(format_instant(state.at))),
            ("Entries", f"{replayed.entries}, up to {replayed.last_index}: {kinds}"),
            ("Jobs", len(state.jobs)),
        ]
        if compared is not None:
            rows.append(("Release", f"{options['release']} folds it to the same states, compared {compared} times"))
        show(fields_table(rows))
    if expected is not None and not digest.startswith(expected):
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            f"at revision {state.revision} the state digest is {digest}, not {expected}",
            "compare digests of the same revision (--at); if they differ, keep this ledger and report the difference",
        )


def redecide(options: dict[str, Any]) -> None:
    """Decide the ledger's commands again, and print the differences."""
    with _release(options) as release, _ledger(options) as running, _progress("deciding") as progress:
        ledger = running.as_of_now()
        path = options["from_snapshot"]
        start = from_nothing() if path is None else from_image(ledger, load_snapshot(path))
        deciding = RedecidingReplay(start, _since(ledger, options["since"]), release)
        fold(ledger, deciding, ledger.applied_index, progress)
        finish_replay(ledger, deciding)
        states_differ = deciding.finish()
    show_redecided(deciding, options["release"], states_differ, as_json=options["as_json"])
    grave = deciding.grave
    if grave is not None:
        raise Failure(ExitCode.VERIFICATION_FAILED, first_words(grave), "examine each difference before you upgrade")


def _since(ledger: Ledger, text: str | None) -> Callable[[Batch], bool]:
    """Return a predicate for batches in the period of `--since`."""
    if text is None:
        return lambda batch: True
    if text.isdecimal() and len(text) < 20:
        revision = int(text)
        return lambda batch: batch.base + len(batch.entries) >= revision
    age_s = age_of(text)
    try:
        at = parse_instant(text) if age_s is None else Instant(end_of(ledger) - seconds(age_s))
    except ValueError as error:
        raise bad_input(f"{text[:40]!r} is not a time", f"write {SINCE_FORMS}", place="--since") from error
    return lambda batch: batch.at >= at


@contextlib.contextmanager
def _release(options: dict[str, Any]) -> Iterator[Release | None]:
    tree: Path | None = options["release"]
    if tree is None:
        yield None
        return
    try:
        with Release(tree) as release:
            yield release
    except BadTree as error:
        remedy = "name the directory of a checkout or of an unpacked release"
        raise bad_input(str(error), remedy, place="--release") from error
    except ReleaseFailed as error:
        remedy = "run scripts/setup in that tree, or name another one"
        raise Failure(ExitCode.REFUSED, str(error), remedy, place="--release") from error


def is_void(index: int, batch: Batch, ledger: Ledger) -> bool:
    """Return whether the batch is void because another entry settled its revisions."""
    if not batch.entries:
        return False
    try:
        return ledger.index_of_revision(batch.base + 1) != index
    except LookupError:
        return True


def _view(entry: LedgerEntry, ledger: Ledger) -> LedgerEntryView:
    """Return an entry's JSON view. No-ops and void batches have no records and no revisions.

    Raises:
        CodecError: This release does not know the entry.
        LedgerBroken: The entry is damaged.
    """
    kind = kind_of(entry.data)
    batch = decode_batch(entry.data) if kind is EntryKind.BATCH else None
    configuration = decode_configuration(entry.data) if kind is EntryKind.CONFIGURATION else None
    base, entries = (0, ()) if batch is None else (batch.base, batch.entries)
    applied = made_of(
        entry,
        AppliedEntry,
        base=base,
        revision=base + len(entries),
        batch=batch,
        void=batch is not None and is_void(entry.index, batch, ledger),
        size_bytes=len(entry.data),
        configuration=configuration,
    )
    changed = batch is not None and not applied.void
    records = [record_view(one, Revision(base + place)) for place, one in enumerate(entries, 1)] if changed else []
    view = entry_view(applied, records)
    return view if changed else msgspec.structs.replace(view, base_revision=None, revision=None)


def dump(options: dict[str, Any]) -> None:
    """Print entries as JSON lines."""
    with _ledger(options) as running:
        ledger = running.as_of_now()
        limit = options["limit"]
        last_index = ledger.applied_index
        most = max(0, last_index - options["first"] + 1)
        most = most if limit is None else min(limit, most)
        for entry in ledger.read(options["first"], limit=most if options["job"] is None else last_index):
            if options["job"] is not None and not _concerns(entry, options["job"]):
                continue
            if most == 0:
                break
            click.echo(json_line(_view(entry, ledger)))
            most -= 1


def _concerns(entry: LedgerEntry, job: int) -> bool:
    """Return whether an entry settled a command about a job."""
    if kind_of(entry.data) is not EntryKind.BATCH or entry.revision == entry.base:
        return False
    return any(job in jobs_of(event) for one in decode_batch(entry.data).entries for event in one.events)


def inspect(options: dict[str, Any]) -> None:
    """Show a snapshot."""
    path: Path = options["file"]
    with _sentences():
        summary = inspect_snapshot(path)
        checked = load_snapshot(path) if options["check"] else None
    view = snapshot_view(path, summary)
    if checked is not None:
        known = {name: getattr(view, name) for name in view.__struct_fields__}
        state = checked.state
        view = CheckedSnapshotView(**known, cluster_id=state.cluster_id, state_digest=state_digest(state).hex())
    if options["as_json"]:
        show_json(view)
        return
    rows = list(snapshot_fields(view))
    if isinstance(view, CheckedSnapshotView):
        rows.append(("StateDigest", view.state_digest))
    show(fields_table(rows))


def report_html(options: dict[str, Any]) -> None:
    """Render a window of the ledger as one page, or print its figures."""
    output: Path | None = options["output"]
    if (output is None) == (not options["as_json"]):
        raise bad_input("no output is given", "give either -o FILE or --json", place="-o")
    window = {key: _past(f"--{name}", options[key]) for key, name in (("first", "from"), ("last", "to"))}
    with _ledger(options) as ledger, _progress("folding") as progress:
        report = read_window(
            ledger,
            _snapshots(options),
            from_us=window["first"],
            to_us=window["last"],
            jobs=options["jobs"],
            progress=progress,
        )
    if missing := set(options["jobs"]) - {job.job for job in report.jobs}:
        listed = ", ".join(map(str, sorted(missing)))
        raise Failure(ExitCode.NOT_FOUND, f"nothing happened to job {listed} in this window", "widen --from and --to")
    if output is None:
        show_json(report)
        return
    write_whole(output, page_of(report, _made_by(options, report.source)).encode())
    show(f"{output}: revisions {report.source.first_revision} to {report.source.last_revision}")


def prove(options: dict[str, Any]) -> None:
    """Write a proof of a job's history in the ledger."""
    job = convert_input(options["job"], int, "--job")
    home = _directory(options).parent
    with _ledger(options) as ledger, _progress("deriving") as progress:
        try:
            held = proof_of(ledger, home, job, progress=progress)
        except NotProven as error:
            raise Failure(ExitCode.NOT_FOUND, str(error), error.remedy) from error
    write_proof(options["output"], held, options["as_json"])


def whatif(options: dict[str, Any]) -> None:
    """Simulate a window of the ledger with changed settings, print the result, and optionally write a page."""
    policy: Path | None = options["policy"]
    page: Path | None = options["html"]
    try:
        read = None if policy is None else read_settings(policy)
        changes = ScenarioChanges(read, options["settings"], parse_settings)
    except BadChange as error:
        raise bad_input(str(error), error.remedy, place="--set") from error
    with _ledger(options) as running, _progress("reading") as reads, _progress("replaying") as replays:
        ledger = running.as_of_now()
        first, last = (_edge(ledger, f"--{word}", options[key]) for word, key in (("from", "first"), ("to", "last")))
        try:
            found = what_if(ledger, _snapshots(options), first, last, changes, str(policy or ""), reads, replays)
        except WindowRefused as error:
            raise Failure(ExitCode.NOT_FOUND, str(error), error.remedy) from error
        except TooManyJobs as error:
            raise Failure(ExitCode.REFUSED, str(error), "choose a shorter window") from error
        except ChangeRejected as error:
            rejection = error.rejection
            raise bad_input(rejection.sentence, rejection.remedy, place=rejection.place or "--set") from error
    if page is not None:
        write_whole(page, what_if_page(found, _whatif_again(options, found)).encode(), "--html")
    if options["as_json"]:
        show_json(found)
    else:
        show_what_if(found)


def _edge(ledger: Ledger, place: str, text: str | None) -> Edge:
    """Return the start or end of a window."""
    if text is None:
        return Edge()
    if text.isdecimal() and len(text) < 20:
        return Edge(revision=int(text))
    age_s = age_of(text)
    if age_s is not None:
        return Edge(at_us=end_of(ledger) - seconds(age_s))
    try:
        return Edge(at_us=parse_instant(parse_past(text, SystemClock().now())))
    except ValueError as error:
        raise bad_input(f"{text[:40]!r} is not a past time", f"write {WINDOW_FORMS}", place=place) from error


def _whatif_again(options: dict[str, Any], found: WhatIf) -> str:
    """Return the command that reproduces a what-if, also after the ledger has grown."""
    directory, source = _directory(options), found.source
    words = [f"--data={directory}", f"--from={source.first_revision - 1}", f"--to={source.last_revision}"]
    policy = [] if options["policy"] is None else [f"--policy={options['policy']}"]
    changed = [f"--set={one}" for one in options["settings"]]
    return shlex.join(("forebay", "audit", "whatif", *words, *policy, *changed, f"--html={options['html']}"))


def report_jobs(options: dict[str, Any]) -> None:
    """List the jobs of a window."""
    states = tuple(state.name for state in JobState)
    wanted = (options["state"] or "").upper()
    if wanted and wanted not in states:
        raise bad_input(f"{options['state']!r} is not a job state", f"use one of {', '.join(states)}", place="-s")
    first, last = _past("-S", options["first"]), _past("-E", options["last"])
    with _ledger(options) as ledger, _progress("folding") as progress:
        found = read_jobs(ledger, _snapshots(options), from_us=first, to_us=last, progress=progress)
    rows = [
        row
        for row in found
        if options["user"] in (None, row.user)
        and options["account"] in (None, row.account)
        and wanted in ("", row.state)
    ]
    if options["as_json"]:
        show_json({"jobs": rows})
        return
    columns = (
        *("JOBID", "NAME", "USER", "ACCOUNT", "STATE", "EXITCODE", "SUBMIT", "START", "END", "PENDING", "ELAPSED"),
        *("POOL", "SIZE", "IN", "OUT", "NODES"),
    )
    cells = (
        (
            *(row.job, row.name, row.user, row.account, row.state, row.exit_code),
            *(format_time(row.submitted_at), format_time(row.started_at), format_time(row.ended_at)),
            *(format_elapsed(row.pending_s), format_elapsed(row.elapsed_s), row.pool),
            *(size(row.size_bytes), size(row.staged_in_bytes), size(row.staged_out_bytes), row.nodes),
        )
        for row in rows
    )
    right = frozenset({"JOBID", "EXITCODE", "PENDING", "ELAPSED", "SIZE", "IN", "OUT"})
    show(table(columns, cells, right=right))


def _past(place: str, text: str | None) -> int | None:
    def read(text: str) -> int:
        return parse_instant(parse_past(text, SystemClock().now()))

    return None if text is None else convert_input(text, read, place)


def _made_by(options: dict[str, Any], source: ReportSource) -> str:
    """Return the command line that reproduces a report's window, even if the ledger has grown since."""
    directory = _directory(options)
    window = [f"--from={format_instant(Instant(source.from_us))}", f"--to={format_instant(Instant(source.to_us))}"]
    jobs = [f"--job={job}" for job in options["jobs"]]
    archive = [] if options["archive"] is None else [f"--archive={options['archive']}"]
    return shlex.join(
        ("forebay", "audit", "report", f"--data={directory}", *archive, *window, *jobs, "-o", str(options["output"]))
    )


COMMANDS: Final[dict[str, Callable[[dict[str, Any]], None]]] = {
    "verify": verify,
    "replay": replay_ledger,
    "redecide": redecide,
    "whatif": whatif,
    "report": report_html,
    "jobs": report_jobs,
    "dump": dump,
    "prove": prove,
    "archive": archive,
    "prune": prune_ledger,
    "retain": retain,
    "restore": restore_ledger,
    "inspect": inspect,
    "restore-backup": restore_command,
    "recover": recover_command,
}
"""Command name, as `cluster.cli.audit.offline` starts it -> its function."""

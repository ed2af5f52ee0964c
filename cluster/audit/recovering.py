"""`forebay cluster recover`: shows what one replica can recover, and makes it a new incarnation of the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.cluster.cli.confirmation import can_ask, confirm
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.session import Session
from forebay.cluster.cli.text import fields_table, format_time, note, show, show_json
from forebay.cluster.config import Config
from forebay.cluster.server import StorageRefused
from forebay.cluster.server.recovery import (
    RecoveryNotPossible,
    RecoveryPlan,
    RecoveryResult,
    plan_recovery,
    plan_restore,
    recover,
    restore_snapshot,
)
from forebay.cluster.system import SystemClock, format_instant, start_command
from forebay.replica.messages import ReleaseNeeded
from forebay.replica.model import Recovery
from forebay.replica.values import plain
from forebay.snapshots import SnapshotFailed, SnapshotRefused
from forebay.wal import Condition, RecoveryRefused, StorageFailed

_NEXT: Final = "Next: start it with `{start}`. {others}Auditors keep a new key: `forebay audit keys`. {jobs}"
_OTHERS: Final = "Then, for each other replica, move its directory away, and run {commands}. "
_JOBS: Final = (
    "Agents may hold data of jobs {first} to {last}, which the cluster does not know. It stays in buffers/ of the "
    "nodes until you remove it; `forebay node buffers` lists it on each node."
)


class PlanView(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `forebay cluster recover --json`; times as in all replies."""

    done: bool
    plan: str
    replica: str
    member: str
    incarnation: str
    members: tuple[str, ...]
    known_index: int
    kept_index: int
    kept_revision: int
    kept_at: str | None
    uncertain_entries: int
    void_entries: int
    jobs: dict[str, int]
    lost_after_index: int
    lost_after_revision: int
    lost_after: str | None
    """Entry, revision and time up to which everything is kept.

    Changes that other replicas acknowledged later are lost, unless they are among the uncertain entries.
    """
    lost_jobs_first: int
    """First possible ID of a lost job; neither this ID nor higher IDs are reused."""
    reachable: dict[str, int]
    begun: str | None = None
    """New incarnation, if it was started."""
    first_job: int | None = None
    """First job ID that the new incarnation assigns."""


def recover_command(options: dict[str, Any]) -> None:
    """Show kept and lost data; with the plan's ID, or `yes`, start the new incarnation."""
    name, confirmed, yes = options["name"], options["confirm"], options["yes"]
    if confirmed is not None and yes:
        raise bad_input("--confirm and --yes are both given", "give one of them")
    config = Session(config_path=options["config"]).config()
    for one in (name, *options["leave_behind"]):
        config.replica(one)
    check_account(config.storage.directory / name)
    clock, behind = SystemClock(), options["leave_behind"]
    with rejections():
        if confirmed is None:
            plan = asyncio.run(plan_recovery(config, name, clock=clock, leave_behind=behind))
            left = "".join(f" --leave-behind {one}" for one in behind)
            again = f"forebay cluster recover --name {name}{left}{_by(options)}"
            if not (yes or _agreed(plan, options["as_json"], config, again)):
                return
            confirmed = plan.id
        by = options["by"] or account_name()
        done = asyncio.run(recover(config, name, confirmed, by=by, clock=clock, leave_behind=behind))
    show_plan(view_of(done.plan, done), options["as_json"], config)


def restore_command(options: dict[str, Any]) -> None:
    """Show the data to restore; with the plan's ID, or `yes`, restore it."""
    name, file, confirmed, yes = options["name"], options["file"], options["confirm"], options["yes"]
    if confirmed is not None and yes:
        raise bad_input("--confirm and --yes are both given", "give one of them")
    config = Session(config_path=options["config"]).config()
    config.replica(name)
    clock = SystemClock()
    with rejections():
        plan = asyncio.run(plan_restore(config, name, file, clock=clock))
        again = f"forebay backup restore {plain(shlex.quote(str(file)))} --name {name}{_by(options)}"
        if confirmed is None and not yes and not _agreed(plan, options["as_json"], config, again):
            return
        by = options["by"] or account_name()
        plan, recovery = asyncio.run(restore_snapshot(config, name, file, confirmed or plan.id, by=by, clock=clock))
    show_plan(view_of(plan, RecoveryResult(plan=plan, recovery=recovery)), options["as_json"], config)


def _agreed(plan: RecoveryPlan, as_json: bool, config: Config, command: str) -> bool:
    """Show a plan, and return whether a user at a terminal confirmed it.

    Raises:
        Failure: The user did not confirm it.
    """
    show_plan(view_of(plan), as_json, config, command)
    if as_json or not can_ask():
        return False
    confirm("Do it?", yes=False)
    return True


def _by(options: dict[str, Any]) -> str:
    return f" --by {plain(shlex.quote(options['by']))}" if options["by"] else ""


def check_account(directory: Path) -> None:
    """Check that this process runs as the replica's account, because the replica cannot open files of other accounts.

    Raises:
        Failure: It is another account.
    """
    try:
        owner = directory.stat().st_uid
    except OSError as error:
        remedy = "name the replica of this machine; its directory is in [storage] of forebay.toml"
        raise Failure(ExitCode.NOT_FOUND, f"{directory}: {error.strerror}", remedy) from error
    if owner != os.geteuid():
        raise Failure(
            ExitCode.PERMISSION_DENIED,
            f"{directory} belongs to account {_account_of(owner)}, but you are {account_name()}",
            "run it as the user that the replica runs as",
        )


def account_name() -> str:
    """Return the name of the current account."""
    return _account_of(os.geteuid())


def _account_of(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


@contextlib.contextmanager
def rejections() -> Iterator[None]:
    """Convert exceptions of a recovery into failures with an exit code."""
    try:
        yield
    except RecoveryNotPossible as error:
        raise Failure(ExitCode.REFUSED, str(error), "nothing was changed") from error
    except ReleaseNeeded as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), "recover it with that release") from error
    except RecoveryRefused as error:
        held = error.condition is Condition.HELD_BY_ANOTHER_PROCESS
        raise Failure(ExitCode.REFUSED if held else ExitCode.VERIFICATION_FAILED, str(error)) from error
    except SnapshotRefused as error:
        code = ExitCode.VERIFICATION_FAILED if error.path.exists() else ExitCode.NOT_FOUND
        raise Failure(code, error.sentence, "name another snapshot", place=str(error.path)) from error
    except (StorageRefused, StorageFailed, SnapshotFailed) as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error)) from error
    except PermissionError as error:
        raise Failure(
            ExitCode.PERMISSION_DENIED,
            f"{error.filename}: {error.strerror}",
            "give the account that the replica runs as write permission for [storage] directory, or run it as that "
            "account",
        ) from error


def view_of(plan: RecoveryPlan, done: RecoveryResult | None = None) -> PlanView:
    """Return the printed form of a plan or a result."""
    recovery: Recovery | None = None if done is None else done.recovery
    kept_at = format_instant(plan.kept_at)
    return PlanView(
        done=done is not None,
        plan=plan.id,
        replica=plan.replica,
        member=plan.member,
        incarnation=plan.incarnation,
        members=plan.members,
        known_index=plan.known_index,
        kept_index=plan.kept_index,
        kept_revision=plan.kept_revision,
        kept_at=kept_at,
        uncertain_entries=plan.uncertain_entries,
        void_entries=plan.void_entries,
        jobs=plan.jobs,
        lost_after_index=plan.known_index,
        lost_after_revision=plan.known_revision,
        lost_after=format_instant(plan.known_at),
        lost_jobs_first=plan.last_job + 1,
        reachable=plan.reachable,
        begun=None if recovery is None else f"{recovery.incarnation}-{recovery.mark}",
        first_job=None if recovery is None else recovery.first_job,
    )


def show_plan(view: PlanView, as_json: bool, config: Config, command: str = "") -> None:
    """Print a plan with its confirming `command`, or a result with the next steps."""
    if as_json:
        show_json(view)
        return
    others = [member for member in view.members if member != view.member]
    uncertain = (
        f"{view.uncertain_entries} entries after {view.known_index}, the last one known to be committed: kept, since a "
        "majority may have acknowledged them"
        if view.uncertain_entries
        else "none: all of its entries were known to be committed"
    )
    at = format_time(view.kept_at)
    rows: list[tuple[str, str | int | None]] = [
        ("Replica", f"{view.replica} ({view.member})"),
        ("Incarnation", view.begun or f"{view.incarnation}, and a new one after it"),
        ("LeftBehind", ", ".join(others) or "no member"),
        ("Kept", f"up to entry {view.kept_index}, revision {view.kept_revision}, {at}"),
        ("Uncertain", uncertain),
        ("Jobs", ", ".join(f"{count} {word}" for word, count in view.jobs.items()) or "none"),
        (
            "MayBeLost",
            f"changes that others acknowledged after entry {view.lost_after_index}, revision "
            f"{view.lost_after_revision}, {format_time(view.lost_after)}"
            + (", except the uncertain ones" if view.uncertain_entries else ""),
        ),
        ("JobNumbers", f"IDs from {view.lost_jobs_first} on may belong to lost jobs; new jobs get higher ones"),
    ]
    if view.reachable:
        rows.append(("Reachable", ", ".join(f"{name} ({last} entries)" for name, last in view.reachable.items())))
    if not view.done:
        rows.append(("Plan", view.plan))
    show(fields_table(rows))
    if view.done:
        jobs = _JOBS.format(first=view.lost_jobs_first, last=(view.first_job or 0) - 1)
        joins = [
            f"`{one.add_command}` and `{start_command('replica', one.name)}`"
            for one in config.replicas
            if one.name != view.replica
        ]
        note(
            _NEXT.format(
                start=start_command("replica", view.replica),
                others=_OTHERS.format(commands=", or ".join(joins)) if joins else "",
                jobs=jobs,
            )
        )
        return
    their = "their" if others[1:] else "its"
    warning = f" First make sure that {' and '.join(others)} cannot start again: {their} additional entries are lost."
    note(f"Nothing was changed.{warning if others else ''} To proceed: {command} --confirm {view.plan}")

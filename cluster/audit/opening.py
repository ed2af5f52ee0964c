"""Read-only access to a replica's directory for the audit commands, with errors as sentences."""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from forebay.cluster.audit.archive import NotArchived, PruneRefused
from forebay.cluster.audit.replay import READ_ENTRIES, ReplayFailed, ReplayRefused
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.session import Session
from forebay.cluster.cli.text import stderr_console
from forebay.replica.messages import ReleaseNeeded
from forebay.replica.state import StateDigestMismatch
from forebay.replica.values import NEVER, Instant
from forebay.snapshots import SnapshotRefused
from forebay.wal import (
    Archive,
    ArchivedLedger,
    CodecError,
    Condition,
    Environment,
    Ledger,
    LedgerBroken,
    RecoveryRefused,
    SegmentBroken,
    StorageFailed,
    instant_of,
)

OTHER_REPLICA = "do not start a replica with this data; compare it with the other replicas, and replace what is broken"


@contextlib.contextmanager
def sentences() -> Iterator[None]:
    """Convert exceptions of wal and snapshots into failures with an exit code and a remedy."""
    try:
        yield
    except (LedgerBroken, ReplayFailed, StateDigestMismatch) as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), OTHER_REPLICA) from error
    except ReleaseNeeded as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), "read it with that release") from error
    except CodecError as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), "read it with the release that wrote it") from error
    except ReplayRefused as error:
        raise Failure(ExitCode.NOT_FOUND, str(error), "`forebay audit verify` lists the entries held here") from error
    except SnapshotRefused as error:
        if not error.path.exists():
            raise Failure(ExitCode.NOT_FOUND, f"{error.path} does not exist", "name a snapshot file") from error
        remedy = "delete it and use another one; `forebay cluster snapshot` writes a new one"
        raise Failure(ExitCode.VERIFICATION_FAILED, error.sentence, remedy, place=str(error.path)) from error
    except RecoveryRefused as error:
        if error.condition is Condition.DIRECTORY_EMPTY:
            remedy = "name the directory of a replica that has run, with --data or --name"
            raise Failure(ExitCode.NOT_FOUND, f"there is no ledger in {error.place}", remedy) from error
        if isinstance(error.__cause__, PermissionError):
            remedy = "run it as the user that the replica runs as"
            raise Failure(ExitCode.PERMISSION_DENIED, f"{error.place}: permission denied", remedy) from error
        if error.condition is Condition.SYNC_LOG_RESTLESS:
            # Nothing is damaged, so the exit code must differ from that of damage.
            raise Failure(ExitCode.UNREACHABLE, str(error)) from error
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error)) from error
    except StorageFailed as error:
        raise Failure(ExitCode.VERIFICATION_FAILED, str(error), OTHER_REPLICA) from error
    except SegmentBroken as error:
        remedy = "restore it from another copy of the archive, and find out what damaged this one"
        raise Failure(ExitCode.VERIFICATION_FAILED, error.sentence, remedy, place=str(error.path)) from error
    except (NotArchived, PruneRefused) as error:
        raise Failure(ExitCode.REFUSED, str(error), error.remedy) from error
    except PermissionError as error:
        remedy = "run it as the user that the replica runs as"
        raise Failure(ExitCode.PERMISSION_DENIED, f"{error.filename} may not be read", remedy) from error


def directory_of(options: dict[str, Any]) -> Path:
    """Return the storage directory of the options --data or --name."""
    data: Path | None = options.get("data")
    name: str | None = options["name"]
    if (data is None) == (name is None):
        raise bad_input("no ledger is given", "give either --data DIRECTORY or --name REPLICA")
    if data is not None:
        return data / "wal" if (data / "wal").is_dir() else data
    config = Session(config_path=options["config"]).config()
    assert name is not None  # one of the two is required
    try:
        config.replica(name)
    except Exception as error:
        raise bad_input(str(error), "name a replica of the configuration") from error
    return config.wal_directory(name)


@contextlib.contextmanager
def ledger_of(options: dict[str, Any]) -> Iterator[Ledger]:
    """Open the ledger named by the options for reading, with its archive."""
    with environment_of(options) as environment:
        archive: Path | None = options.get("archive")
        yield Ledger(environment) if archive is None else ArchivedLedger(environment, Archive(archive))


@contextlib.contextmanager
def environment_of(options: dict[str, Any]) -> Iterator[Environment]:
    """Open the storage named by the options for reading."""
    directory = directory_of(options)
    with sentences(), Environment.open_readonly(directory) as environment:
        yield environment


@contextlib.contextmanager
def progress_of(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress, reported by calls with the present and the final position."""
    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def update(done: int, last: int) -> None:
            progress.update(task, completed=done, total=last)

        yield update


_AGE: Final = re.compile(r"([1-9][0-9]{0,5})([mhd])", re.ASCII)
_UNIT_S: Final = {"m": 60, "h": 3_600, "d": 86_400}


def age_of(text: str) -> int | None:
    """Return the seconds of an age such as 90m, 12h or 7d; None for other texts."""
    found = _AGE.fullmatch(text)
    return None if found is None else int(found[1]) * _UNIT_S[found[2]]


def end_of(ledger: Ledger) -> Instant:
    """Return the time of the last batch in the ledger; NEVER without one."""
    first, index = ledger.first_index, ledger.applied_index
    while index >= first:
        for entry in reversed(list(ledger.read(max(first, index - READ_ENTRIES + 1), limit=READ_ENTRIES))):
            at = instant_of(entry.data)
            if at is not None:
                return at
        index -= READ_ENTRIES
    return NEVER

"""End of fault-injection runs: exit code, last line, and kept files."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.faults.ending import Ended, percentiles, perform
from tests.faults.local_cluster import RunFailed


async def ends_with(error: BaseException | None) -> None:
    await asyncio.sleep(0)
    if error is not None:
        raise error


def ended(tmp_path: Path, error: BaseException | None) -> tuple[Ended, bool, bool]:
    """Return the end of a run, whether it was cleaned up, and whether its directory is kept."""
    directory, released = tmp_path / "run", []
    directory.mkdir()
    found = perform("x", ends_with(error), release=lambda: released.append(1), directory=directory, seed=7)
    return found, released == [1], directory.exists()


def test_a_successful_run_keeps_nothing_and_prints_json_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, released, kept = ended(tmp_path, None)
    assert (found.succeeded, released, kept) == (True, True, False)
    assert found.report(rounds=3, **percentiles([0.25, 0.5, 1.0])) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.pop("seconds") >= 0
    assert last == {"rounds": 3, "failed": 0, "seed": 7, "takeover_p50_s": 0.5, "takeover_max_s": 1.0}


@pytest.mark.parametrize("error", [RunFailed("lost"), OSError("lost"), TimeoutError("lost")])
def test_a_failed_run_prints_its_command_and_keeps_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    found, released, kept = ended(tmp_path, error)
    assert (found.succeeded, released, kept, found.report()) == (False, True, True, 1)
    said = capsys.readouterr().err
    assert "x: FAILED: lost" in said
    assert said.splitlines()[-1].startswith("x: again with --seed 7; ")
    assert said.splitlines()[-1].endswith(f": {tmp_path / 'run'}")


def test_an_interrupted_run_fails_and_keeps_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, released, kept = ended(tmp_path, KeyboardInterrupt())
    assert (found.succeeded, released, kept) == (False, True, False)
    assert "x: interrupted" in capsys.readouterr().err


def test_an_unexpected_error_is_raised_after_cleaning_up(tmp_path: Path) -> None:
    directory, released = tmp_path / "run", []
    directory.mkdir()
    with pytest.raises(ZeroDivisionError):
        perform("x", ends_with(ZeroDivisionError()), release=lambda: released.append(1), directory=directory, seed=7)
    assert released == [1] and directory.exists()

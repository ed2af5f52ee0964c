"""Our own transcripts, replayed at a real Forebay through the script that people run."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
TIMEOUT_S = 1800


class Replays:
    """A replay of our transcripts and one of altered ones. They mostly wait, so they go on beside each other."""

    def __init__(self, directory: Path) -> None:
        self._ours = self._begin(SITE / "transcripts")
        shutil.copytree(SITE, directory / "site")
        (directory / "site" / "transcripts" / "trouble.txt").unlink()
        path = directory / "site" / "transcripts" / "life.txt"
        (path.parent / "broken.txt").write_text("[   0.000] ## no head\n")
        wrong = path.read_text().replace("Size=8KiB", "Size=12KiB").replace("hurry=false", "hurry=true")
        wrong = wrong.replace("COMPLETED None teardown", "FAILED None teardown")
        path.write_text(wrong.replace("JobState=COMPLETED (squeue COMPLETED/CD) Reason=None BB=teardown",
                                      "JobState=FAILED (squeue FAILED/F) Reason=None BB=teardown"))  # fmt: skip
        self._altered = self._begin(path.parent)
        self._ended: dict[int, tuple[int, dict[str, int], str]] = {}

    @staticmethod
    def _begin(directory: Path) -> subprocess.Popen[str]:
        # What starts a process takes longer beside other tests; what is wrong on purpose lasts to the end.
        line = [str(ROOT / "scripts" / "conformance"), str(directory), "--transient", "10"]
        return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    def ours(self) -> tuple[int, dict[str, int], str]:
        """Return how the replay of our transcripts ended: its code, its last line, and all that it said."""
        return self._end(self._ours)

    def altered(self) -> tuple[int, dict[str, int], str]:
        """Return how the replay of the altered ones ended."""
        return self._end(self._altered)

    def _end(self, process: subprocess.Popen[str]) -> tuple[int, dict[str, int], str]:
        if process.pid in self._ended:
            return self._ended[process.pid]
        said, _ = process.communicate(timeout=TIMEOUT_S)
        summaries = [line for line in said.splitlines() if line.startswith('{"scenarios"')]
        assert summaries, said
        self._ended[process.pid] = process.returncode, json.loads(summaries[-1]), said
        return self._ended[process.pid]

    def close(self) -> None:
        """End what still goes on."""
        for process in (self._ours, self._altered):
            if process.pid not in self._ended:
                process.terminate()
                process.communicate(timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replays]:
    """Both replays, begun at once."""
    begun = Replays(tmp_path_factory.mktemp("replays"))
    yield begun
    begun.close()


def test_forebay_does_what_our_transcripts_say(replays: Replays) -> None:
    code, summary, said = replays.ours()
    assert (code, summary["failed"]) == (0, 0), said
    assert summary["scenarios"] == len(list((SITE / "transcripts").glob("*.txt")))
    assert summary["matched"] + summary["declared"] == summary["steps"]
    assert summary["matched"] > summary["declared"]


@pytest.mark.campaign(4)
def test_a_transcript_of_something_else_fails_and_says_where(replays: Replays) -> None:
    code, summary, said = replays.altered()
    assert code == 1 and summary["failed"] >= 2, said
    assert "expected: FAILED None teardown" in said and "Size=12KiB" in said
    assert "life.txt:" in said


def test_a_provider_that_is_told_another_hurry_is_found(replays: Replays) -> None:
    _, _, said = replays.altered()
    assert "expected: teardown JOB PATH hurry=true\n    got:      (nothing)" in said or (
        "expected: teardown JOB PATH hurry=true\n    got:      teardown JOB PATH hurry=false" in said
    ), said


def test_one_bad_transcript_fails_alone(replays: Replays) -> None:
    code, summary, said = replays.altered()
    assert code == 1 and summary["scenarios"] == len(list((SITE / "transcripts").glob("*.txt")))
    assert "FAILED  broken.txt:" in said and "it does not begin with" in said
    assert "ok      what_outlives_jobs:" in said, said


@pytest.mark.parametrize("text", ["", "hello\n", "[   0.000] ## no head\n"])
def test_a_folder_of_what_is_no_transcript_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    line = [str(ROOT / "scripts" / "conformance"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 2 and "x.txt:1:" in done.stderr

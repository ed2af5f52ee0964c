"""Our own transcripts, replayed at a real Forebay through the script that people run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(__file__).resolve().parent / "site"
TIMEOUT_S = 300


def replay(directory: Path, *options: str) -> tuple[int, dict[str, int], str]:
    line = [str(ROOT / "scripts" / "conformance"), str(directory), *options]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.stdout.splitlines(), done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_forebay_does_what_our_transcripts_say() -> None:
    code, summary, said = replay(SITE / "transcripts")
    assert (code, summary["failed"]) == (0, 0), said
    assert summary["scenarios"] == len(list((SITE / "transcripts").glob("*.txt")))
    assert summary["matched"] + summary["declared"] == summary["steps"]
    assert summary["matched"] > summary["declared"]


def test_a_transcript_of_something_else_fails_and_says_where(tmp_path: Path) -> None:
    shutil.copytree(SITE, tmp_path / "site")
    (tmp_path / "site" / "transcripts" / "trouble.txt").unlink()
    path = tmp_path / "site" / "transcripts" / "life.txt"
    text = path.read_text()
    wrong = text.replace("Size=8KiB", "Size=12KiB").replace("COMPLETED None teardown", "FAILED None teardown")
    path.write_text(wrong.replace("JobState=COMPLETED (squeue COMPLETED/CD) Reason=None BB=teardown",
                                  "JobState=FAILED (squeue FAILED/F) Reason=None BB=teardown"))  # fmt: skip
    code, summary, said = replay(path.parent)
    assert code == 1 and summary["failed"] >= 2, said
    assert "expected: FAILED None teardown" in said and "Size=12KiB" in said
    assert "life.txt:" in said


@pytest.mark.parametrize("text", ["", "hello\n", "[   0.000] ## no head\n"])
def test_a_folder_of_what_is_no_transcript_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.txt").write_text(text)
    line = [str(ROOT / "scripts" / "conformance"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=ROOT)
    assert done.returncode == 2 and "x.txt:1:" in done.stderr

"""Records a transcript at a real Slurm: types the commands of a scenario, and notes each change of each job.

    SLURM_CONF=… python3 recorder.py NAME [--calls FILE] <scenario >transcript

It needs nothing but Python, since it runs where that Slurm is. A scenario has the lines of a transcript without their
stamps: `## title`, `script:` with an indented script, `$ [user] command`. Between them `wait SECONDS` goes on noting,
and `until JOB TEXT` does until a sample of that job has the text, for a minute at most. With --calls the log of the
provider's calls is appended as it is at the end.
"""

import argparse
import datetime
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

PERIOD_S = 0.1
"""Seconds between two samples."""

UNTIL_S = 60.0
"""Seconds after which `until` gives up, and says so."""

_JOB = re.compile(r"\b(JobId|JobState|Reason|BurstBufferState|Priority|SystemComment)=(\S*)")


def ask(*words: str) -> str:
    """Return what a program prints, empty if it fails."""
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def samples() -> Iterator[tuple[int, str]]:
    """Yield each job that slurmctld knows, with a sample of it as a transcript writes it."""
    listed = {}
    for line in ask("squeue", "-h", "-a", "-r", "-t", "all", "-o", "%A %T %t").splitlines():
        job, _, rest = line.partition(" ")
        listed[job] = rest.replace(" ", "/")
    for block in ask("scontrol", "show", "job").split("\n\n"):
        found = dict(_JOB.findall(block))
        if "JobId" not in found:
            continue
        job, held = found["JobId"], " prio0" if found.get("Priority") == "0" else ""
        shown = f"JobState={found.get('JobState', '-')} (squeue {listed.get(job, '-/-')})"
        comment = re.search(r"SystemComment=(.*)", block)
        said = f" sc: {comment[1].strip()}" if comment else ""
        buffer = found.get("BurstBufferState", "")
        yield int(job), f"job {job}: {shown} Reason={found.get('Reason', '')} BB={buffer}{held}{said}"


class Recorder:
    """One recording, from its start on."""

    def __init__(self, name: str) -> None:
        self._began_s = time.monotonic()
        self._known: dict[int, str] = {}
        wall = datetime.datetime.now().isoformat(timespec="milliseconds")  # noqa: DTZ005
        self.write(f"# trace {name}  wall {wall}")

    def write(self, text: str) -> None:
        """Write what happened now."""
        print(f"[{time.monotonic() - self._began_s:8.3f}] {text}", flush=True)

    def note(self) -> None:
        """Write what has changed of the jobs."""
        for job, text in sorted(samples()):
            if self._known.get(job) != text:
                self._known[job] = text
                self.write(f"  {text}")

    def wait(self, seconds: float, job: int = 0, wanted: str = "") -> None:
        """Note for a while, or until a job's sample has a text."""
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s:
            self.note()
            if wanted and wanted in self._known.get(job, ""):
                return
            time.sleep(PERIOD_S)
        if wanted:
            self.write(f"job {job} has not shown {wanted} for {seconds:.0f} s")

    def type(self, command: str, user: str, script: str) -> None:
        """Type one command as a user, and write what it prints."""
        words = ["sh", "-c", command.removesuffix("< script").strip()]
        if user:
            words = ["runuser", "-u", user, "--", *words]
        done = subprocess.run(
            words, input=script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, cwd="/tmp"
        )
        prefix = f"[{user}] " if user else ""
        code = f"\n(exit {done.returncode})" if done.returncode else ""
        self.write(f"$ {prefix}{command}\n{done.stdout.rstrip()}{code}")
        self.note()


def record(name: str, lines: list[str], calls: Path | None) -> None:
    """Record a scenario."""
    recorder, script = Recorder(name), ""
    while lines:
        line = lines.pop(0)
        if line.startswith("## "):
            recorder.write(line)
        elif line == "script:":
            taken = []
            while lines and lines[0].startswith("    "):
                taken.append(lines.pop(0))
            script = "".join(f"{one[4:]}\n" for one in taken)
            recorder.write("\n".join(["script:", *taken]))
        elif line.startswith("$ "):
            typed = re.fullmatch(r"\$ (?:\[(\S+)\] )?(.+)", line)
            assert typed is not None
            recorder.type(typed[2], typed[1] or "", script if typed[2].endswith("< script") else "")
        elif line.startswith("wait "):
            recorder.wait(float(line.split()[1]))
        elif line.startswith("until "):
            _, job, wanted = line.split(maxsplit=2)
            recorder.wait(UNTIL_S, int(job), wanted)
        elif line.strip():
            raise SystemExit(f"recorder: unknown line {line!r}; known are ##, script:, $, wait and until")
    if calls is not None:
        text = "".join(f"\n    {one}" for one in calls.read_text().splitlines())
        recorder.write(f"{calls.name}:{text}")


def main() -> None:
    """Read the options and the scenario."""
    parser = argparse.ArgumentParser(prog="recorder.py", description="Record a transcript at a real Slurm.")
    parser.add_argument("name", help="what the transcript is called")
    parser.add_argument("--calls", type=Path, metavar="FILE", help="the provider's log of calls")
    chosen = parser.parse_args()
    record(chosen.name, sys.stdin.read().splitlines(), chosen.calls)


if __name__ == "__main__":
    main()

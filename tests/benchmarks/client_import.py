"""Processor time of importing the Python client, alternating with `import httpx`, each in a fresh process.

    python -m tests.benchmarks.client_import [--rounds N]

It makes a throwaway environment, and installs the client's wheel and httpx there from the package index.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from tests.repo.tree import ROOT

ROUNDS: Final = 30
"""Processes of each kind, count."""

PROGRAMS: Final = {
    "nothing": "pass",
    "forebay": "from forebay import Client, AsyncClient",
    "httpx": "import httpx",
}


def processor_s(python: Path, program: str) -> float:
    """Return the user and system time of a process, seconds."""
    process = subprocess.Popen([python, "-I", "-c", program])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{program} failed with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Measure, and print medians in milliseconds as JSON."""
    parser = argparse.ArgumentParser(prog="client_import", description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="processes of each kind  [default: %(default)s]")
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory(prefix="forebay-import-") as name:
        directory = Path(name)
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", name]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        [wheel] = directory.glob("*.whl")
        venv.create(directory / "venv", with_pip=True)
        python = directory / "venv" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", str(wheel), "httpx"], check=True)
        times: dict[str, list[float]] = {kind: [] for kind in PROGRAMS}
        for number in range(rounds + 1):
            for kind, program in PROGRAMS.items():
                took_s = processor_s(python, program)
                if number:  # the first round compiles
                    times[kind].append(took_s)
    print(json.dumps({f"{kind}_ms": round(1e3 * statistics.median(took), 1) for kind, took in times.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

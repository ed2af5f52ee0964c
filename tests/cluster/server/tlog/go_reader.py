"""Independent reader of published logs: Go's sumdb packages, called by `reader.go` as a client would.

Installed by `scripts/install-backends --go`. Without it, tests that need it are skipped with that message.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

import pytest

SOURCE: Final = Path(__file__).with_name("reader.go")
GO: Final = shutil.which("go")
PACKAGES: Final = next(Path(os.environ.get("GOPATH", "/usr/share/gocode")).glob("src/*/x/mod/sumdb"), None)
"""Location of the packages in Debian's golang-golang-x-mod-dev."""

needs_go: Final = pytest.mark.skipif(
    GO is None or PACKAGES is None,
    reason="the independent reader needs Go and its sumdb packages: scripts/install-backends --go",
)


@functools.cache
def _built() -> Path:
    """Build the reader once for this process, without a network."""
    directory = tempfile.mkdtemp(prefix="forebay-reader-")
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    program, sources = Path(directory) / "reader", Path(directory) / "src"
    assert GO is not None and PACKAGES is not None
    sources.mkdir()
    (sources / "sumdb").symlink_to(PACKAGES)
    mine = {"GO111MODULE": "off", "GOPATH": directory, "GOCACHE": f"{directory}/cache", "CGO_ENABLED": "0"}
    environment = os.environ | mine
    subprocess.run([GO, "build", "-o", str(program), str(SOURCE)], env=environment, check=True)
    return program


def read(directory: Path, least: int) -> str:
    """Return the reader's output for a log in a directory: `keys`, `old`, `checkpoint`, `tile/…`; one line."""
    command = [str(_built()), str(directory), str(least)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode in (0, 1), found.stderr
    return found.stdout.strip()

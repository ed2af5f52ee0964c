"""Each service that cannot start prints the reason and has a documented exit code."""

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cluster.security.identity import Role
from forebay.cluster.system import EXIT_CONFIGURATION
from tests.cluster.config.test_hangup_of_services import certify
from tests.cluster.test_serve import ROOT, make

SERVICES = {
    "forebay.cluster.gateway": (),
    "forebay.cluster.drills.helper": (),
    "forebay.cluster.slurm": ("--state", "/", "--run", "/"),
}


def run(module: str, file: Path, name: str) -> subprocess.CompletedProcess[str]:
    words = ("--config", str(file), "--name", name, *SERVICES[module])
    return subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("module", SERVICES)
def test_a_service_without_configuration_or_certificate_exits_with_the_reason(module: str, tmp_path: Path) -> None:
    missing = run(module, tmp_path / "none.toml", "tall")
    assert (missing.returncode, "none.toml" in missing.stderr) == (EXIT_CONFIGURATION, True), missing
    config = make(tmp_path, 1)
    certify(config, "small", Role.AGENT)
    for name in ("tall", "small"):
        found = run(module, config.file, name)
        assert (found.returncode, "Traceback" in found.stderr) == (EXIT_CONFIGURATION, False), found
        assert name in found.stderr, found

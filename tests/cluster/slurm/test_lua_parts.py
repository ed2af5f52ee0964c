"""Parts of burst_buffer.lua that slurmctld compiles for a call, in every Lua release."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.slurm import PARTS, script_text, submission_check
from forebay.cluster.slurm.files import SlurmFiles, uptime_s
from tests.cluster.slurm.leader import LeaderDouble
from tests.fuzzing.external_jobs import INTERPRETERS, interpreters

SCRIPT = "#!/bin/sh\n#BB_LUA pool=fast capacity=8MiB\ntrue\n"
WRONG = SCRIPT.replace("fast", "fsat")

lua = pytest.mark.parametrize(
    "interpreter",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in interpreters(), reason=f"{name} is not installed"))
        for name in INTERPRETERS
    ],
)


class SlurmctldHost:
    """Files of a bridge that slurmctld reads."""

    def __init__(self, directory: Path, interpreter: str) -> None:
        self.run = directory / "run"
        self.parts = self.run / PARTS
        self._interpreter = interpreter
        self._script = directory / "job"
        self._lua = directory / "burst_buffer.lua"
        self._lua.write_text(script_text(self.run, directory))

    def bridge(self, users: dict[str, list[int]] | None = None) -> None:
        """Write the files of a starting bridge."""
        files = SlurmFiles(self.run, "head1")
        files.publish()
        files.renew(LeaderDouble()._site(), uptime_s(), "10:03", users)

    def submit(self, script: str, *more: str) -> tuple[int, str]:
        """Return code and text of `job_process`."""
        self._script.write_text(script)
        words = ", ".join((json.dumps(str(self._script)), *more))
        text = (
            f"slurm = {{SUCCESS = 0, ERROR = -1}}\ndofile('{self._lua}')\n"
            f"local rc, said = slurm_bb_job_process({words})\nio.write(tostring(rc), '\\n', tostring(said or ''))\n"
        )
        done = subprocess.run([self._interpreter, "-e", text], capture_output=True, text=True, check=True)
        code, _, said = done.stdout.partition("\n")
        return int(code), said

    def compiled(self) -> list[Path]:
        """Return the compiled parts that slurmctld caches."""
        return [path for path in self.parts.iterdir() if path.suffix != ".lua"]


@lua
def test_forbidden_users_are_rejected_if_slurm_passes_the_user(interpreter: str, tmp_path: Path) -> None:
    host = SlurmctldHost(tmp_path, interpreter)
    host.bridge({"allow": [1001]})
    assert host.submit(SCRIPT, "1001") == (0, "")
    assert host.submit(SCRIPT, "1002") == (-1, "User not found in AllowUsers")
    host.bridge({"deny": [1001]})
    assert host.submit(SCRIPT, "1001") == (-1, "User found in DenyUsers")
    assert host.submit(SCRIPT, "1002") == (0, "")
    assert host.submit(SCRIPT) == (0, "")


@lua
def test_the_check_is_compiled_once_per_bridge(interpreter: str, tmp_path: Path) -> None:
    host = SlurmctldHost(tmp_path, interpreter)
    host.bridge()
    assert host.submit(WRONG)[1].startswith("script line 2, column 9: pool 'fsat' does not exist")
    (kept,) = host.compiled()
    (host.parts / "requests.lua").write_text("error('compiled again')")
    assert host.submit(WRONG)[1].startswith("script line 2, column 9: pool 'fsat' does not exist")
    content = kept.read_bytes()
    host.bridge()
    assert host.compiled() == []
    kept.write_bytes(b"return function() return 'of an earlier bridge' end")
    assert host.submit(WRONG)[1].startswith("script line 2, column 9: pool 'fsat' does not exist")
    assert sorted(len(path.read_bytes()) for path in host.compiled() if path != kept) == [len(content)]


@lua
def test_outdated_tables_are_still_used_for_checks(interpreter: str, tmp_path: Path) -> None:
    # Compiled code of an earlier boot, perhaps incomplete, is not read.
    host = SlurmctldHost(tmp_path, interpreter)
    host.bridge()
    host.submit(SCRIPT)
    (kept,) = host.compiled()
    kept.write_bytes(b"return function() return 'of an earlier boot' end")
    assert host.submit(SCRIPT) == (-1, "of an earlier boot")
    site = host.run / "site.json"
    site.write_text(json.dumps({**json.loads(site.read_text()), "until": uptime_s() - 1, "away": "accept"}))
    assert host.submit(SCRIPT) == (0, "")
    assert host.submit(WRONG)[1].startswith("script line 2, column 9: pool 'fsat' does not exist")


@lua
def test_a_host_that_never_had_a_bridge_rejects_buffer_jobs(interpreter: str, tmp_path: Path) -> None:
    code, said = SlurmctldHost(tmp_path, interpreter).submit(SCRIPT)
    assert code == -1 and said.startswith("the buffer is not available on this host (bridge not running)")


@lua
@pytest.mark.parametrize(
    ("directive", "text", "accepted"),
    [
        ("BB_LUA", None, True),
        ("BB_LUA", "", True),
        ("BB_LUA", "#BB_LUA pool=fast capacity=2GiB", True),
        ("BB_LUA", "pool=fast capacity=2GiB", False),
        ("BB_LUA", "capacity=2K", False),
        ("BB_LUA", "#DW jobdw capacity=2GiB", False),
        ("CONDUIT", "pool=fast\n#CONDUIT pool=fast capacity=2GiB\n", True),
        ("CONDUIT", "#BB_LUA pool=fast capacity=2GiB", False),
    ],
)
def test_job_submit_rejects_an_option_that_slurm_would_ignore(
    interpreter: str, directive: str, text: str | None, accepted: bool, tmp_path: Path
) -> None:
    check = tmp_path / "check.lua"
    check.write_text(submission_check(directive))
    job = "{}" if text is None else f"{{burst_buffer = {json.dumps(text)}}}"
    program = (
        "slurm = {SUCCESS = 0, ERROR = -1, log_user = function(said) io.write(said) end}\n"
        f"local code = dofile('{check}')({job})\nio.write('\\n', tostring(code))\n"
    )
    done = subprocess.run([interpreter, "-e", program], capture_output=True, text=True, check=True)
    said, code = done.stdout.split("\n")
    assert (code == "0", said == "") == (accepted, accepted)
    assert accepted or f"--bb has no #{directive} directive" in said

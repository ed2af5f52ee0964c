"""The bridge as a process with a double of the API, and its exit codes."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from forebay.cluster.cli.commands.services import bridge as run_bridge
from forebay.cluster.cli.commands.slurm import install
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue, load_authority
from forebay.cluster.slurm.__main__ import EXIT_CONFIGURATION
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values import Instant
from tests.cluster.cli.double import Double, forebay, serving

YEARS_AGO = Instant(SystemClock().now() - 30 * 366 * 86_400 * 1_000_000)
ENDS_S = 60.0


@pytest.fixture
def double(tmp_path: Path) -> Iterator[Double]:
    with serving(tmp_path / "cluster") as double:
        yield double


def certify(double: Double, name: str, role: Role, at: Instant | None = None) -> Path:
    tls = double.config.tls
    authority = load_authority(tls.authority.parent)
    issue(authority, tls.certificates, role=role, name=name, at=at or SystemClock().now())
    return tls.certificates / f"{name}.pem"


def bridge(config: Path, directory: Path, name: str = "tall") -> tuple[int, str]:
    """Run a bridge that ends by itself; return its exit code and output."""
    (directory / "state").mkdir(exist_ok=True)
    words = ["--name", name, "--state", str(directory / "state"), "--run", str(directory / "run")]
    done = subprocess.run(
        [sys.executable, "-m", "forebay.cluster.cli", "--config", str(config), "run", "bridge", *words],
        capture_output=True, text=True, check=False, timeout=ENDS_S,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_bridge_without_a_certificate_exits_with_78(double: Double, tmp_path: Path) -> None:
    code, said = bridge(double.config.file, tmp_path)
    assert code == EXIT_CONFIGURATION == 78
    assert f"there is no certificate {double.config.tls.certificates}/tall.pem" in said
    assert "forebay cert issue tall --role scheduler" in said


@pytest.mark.parametrize("role", [role for role in Role if role not in (Role.SCHEDULER, Role.REPLICA)])
def test_a_bridge_with_a_certificate_of_another_role_exits_with_78(double: Double, tmp_path: Path, role: Role) -> None:
    path = certify(double, "tall", role)
    code, said = bridge(double.config.file, tmp_path)
    assert code == 78
    assert f"{path}: has the role {role}, but a bridge needs the role scheduler" in said
    assert "forebay cert issue NAME --role scheduler" in said
    assert double.asked == []


def test_a_bridge_with_an_expired_certificate_exits_with_78(double: Double, tmp_path: Path) -> None:
    path = certify(double, "tall", Role.SCHEDULER, YEARS_AGO)
    code, said = bridge(double.config.file, tmp_path)
    assert code == 78
    assert f"{path}: expired on " in said and "--role scheduler --replace" in said


def test_a_bridge_with_a_certificate_of_another_cluster_exits_with_78(double: Double, tmp_path: Path) -> None:
    other = tmp_path / "other"
    at = SystemClock().now()
    create_authority(other, cluster_name="other", cluster_id="0" * 32, at=at)
    issue(load_authority(other), double.config.tls.certificates, role=Role.SCHEDULER, name="tall", at=at, addresses=[])
    code, said = bridge(double.config.file, tmp_path)
    assert code == 78
    assert f"{double.config.tls.certificates}/tall.pem: belongs to another cluster than {double.config.file}" in said


@pytest.mark.parametrize("wrong", ["", "not a certificate"])
def test_a_bridge_with_an_invalid_certificate_file_exits_with_78(double: Double, tmp_path: Path, wrong: str) -> None:
    path = certify(double, "tall", Role.SCHEDULER)
    path.chmod(0o644)
    path.write_text(wrong)
    code, said = bridge(double.config.file, tmp_path)
    assert code == 78 and str(path) in said and "forebay cert issue tall" in said


def test_a_bridge_without_a_configuration_exits_with_78(tmp_path: Path) -> None:
    code, said = bridge(tmp_path / "none.toml", tmp_path)
    assert code == 78 and "none.toml" in said


def test_a_bridge_starts_without_a_leader(double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certify(double, "tall", Role.SCHEDULER)
    away = double.config.file.with_name("away.toml")
    away.write_text(re.sub(r'(api = "127.0.0.1:)\d+', r"\g<1>9", double.config.file.read_text()))
    (tmp_path / "state").mkdir()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(ENDS_S)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        words = ["--name", "tall", "--state", str(tmp_path / "state"), "--run", str(tmp_path / "run")]
        with subprocess.Popen(
            [sys.executable, "-m", "forebay.cluster.slurm", "--config", str(away), *words]
        ) as process:
            assert manager.recv(100) == b"READY=1"
            assert not (tmp_path / "run" / "pools.json").exists()
            process.terminate()
        assert process.returncode == 0


def test_a_second_slurm_with_the_same_name_exits_with_78(double: Double, tmp_path: Path) -> None:
    certify(double, "tall", Role.SCHEDULER)
    double.refuse(
        "POST", "/v1/scheduler/register", 403, "permission_denied",
        "the external jobs of scheduler tall are of another cluster, which last came from head7",
        remedy="give one of the two clusters another name", place="cluster",
    )  # fmt: skip
    code, said = bridge(double.config.file, tmp_path)
    assert code == 78
    assert "which last came from head7; give one of the two clusters another name" in said
    [asked] = [asked for asked in double.asked if asked.method == "POST"]
    assert (asked.target, asked.identity) == ("/v1/scheduler/register", "scheduler tall")


@pytest.mark.parametrize("command", [install, run_bridge])
def test_commands_work_without_access_to_the_bridge_directory(command: click.Command) -> None:
    # click would report that --run is not readable, without a remedy.
    kinds = [option.type for option in command.params if isinstance(option.type, click.Path)]
    assert kinds != [] and not any(kind.readable for kind in kinds if not kind.file_okay)


def test_install_names_a_missing_slurm_conf(double: Double, tmp_path: Path) -> None:
    result = forebay(double.config, "slurm", "install", "--conf-dir", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path}/slurm.conf: cannot be read (No such file or directory)" in result.stderr
    result = forebay(double.config, "slurm", "install", "--conf-dir", str(tmp_path), "--check", "--remove")
    assert result.exit_code == 2

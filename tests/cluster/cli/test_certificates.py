"""`cert issue` and `cert list`: issued certificates and rejected requests."""

import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from forebay.cluster.cli.commands.certificate import EXPIRY_NOTICE_DAYS
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import CERTIFICATE_LIFETIME_DAYS
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import MICROSECONDS_PER_SECOND, Instant
from tests.clocks import ManualClock
from tests.cluster.cli.double import forebay

DAY = 24 * 3600 * MICROSECONDS_PER_SECOND


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return create_site(
        tmp_path_factory.mktemp("site"), Founding(replicas=1, agents=1, users=("alice",)), clock=SystemClock()
    )


def listed(config: Config, **options: Any) -> dict[str, str]:
    result = forebay(config, "cert", "list", **options)
    assert result.exit_code == 0
    return {line.split()[0]: line.split()[1] for line in result.stdout.splitlines()[1:]}


def issued(config: Config, name: str, role: str, *words: str) -> Result:
    return forebay(config, "cert", "issue", name, "--role", role, *words)


def test_valid_certificates_are_listed_without_warnings(founded: Config) -> None:
    assert listed(founded)["alice"] == "user"
    assert (
        listed(founded).items() >= {"ca": "authority", "n1": "agent", "operator": "operator", "r1": "replica"}.items()
    )
    assert forebay(founded, "cert", "list").stderr == ""


def test_expiring_and_expired_certificates_cause_warnings(founded: Config) -> None:
    now = SystemClock().now()
    for days, expected in (
        (CERTIFICATE_LIFETIME_DAYS - EXPIRY_NOTICE_DAYS + 1, "of alice expires in 58 days"),
        (CERTIFICATE_LIFETIME_DAYS + 1, "of alice has expired"),
    ):
        clock = ManualClock(Instant(now + days * DAY))
        assert expected in forebay(founded, "cert", "list", clock=clock).stderr


@pytest.mark.parametrize(("name", "role"), [("bob", "user"), ("carol", "operator"), ("n7", "agent")])
def test_an_issued_certificate_belongs_to_the_cluster_with_a_private_key(founded: Config, name: str, role: str) -> None:
    result = issued(founded, name, role)
    assert result.exit_code == 0
    assert f"for {role} {name}, valid until 20" in result.stdout
    files = founded.tls_files(name)
    client_context(files)
    assert stat.S_IMODE(files.key.stat().st_mode) == 0o600
    assert listed(founded)[name] == role
    again = issued(founded, name, role)
    assert again.exit_code == ExitCode.BAD_INPUT and "--replace" in again.stderr
    key = files.key.read_bytes()
    assert issued(founded, name, role, "--replace").exit_code == 0
    assert files.key.read_bytes() != key


def test_replica_certificates_have_the_configured_hosts_by_default(founded: Config) -> None:
    assert issued(founded, "r1", "replica", "--replace").exit_code == 0
    server_context(founded.tls_files("r1"))
    assert "127.0.0.1" in forebay(founded, "cert", "list").stdout
    assert "--host" in issued(founded, "r9", "replica").stderr
    assert issued(founded, "r9", "replica", "--host", "10.0.0.9").exit_code == 0
    assert "10.0.0.9" in forebay(founded, "cert", "list").stdout


@pytest.mark.parametrize(
    ("name", "role", "words", "expected"),
    [
        ("r1", "user", ["--replace"], "r1 is a replica in"),
        ("n1", "operator", ["--replace"], "n1 is an agent in"),
        ("operator", "user", ["--replace"], "operator is an operator in"),
        ("alice", "operator", ["--replace"], "alice already has a certificate as a user"),
        ("ca", "user", [], "reserved for the authority"),
        ("../x", "user", [], "is not a valid name"),
        ("dora", "user", ["--host", "x"], "accepts no connections"),
    ],
)
def test_issuing_a_used_name_or_another_role_is_rejected(
    founded: Config, name: str, role: str, words: list[str], expected: str
) -> None:
    before = {path: path.read_bytes() for path in founded.tls.certificates.iterdir()}
    result = issued(founded, name, role, *words)
    assert (result.exit_code, result.stdout) == (ExitCode.BAD_INPUT, "")
    assert expected in result.stderr
    assert {path: path.read_bytes() for path in founded.tls.certificates.iterdir()} == before


def test_a_user_certificate_directory_suffices_to_use_the_cluster(founded: Config, tmp_path: Path) -> None:
    result = issued(founded, "erin", "user", "--into", str(tmp_path / "tls"))
    assert result.exit_code == 0 and "chown" in result.stderr
    assert {path.name for path in (tmp_path / "tls").iterdir()} == {"ca.pem", "erin.pem", "erin.key"}
    (tmp_path / "forebay.toml").write_text(founded.file.read_text())
    client_context(Config.load(tmp_path / "forebay.toml").tls_files("erin"))


def test_issuing_without_the_authority_key_fails_with_a_remedy(founded: Config, tmp_path: Path) -> None:
    assert issued(founded, "frank", "user", "--into", str(tmp_path / "tls")).exit_code == 0
    (tmp_path / "forebay.toml").write_text(founded.file.read_text())
    result = issued(Config.load(tmp_path / "forebay.toml"), "grace", "user")
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "ca.key" in result.stderr
    assert not (tmp_path / "tls" / "grace.pem").exists()


def test_the_authority_of_another_cluster_is_rejected(founded: Config, tmp_path: Path) -> None:
    other = create_site(tmp_path / "other", Founding(replicas=1, agents=0), clock=SystemClock())
    (other.file.parent / "forebay.toml").write_text(founded.file.read_text())
    result = issued(Config.load(other.file), "heidi", "user")
    assert result.exit_code == ExitCode.BAD_INPUT and "belongs to cluster" in result.stderr


def test_every_role_can_be_issued() -> None:
    roles = "replica agent operator user scheduler auditor monitor drill helper gateway"
    assert {role.value for role in Role} == set(roles.split())

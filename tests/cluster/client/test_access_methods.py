"""As whom one comes who names no certificate: never as an operator, and by nobody whom one should not believe."""

import os
import pwd
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.client import access_methods
from forebay.cluster.client.access_methods import GatewayAccess, connect_gateway, own_access_method
from forebay.cluster.client.attempt import AttemptError
from forebay.cluster.config.access import AccessConfig
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.gateway.service import GatewayError, listen_at
from forebay.cluster.security.files import TlsError, TlsFiles
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.system.accounts import PeerAccount
from forebay.cluster.system.clock import SystemClock

ME = pwd.getpwuid(os.geteuid()).pw_name
STRANGER = 4_242


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return create_site(tmp_path_factory.mktemp("site"), Founding(replicas=1, agents=1, founder=ME), clock=SystemClock())


@pytest.fixture
def config(founded: Config, fast_path: Path) -> AccessConfig:
    table = msgspec.structs.replace(founded.access, socket=fast_path / "run" / "gateway.sock")
    return msgspec.structs.replace(founded, access=table)


@pytest.fixture
def listening(config: AccessConfig) -> Iterator[socket.socket]:
    with listen_at(config.access.socket) as found:
        yield found


def test_who_has_no_way_is_told_each_that_there_might_be(config: AccessConfig) -> None:
    with pytest.raises(ConfigError) as refused:
        own_access_method(config)
    told = str(refused.value)
    assert f"there is no gateway at {config.access.socket}" in told
    assert "[access] munge is not set" in told
    assert f"there is no certificate for {ME} in {config.tls.certificates}" in told
    assert "forebay run gateway" in told and "--identity" in told


def test_a_machine_without_munged_says_so(config: AccessConfig, tmp_path: Path) -> None:
    table = msgspec.structs.replace(config.access, munge=True, munge_socket=tmp_path / "none")
    with pytest.raises(ConfigError, match="munged did not create a credential"):
        own_access_method(msgspec.structs.replace(config, access=table))


def test_the_gateway_comes_before_the_certificate_of_ones_own_name(founded: Config, config: AccessConfig) -> None:
    at = SystemClock().now()
    authority = load_authority(founded.tls.authority.parent)
    files = issue(authority, founded.tls.certificates, role=Role.USER, name=ME, at=at)
    try:
        assert own_access_method(config) == TlsFiles(config.tls.authority, files.certificate, files.key)
        with listen_at(config.access.socket):
            assert own_access_method(config) == GatewayAccess(config.access.socket, access_methods._owners(config))
        # It is left behind, and nobody listens any more.
        assert isinstance(own_access_method(config), TlsFiles)
    finally:
        files.certificate.unlink()
        files.key.unlink()


@pytest.mark.usefixtures("listening")
def test_a_service_of_a_stranger_is_refused_and_nothing_is_said_to_it(
    config: AccessConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = GatewayAccess(config.access.socket, frozenset({STRANGER}))
    with pytest.raises(AttemptError, match=f"is run by {ME}"):
        connect_gateway(mine, 1.0)
    monkeypatch.setattr(access_methods, "peer_account", lambda connection: PeerAccount(1, STRANGER, STRANGER))
    with pytest.raises(TlsError, match=f"uid {STRANGER}"):
        own_access_method(config)
    result = CliRunner().invoke(cli, ["--config", str(config.file), "queue"], env={"FOREBAY_IDENTITY": None})
    assert result.exit_code != 0
    table = msgspec.structs.replace(config.access, gateway_account=pwd.getpwuid(1).pw_name)
    monkeypatch.setattr(access_methods, "peer_account", lambda connection: PeerAccount(1, 1, 1))
    assert isinstance(own_access_method(msgspec.structs.replace(config, access=table)), GatewayAccess)


@pytest.mark.usefixtures("listening")
def test_a_second_gateway_does_not_take_the_path_of_the_first(config: AccessConfig) -> None:
    with pytest.raises(GatewayError, match="another gateway already listens"):
        listen_at(config.access.socket)


def test_what_is_no_socket_is_left_where_it_is(config: AccessConfig) -> None:
    config.access.socket.parent.mkdir(exist_ok=True)
    config.access.socket.write_text("mine")
    with pytest.raises(GatewayError, match="is not a socket"):
        listen_at(config.access.socket)
    assert config.access.socket.read_text() == "mine"


def test_nobody_is_an_operator_by_default(founded: Config) -> None:
    """Its certificate and key lie there, and are not taken."""
    assert (founded.tls.certificates / "operator.key").exists()
    result = CliRunner().invoke(cli, ["--config", str(founded.file), "queue"], env={"FOREBAY_IDENTITY": None})
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "there is no gateway at" in result.stderr and "operator" not in result.stderr.partition("start the")[0]


def test_the_founder_operates_his_own_cluster_through_its_own_gateway_and_others_stay_out(founded: Config) -> None:
    table = founded.access
    assert (table.operators, table.operators_through) == ((ME,), ("local",))
    assert table.users == (ME,)  # jobs run as the agent's account
    assert table.socket == founded.file.parent / "gateway.sock"


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('operators = ["a b"]', "access.operators"),
        ('operators = ["%"]', "access.operators"),
        ('users = ["-x"]', "access.users"),
        ('operators_through = ["%ops"]', "access.operators_through"),
        ('operator = ["x"]', "access.operator"),
    ],
)
def test_a_mistake_in_access_is_refused_with_its_place(founded: Config, tmp_path: Path, line: str, key: str) -> None:
    text = founded.file.read_text()
    head, _, tail = text.partition("[access]\n")
    file = tmp_path / "forebay.toml"
    file.write_text(f"{head}[access]\n{line}\n[storage]{tail.partition('[storage]')[2]}")
    with pytest.raises(ConfigError) as refused:
        Config.load(file)
    assert key in str(refused.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_who_gets_the_configuration_after_it_was_read_runs_no_gateway(founded: Config, config: AccessConfig) -> None:
    assert 0 in access_methods._owners(config)
    os.chown(founded.file, 12_345, -1)
    try:
        assert 12_345 not in access_methods._owners(config)
        assert 12_345 in access_methods._owners(Config.load(founded.file))
    finally:
        os.chown(founded.file, 0, -1)


def test_a_socket_that_everybody_may_use_is_never_made_so_by_its_name(
    config: AccessConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between bind and chmod another account could give the name to a link, and root would open its target to all."""

    def fail(*arguments: object, **more: object) -> None:
        raise AssertionError("chmod by name")

    for name in ("chmod", "lchmod"):
        monkeypatch.setattr(Path, name, fail, raising=False)
    before = os.umask(0o077)
    try:
        with listen_at(config.access.socket):
            assert stat.S_IMODE(config.access.socket.lstat().st_mode) == 0o666
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)

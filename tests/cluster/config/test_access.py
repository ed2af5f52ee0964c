"""Clients and replicas read the same values from forebay.toml, and report the same errors."""

from pathlib import Path

import pytest

from forebay.cluster.config import access, config
from forebay.cluster.config.access import AccessConfig
from forebay.cluster.config.config import Config
from forebay.cluster.config.discovery import read_access
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.system.clock import SystemClock


@pytest.fixture
def site(tmp_path: Path) -> Config:
    return create_site(tmp_path, Founding(name="demo", replicas=3, agents=2), clock=SystemClock())


def test_clients_and_replicas_know_the_same_tables() -> None:
    assert set(access._AccessFile.__struct_fields__) == set(config._ConfigFile.__struct_fields__)


def test_clients_and_replicas_read_the_same_values(site: Config) -> None:
    read = read_access(site.file)
    assert type(read) is AccessConfig
    for field in AccessConfig.__struct_fields__:
        assert getattr(read, field) == getattr(site, field)
    assert (read.endpoints, read.tls_files("operator")) == (site.endpoints, site.tls_files("operator"))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[tls]", "[tls]\nkeys = 1"),
        ("[tls]", "[tsl]"),
        ('api = "', 'api = "nowhere at all '),
        ("[[replica]]", "[[replica]]\nrole = 1"),
        ("[cluster]", "[cluster"),
        ("[[replica]]", "[[agent]]"),
        ("[cluster]", "[cluster]\nid = 'short'"),
    ],
)
def test_clients_and_replicas_report_the_same_error(site: Config, before: str, after: str) -> None:
    site.file.write_text(site.file.read_text().replace(before, after))
    with pytest.raises(ConfigError) as replica:
        Config.load(site.file)
    with pytest.raises(ConfigError) as client:
        read_access(site.file)
    assert str(client.value) == str(replica.value)


def test_clients_reject_keys_readable_by_others(site: Config) -> None:
    (site.tls.certificates / "operator.key").chmod(0o644)
    with pytest.raises(ConfigError, match="operator.key has mode 0644"):
        read_access(site.file)

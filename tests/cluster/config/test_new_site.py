"""`forebay cluster init` writes a complete cluster that loads, or nothing."""

import os
import stat
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.config import new_site as founding_module
from forebay.cluster.config.accounts import SOCKET
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import (
    FIRST_START_NAME,
    FileOwner,
    Founding,
    FoundingRefused,
    PoolSpec,
    create_site,
)
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock

CLOCK = SystemClock()


def test_a_new_cluster_loads_with_usable_certificates(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "demo"
    config = create_site(directory, Founding(users=("alice",)), clock=CLOCK)
    assert config == Config.load(directory / "forebay.toml")
    assert [replica.name for replica in config.replicas] == ["r1", "r2", "r3"]
    assert config.replica("r2").peer == Address("127.0.0.1", 7402)
    assert config.replica("r2").api == Address("127.0.0.1", 7412)
    for name in ("r1", "r2", "r3"):
        server_context(config.tls_files(name))
    for name in ("n1", "n2", "operator", "alice"):
        client_context(config.tls_files(name))
    assert config.pools[0].is_default
    assert sorted(path.name for path in directory.iterdir()) == ["forebay.toml", "r1", "r2", "r3", "tls"]
    keys = [path for path in (directory / "tls").iterdir() if path.suffix == ".key"]
    assert {stat.S_IMODE(path.stat().st_mode) for path in keys} == {0o600}


def test_each_host_bundle_has_only_its_own_keys(tmp_path: Path) -> None:
    asked = Founding(
        named=(("r1", "10.0.0.1"), ("r2", "b.test"), ("r3", "b.test")), nodes=(("n7", "10.0.0.1"), ("n8", "c.test"))
    )
    config = create_site(tmp_path, asked, clock=CLOCK)
    assert [str(replica.api) for replica in config.replicas] == ["10.0.0.1:7411", "b.test:7411", "b.test:7412"]
    assert [agent.name for agent in config.agents] == ["n7", "n8"]
    for host, names in (("10.0.0.1", ["n7", "r1"]), ("b.test", ["r2", "r3"]), ("c.test", ["n8"])):
        bundle = tmp_path / "hosts" / host
        there = Config.load(bundle / "forebay.toml")
        assert there.replicas == config.replicas and there.cluster == config.cluster
        assert sorted(key.stem for key in (bundle / "tls").glob("*.key")) == names
        assert {stat.S_IMODE(key.stat().st_mode) for key in (bundle / "tls").glob("*.key")} == {0o600}
        guide = (bundle / "NEXT").read_text()
        for name in names:
            kind = "replica" if name.startswith("r") else "agent"
            assert f"run {kind} --name {name}\n" in guide
            assert (bundle / name / "first-start").exists() == (kind == "replica")
            client_context(there.tls_files(name))
            if kind == "replica":
                found_hosts = certificate_of(bundle / "tls", name).addresses
                assert found_hosts == (there.replica(name).api.host,)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["forebay.toml", "hosts", "tls"]


def test_named_hosts_have_no_operator_without_a_certificate(tmp_path: Path) -> None:
    asked = Founding(named=(("r1", "a.test"),), founder="alan", accounts="switch")
    config = create_site(tmp_path, asked, clock=CLOCK)
    assert (config.access.operators, config.access.socket) == ((), SOCKET)


def test_the_bundle_script_installs_files_and_permits_one_first_start(tmp_path: Path) -> None:
    """Replace the programs of the script by ones that record their arguments."""
    etc, var, programs = tmp_path / "etc", tmp_path / "my var", tmp_path / "bin"
    programs.mkdir()
    for name in ("forebay", "systemctl", "runuser", "chown", "chgrp", "install"):
        (programs / name).write_text('#!/bin/sh\necho "${0##*/} $*"\n')
        (programs / name).chmod(0o755)
    asked = Founding(
        named=(("r1", "a.test"), ("r2", "b.test"), ("r3", "c.test")), nodes=(("n1", "a.test"), ("n2", "d.test")),
        accounts="switch", data=var, account="replicas",
    )  # fmt: skip
    mask = os.umask(0o077)
    try:
        create_site(etc, asked, clock=CLOCK)
    finally:
        os.umask(mask)
    said = {}
    for host in ("a.test", "d.test"):
        bundle = etc / "hosts" / host
        script = (bundle / "NEXT").read_text().replace("/etc/forebay", str(bundle))
        words = ("sh", "-c", script)
        environment = {"PATH": f"{programs}:/usr/bin:/bin"}
        said[host] = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        assert not (bundle / "NEXT").exists(), "typed again it would allow another start without data"
    assert said["a.test"].splitlines() == [
        "chown -R root: .",
        "chgrp replicas tls",
        "chown replicas: tls/r1.key",
        f"install -d -o replicas -g replicas -m 700 {var}/r1",
        f"install -o replicas -g replicas -m 600 /dev/null {var}/r1/first-start",
        "runuser -u replicas -- forebay --config forebay.toml cluster check --name r1",
        "forebay --config forebay.toml cluster check --name n1",
        "systemctl enable --now --no-block forebay-controller@r1 forebay-agent@n1",
    ]
    there = etc / "hosts" / "a.test"
    modes = [stat.S_IMODE((there / name).stat().st_mode) for name in ("", "forebay.toml", "tls", "tls/r1.key")]
    assert modes == [0o755, 0o644, 0o750, 0o600], "whatever mask its founder has"
    assert said["d.test"].splitlines() == [
        "chown -R root: .",
        "forebay --config forebay.toml cluster check --name n2",
        "systemctl enable --now --no-block forebay-agent@n2",
    ]


def test_the_bundle_script_starts_nothing_after_a_failed_check(tmp_path: Path) -> None:
    etc, programs = tmp_path / "etc", tmp_path / "bin"
    programs.mkdir()
    for name, code in (("forebay", 2), ("systemctl", 0), ("chown", 0)):
        (programs / name).write_text(f'#!/bin/sh\necho "${{0##*/}}"\nexit {code}\n')
        (programs / name).chmod(0o755)
    asked = Founding(named=(("r1", "a.test"),), nodes=(("n1", "b.test"),), data=tmp_path / "var", account="replicas")
    create_site(etc, asked, clock=CLOCK)
    bundle = etc / "hosts" / "b.test"
    script = (bundle / "NEXT").read_text().replace("/etc/forebay", str(bundle))
    environment = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(("sh", "-c", script), env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (2, ["chown", "forebay"])
    assert (bundle / "NEXT").exists()


def test_service_data_beside_the_keys_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FoundingRefused, match="use --data-directory /var/lib/forebay"):
        create_site(tmp_path, Founding(named=(("r1", "a.test"),), account="forebay"), clock=CLOCK)
    with pytest.raises(FoundingRefused, match="cannot name an account"):
        create_site(tmp_path, Founding(named=(("r1", "a.test"),), account="a b", data=tmp_path), clock=CLOCK)


@pytest.mark.parametrize(
    ("hosts", "nodes", "said"),
    [
        ((("r1", "a"), ("r2", "b")), (), "2 replicas are not possible"),
        ((("r1", ".."),), (), "neither an IP address nor a host name"),
        ((("r1", "a"),), (("n1", "../x"),), "neither an IP address nor a host name"),
        ((("../r1", "a"),), (), "cannot name a replica"),
        ((("r1", "a"),), (("r1", "b"),), "is used twice"),
        ((("operator", "a"),), (), "cannot name a replica"),
        ((), (("n1", "a"),), "use --host NAME=HOST"),
    ],
)
def test_invalid_hosts_are_rejected_and_leave_no_files(
    tmp_path: Path, hosts: tuple[tuple[str, str], ...], nodes: tuple[tuple[str, str], ...], said: str
) -> None:
    with pytest.raises(FoundingRefused, match=said):
        create_site(tmp_path, Founding(named=hosts, nodes=nodes), clock=CLOCK)
    assert not list(tmp_path.iterdir())


def test_every_init_option_reaches_the_configuration(tmp_path: Path) -> None:
    asked = Founding(
        name="site",
        hosts=("localhost",),
        base_port=9000,
        replicas=5,
        agents=3,
        cpus_per_agent=7,
        accounts="switch",
        pools=(PoolSpec("fast", "96MiB", "8MiB"), PoolSpec("slow", "1GiB", "64MiB", True)),
        source_roots=(Path('/in "a"\\b/%u'),),
        destination_roots=(Path("/out"), Path("/tmp")),
        allow_root=True,
    )
    config = create_site(tmp_path, asked, clock=CLOCK)
    assert config.cluster.name == "site"
    assert [str(replica.api) for replica in config.replicas] == [f"localhost:{9010 + i}" for i in range(5)]
    assert [(agent.cpus, agent.accounts) for agent in config.agents] == [(7, "switch")] * 3
    assert [(pool.name, pool.quantity_bytes, pool.is_default) for pool in config.pools] == [
        ("fast", 96 * 1024**2, False),
        ("slow", 1024**3, True),
    ]
    assert config.policy.sources == ('/in "a"\\b/%u',)
    assert config.policy.destinations == ("/out", "/tmp")
    assert config.policy.allow_root


def test_each_replica_has_its_host_in_file_and_certificate(tmp_path: Path) -> None:
    config = create_site(tmp_path, Founding(hosts=("10.0.0.1", "10.0.0.2", "head3.example.org")), clock=CLOCK)
    assert [str(replica.peer) for replica in config.replicas] == [
        "10.0.0.1:7401", "10.0.0.2:7402", "head3.example.org:7403",
    ]  # fmt: skip
    shown = [certificate_of(config.tls.certificates, name).addresses for name in ("r1", "r2", "r3")]
    assert shown == [("10.0.0.1",), ("10.0.0.2",), ("head3.example.org",)]


def test_an_external_data_directory_is_used(tmp_path: Path) -> None:
    data = tmp_path / "var"
    config = create_site(tmp_path / "etc", Founding(data=data), clock=CLOCK)
    assert sorted(path.name for path in (tmp_path / "etc").iterdir()) == ["forebay.toml", "tls"]
    assert sorted(path.name for path in data.iterdir()) == ["r1", "r2", "r3"]
    assert config.storage.directory == data and config.agents[1].directory == data / "n2"
    assert (data / "r2" / FIRST_START_NAME).exists()
    with pytest.raises(FoundingRefused, match="r1 exists"):
        create_site(tmp_path / "other", Founding(data=data), clock=CLOCK)
    assert not (tmp_path / "other" / "tls").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_replicas_account_owns_only_their_keys_and_directories(tmp_path: Path) -> None:
    config = create_site(
        tmp_path / "etc", Founding(data=tmp_path / "var", owner=FileOwner(4711, 4712), founder="alan"), clock=CLOCK
    )
    tls = config.tls.certificates
    assert (tls.stat().st_uid, tls.stat().st_gid, stat.S_IMODE(tls.stat().st_mode)) == (os.geteuid(), 4712, 0o750)
    given = {path.name for path in tls.iterdir() if path.stat().st_uid == 4711}
    assert given == {"r1.key", "r2.key", "r3.key"}
    for path in ((tmp_path / "var" / "r1"), (tmp_path / "var" / "r1" / FIRST_START_NAME)):
        assert (path.stat().st_uid, path.stat().st_gid) == (4711, 4712), path
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in tls.glob("*.key"))
    # The gateway also has its own directory, and makes the founder an operator.
    assert (config.access.operators, config.access.socket) == (("alan",), SOCKET)
    # Renewing in it goes on.
    issue(load_authority(tls), tls, role=Role.AGENT, name="n1", at=CLOCK.now(), replace=True)


def test_two_clusters_have_different_ids(tmp_path: Path) -> None:
    first, second = (create_site(tmp_path / name, Founding(replicas=1, agents=0), clock=CLOCK) for name in ("a", "b"))
    assert first.cluster.id != second.cluster.id


@pytest.mark.parametrize("there", ["forebay.toml", "tls"])
def test_an_existing_cluster_directory_is_unchanged(tmp_path: Path, there: str) -> None:
    (tmp_path / there).mkdir()
    with pytest.raises(FoundingRefused, match=f"{there} exists"):
        create_site(tmp_path, Founding(), clock=CLOCK)
    assert [path.name for path in tmp_path.rglob("*")] == [there]


def test_an_interrupted_init_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(founding_module, "_write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_site(tmp_path, Founding(), clock=CLOCK)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    create_site(tmp_path, Founding(), clock=CLOCK)


def test_init_removes_only_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner of the directory can rename its contents while root creates a cluster there."""

    def swapped(path: Path, text: str) -> None:
        scratch = path.parent
        path.write_text("half a cluster")
        scratch.rename(tmp_path / "aside")
        (scratch / "private").mkdir(parents=True)
        (scratch / "private" / "thesis").write_text("the only copy")
        raise KeyboardInterrupt

    monkeypatch.setattr(founding_module, "_write_text", swapped)
    with pytest.raises(KeyboardInterrupt):
        create_site(tmp_path, Founding(), clock=CLOCK)
    (thesis,) = tmp_path.rglob("thesis")
    assert thesis.read_text() == "the only copy" and list((tmp_path / "aside").iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (Founding(replicas=2), "2 replicas are not possible; choose 1, 3 or 5"),
        (Founding(agents=-1), "-1 agents are not possible"),
        (Founding(base_port=65530), "is not a port"),
        (Founding(base_port=0), "is not a port"),
        (Founding(hosts=("0.0.0.0",)), "not an address that another machine could connect to"),
        (Founding(hosts=("a b",)), "neither an IP address nor a host name"),
        (Founding(hosts=("a", "b")), "2 hosts for 3 replicas are not possible; name one for all, or one for each"),
        (Founding(hosts=("a", "b", "c d")), "neither an IP address nor a host name"),
        (Founding(data=Path("data")), "the data directory 'data' is not absolute"),
        (Founding(users=("n1",)), "the user name 'n1' is taken"),
        (Founding(users=("operator",)), "the user name 'operator' is taken"),
        (Founding(users=("ca",)), "the user name 'ca' is taken"),
        (Founding(users=("a", "a")), "the user name 'a' is taken"),
        (Founding(users=("../a",)), "cannot name a user"),
        (Founding(source_roots=(Path("data"),)), "'data' is not absolute"),
        (Founding(name="a b"), "cluster.name: found 'a b'"),
        (Founding(cpus_per_agent=0), "agent[1].cpus: found 0"),
        (Founding(pools=(PoolSpec("a", "1", "2"),)), "more than the pool's quantity"),
        (Founding(pools=(PoolSpec("a", "1", "1"), PoolSpec("a", "1", "1"))), "already a pool 'a'"),
        (Founding(destination_roots=(Path("/a/%j"),)), "the only symbol is %u"),
    ],
)
def test_an_invalid_founding_is_rejected_and_leaves_no_files(tmp_path: Path, asked: Founding, sentence: str) -> None:
    with pytest.raises(FoundingRefused) as caught:
        create_site(tmp_path, asked, clock=CLOCK)
    assert sentence in str(caught.value)
    assert ".init" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is not a pool; write it as fast=96MiB/8MiB"),
        ("fast", "is not a pool"),
        ("fast=96MiB", "is not a pool"),
        ("fast=96MiB/8MiB,defautl", "is not a pool"),
        ("=96MiB/8MiB", "cannot name a pool"),
        ("../x=1/1", "cannot name a pool"),
        ("fast=96QiB/8MiB", "pool 'fast': the size '96QiB' has an unknown suffix"),
        ("fast=96MiB/", "pool 'fast': the size is empty"),
        ("fast=-1/1", "has a sign"),
    ],
)
def test_an_invalid_pool_is_rejected(text: str, sentence: str) -> None:
    with pytest.raises(FoundingRefused) as caught:
        PoolSpec.parse(text)
    assert sentence in str(caught.value)


def test_the_directory_entries_of_a_new_cluster_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named: dict[Path, set[str]] = {}
    sync = founding_module.sync_directory

    def synced(directory: Path) -> None:
        named[directory] = {path.name for path in directory.iterdir()}
        sync(directory)

    monkeypatch.setattr(founding_module, "sync_directory", synced)
    site, data = tmp_path / "site", tmp_path / "data"
    create_site(site, Founding(data=data), clock=CLOCK)
    assert named[site] >= {"forebay.toml", "tls"} and named[data] >= {"r1", "r2", "r3"}

"""Tables [[filesystem]], and what [[agent]] says of their tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.cluster.agent.adapters import tools_of
from forebay.cluster.config import Config, ConfigError
from forebay.replica.model import NO_LAYOUT, QUOTAS, FilesystemLayout, SharedFilesystem

BEFORE = """
cluster.name = "test"
cluster.id = "0123456789abcdef0123456789abcdef"
replica = [{ name = "r1", peer = "127.0.0.1:7001", api = "127.0.0.1:7002" }]
"""


def load(tmp_path: Path, more: str) -> Config:
    file = tmp_path / "forebay.toml"
    file.write_text(BEFORE + more)
    file.chmod(0o600)
    return Config.load(file)


def filesystem(*lines: str) -> str:
    return "\n".join(("[[filesystem]]", 'name = "bb"', 'path = "/bb"', *lines))


def test_adapters_of_a_filesystem_found_the_cluster(tmp_path: Path) -> None:
    stripes = ("stripe_count = -1", 'stripe_size = "1MiB"', 'stripe_pool = "flash"')
    config = load(tmp_path, filesystem('quota = "lustre"', 'layout = "lustre"', *stripes))
    layout = FilesystemLayout("lustre", -1, 1 << 20, "flash")
    assert config.filesystems == (SharedFilesystem("bb", "/bb", quota="lustre", layout=layout),)
    assert load(tmp_path, filesystem()).filesystems == (SharedFilesystem("bb", "/bb", quota="auto", layout=NO_LAYOUT),)


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('quota = "zfs"', "filesystem.quota"),
        ('layout = "gpfs"', "filesystem.layout"),
        ("stripe_count = 4", "filesystem.layout"),
        ('layout = "lustre"\nstripe_count = -2', "filesystem.stripe_count"),
        ('layout = "lustre"\nstripe_size = "1KiB"', "filesystem.stripe_size"),
        ('layout = "lustre"\nstripe_pool = "-r"', "filesystem.stripe_pool"),
        ('quotas = "lustre"', "filesystem.quotas"),
    ],
)
def test_an_adapter_that_does_not_exist_is_refused_with_its_place(tmp_path: Path, line: str, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, filesystem(line))
    assert key.rpartition(".")[2] in str(caught.value)
    if key == "filesystem.quota":
        assert all(word in caught.value.remedy for word in QUOTAS)


AGENT = """
[[agent]]
name = "n1"
cpus = 1
"""


def test_tools_of_a_machine_are_those_of_its_agent(tmp_path: Path) -> None:
    more = """
tool_directories = ["/opt/lustre/bin"]
filesystem_command = "/etc/forebay/quota"
quota_groups = "2000000-2000999"
"""
    tools = tools_of(load(tmp_path, AGENT + more).agent("n1"))
    assert tools.directories == ("/opt/lustre/bin",) and tools.command == "/etc/forebay/quota"
    assert tools.quota_groups == (2_000_000, 2_000_999)
    assert "/usr/lpp/mmfs/bin" in tools_of(load(tmp_path, AGENT).agent("n1")).directories


@pytest.mark.parametrize(
    "line",
    [
        'tool_directories = ["bin"]',
        'filesystem_command = "quota"',
        'quota_groups = "5"',
        'quota_groups = "0-5"',
        'quota_groups = "7-5"',
        'quota_groups = "5-4294967295"',
        'quota_groups = "a-b"',
    ],
)
def test_tools_that_cannot_be_are_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, AGENT + line)
    assert line.split()[0] in str(caught.value)

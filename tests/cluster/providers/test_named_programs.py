"""A machine runs a program named in the replicated configuration only if its own forebay.toml names it too.

An operator can change the replicated configuration over the API, and would otherwise be root on every node. The tests
cover every key that names a program, including future ones.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.providers import Local, OperationError, Provider, Subject, provider_for
from forebay.cluster.system.clock import SystemClock
from forebay.replica.grammar.settings import KEYS, SettingKey, ValueKind
from forebay.replica.model.provider import Provision
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.transfer.harness import SMALL, Harness

NAMING = [key for key in KEYS if key.kind in (ValueKind.PROGRAM, ValueKind.TEMPLATE)]
PROVIDERS = ("lua", "datawarp", "generic")
OPERATIONS = (
    "process", "setup", "data_in", "real_size", "paths", "pre_run", "post_run", "data_out",
)  # fmt: skip


def operations(provider: Provider, subject: Subject, directory: str) -> list[Callable[[], object]]:
    """Return every operation of a provider."""
    plain: list[Callable[[], object]] = [
        lambda name=name: getattr(provider, name)(subject, directory)  # type: ignore[misc]
        for name in OPERATIONS
    ]
    return [
        *plain,
        lambda: provider.pools(directory),
        lambda: provider.get_status((), 0, 0, directory),
        lambda: provider.create_persistent(subject, CreatePersistent("lake", 1, "fast"), directory),
        lambda: provider.destroy_persistent(subject, DestroyPersistent("lake", True), directory),
        lambda: provider.teardown(subject, True, directory),
    ]


class Site:
    """Program that records that it ran, for any key."""

    def __init__(self, directory: Path, key: SettingKey) -> None:
        self.key = key
        self.directory = directory
        self.ran = directory / "ran"
        self.calls = directory / "calls"
        self.calls.mkdir()

    def write(self, path: Path) -> Path:
        """Write the program to `path`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        touch = f"touch {self.ran}"
        path.write_text(f'os.execute("{touch}")\n' if self.key.field == "lua_script" else f"#!/bin/sh\n{touch}\n")
        path.chmod(0o755)
        return path

    def run(self, path: Path, local: Local) -> set[str]:
        """Try every operation that could run the key's program; return the error."""
        said = set()
        if self.key.kind is ValueKind.TEMPLATE:
            moving = Harness(Path(tempfile.mkdtemp(dir=self.directory)))
            (moving.source / "x").write_text("x")
            item = moving.item()._replace(backend="template")
            options = msgspec.structs.replace(SMALL, template=f"{path} {{source}} {{destination}}", local=local)
            try:
                moving.carry([item], options)
            except TransferFailed as error:
                said.add(str(error))
            return said
        for name in PROVIDERS:
            provision = Provision(provider=name, poll_interval_s=0)
            provision = msgspec.structs.replace(provision, **{self.key.field: str(path)})
            provider = provider_for(provision, local, SystemClock())
            subject = Subject(job=7, script="#!/bin/sh\n", has_size=True)
            for operation in operations(provider, subject, str(self.calls)):
                try:
                    operation()
                except OperationError as error:
                    said.add(error.message)
        return said


@pytest.fixture(params=NAMING, ids=[key.name for key in NAMING])
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Site:
    return Site(tmp_path, request.param)


def test_a_program_named_only_in_replicated_configuration_is_not_run(site: Site) -> None:
    path = site.write(site.directory / "opt" / "program")
    said = site.run(path, Local())
    assert not site.ran.exists()
    assert any(
        f"{path} may not be run on this machine, because its forebay.toml does not name it" in one for one in said
    ), said
    site.run(path, Local(allowed_programs=(str(path),)))
    assert site.ran.exists()


@pytest.mark.parametrize("link", [False, True], ids=["by its name", "by a link"])
def test_no_program_in_an_agent_or_replica_directory_is_run(site: Site, link: bool) -> None:
    home = site.directory / "n1"
    path = site.write(home / "calls" / "7" / "script")
    if link:
        (site.directory / "elsewhere").symlink_to(home)
        path = site.directory / "elsewhere" / "calls" / "7" / "script"
    said = site.run(path, Local(allowed_programs=(str(path),), closed=(str(home),)))
    assert not site.ran.exists()
    assert any("where this service stores data of others" in one for one in said), said


@pytest.mark.parametrize("which", ["program", "directory", "directory above"])
def test_no_program_that_others_can_change_is_run(site: Site, which: str) -> None:
    path = site.write(site.directory / "a" / "b" / "program")
    changed = {"program": path, "directory": path.parent, "directory above": path.parent.parent}[which]
    changed.chmod(0o777)
    said = site.run(path, Local(allowed_programs=(str(path),)))
    assert not site.ran.exists()
    assert any(f"others may write to {changed}" in one for one in said), said


def test_the_directories_of_all_local_processes_are_closed(tmp_path: Path) -> None:
    config = create_site(tmp_path / "site", Founding(), clock=SystemClock())
    (tmp_path / "site" / "n1").mkdir()
    local = config.provider_here(tmp_path / "later")
    names = {os.path.relpath(path, tmp_path) for path in local.closed}
    assert names == {"site/tls", "site/r1", "site/r2", "site/r3", "site/n1", "later"}


def test_every_configuration_key_for_a_program_is_covered() -> None:
    assert {key.name for key in NAMING} >= {"GetSysState", "LuaScript", "StartStageIn", "TransferTemplate"}

"""Programs of a site, copied to the test's directory, with a record of their calls."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from forebay.cluster.providers import Local, Provider, Subject, provider_for
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.processes import all_pids, become_subreaper, environment_variables
from forebay.replica.model.provider import Provision

HERE = Path(__file__).parent

EVERY_PAIR = os.environ.get("FOREBAY_EVERY_PAIR", "")
"""If set, tests combine every operation with every way to hang; otherwise each of them occurs once."""

A = TypeVar("A")
B = TypeVar("B")

SCRIPT = "#!/bin/sh\n#BB_LUA pool=fast capacity=2K\n#DW jobdw capacity=2K\ntrue\n"


def pairs(some: Sequence[A], others: Sequence[B]) -> list[tuple[A, B]]:
    """Return pairs in which every element occurs, because the whole product takes minutes."""
    if EVERY_PAIR:
        return list(itertools.product(some, others))
    longest = max(len(some), len(others))
    return list(itertools.islice(zip(itertools.cycle(some), itertools.cycle(others), strict=False), longest))


class Programs:
    """Site with programs."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "calls.log"
        self.directory = directory / "calls"
        self.directory.mkdir()
        self.script = directory / "burst_buffer.lua"
        self.command = directory / "dw_wlm_cli"
        self.status = directory / "dwstat"
        for file in (self.script, self.command, self.status):
            shutil.copy(HERE / file.name, file)
            file.chmod(0o755)
        self.variables = {"SITE_LOG": str(self.log)}
        self.status_identity = False
        self.cluster = ""
        self.lua_version = "5.4"
        self.closed: tuple[str, ...] = ()
        self.more: list[Path] = []
        """Other programs that the machine's configuration names."""

    @property
    def marker(self) -> str:
        """Environment variable of every process of this site's calls."""
        return f"SITE_LOG={self.log}"

    def provider(self, name: str, **settings: object) -> Provider:
        """Return a provider with these programs; `settings` are those of Provision."""
        provision = Provision(
            provider=name,
            lua_script=str(self.script),
            get_sys_state=str(self.command),
            get_sys_status=str(self.status),
            poll_interval_s=0,
        )
        # Do not use `convert`, because a test may have a timeout below a second.
        provision = msgspec.structs.replace(provision, **settings)
        return provider_for(provision, self.local, SystemClock())

    @property
    def local(self) -> Local:
        """Return the machine's settings."""
        return Local(
            environment=tuple(self.variables.items()),
            allowed_programs=tuple(map(str, (self.script, self.command, self.status, *self.more))),
            status_identity=self.status_identity,
            cluster=self.cluster,
            lua_version=self.lua_version,
            closed=self.closed,
        )

    def subject(self, *actions: str, **fields: object) -> Subject:
        """Return a job whose directives carry the actions, for example `setup:fail:no_space`."""
        words = " ".join(f"do={action}" for action in actions)
        standard: dict[str, object] = {
            "job": 7,
            "name": "n",
            "user": "alice",
            "uid": 1001,
            "gid": 2002,
            "workdir": "/home/alice",
            "script": f"#!/bin/sh\n#BB_LUA pool=fast capacity=2K {words}\n#DW jobdw capacity=2K {words}\ntrue\n",
            "pool": "fast",
            "size": 2048,
            "has_size": True,
            "node": "n1",
        }
        return msgspec.convert(standard | fields, type=Subject)

    def calls(self) -> list[str]:
        """Return the recorded calls, with this test's directory as D."""
        text = self.log.read_text() if self.log.exists() else ""
        return text.replace(str(self.directory), "D").splitlines()

    def left(self) -> list[int]:
        """Return the living processes of this site's calls."""
        return [pid for pid in all_pids() if pid != os.getpid() and self.marker.encode() in environment_variables(pid)]


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    """Programs of a site; this process adopts orphans of their calls, as a worker does."""
    become_subreaper()
    return Programs(tmp_path)

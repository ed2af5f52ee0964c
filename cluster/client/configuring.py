"""The client's calls about the configuration and about pools that are changed while they are in use."""

from collections.abc import Iterable
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

from cluster.schemas import Command, PoolView, Request
from cluster.schemas import configuration as v
from replica.grammar import Setting

_T = TypeVar("_T")


class Calls(Protocol):
    """What the calls need of a client."""

    def new_command_id(self) -> str: ...
    async def _write(
        self, method: str, path: str, request: Command, kind: type[_T], deadline_s: float | None
    ) -> _T: ...
    async def _read(
        self, path: str, query: dict[str, Any], kind: type[_T], stale: bool, deadline_s: float | None
    ) -> _T: ...
    async def _call(
        self, method: str, target: str, request: Request | None, kind: type[_T], deadline_s: float | None
    ) -> _T: ...


def bodies_of(settings: Iterable[Setting]) -> tuple[v.SettingBody, ...]:
    """Return settings as they are sent."""
    return tuple(
        v.SettingBody(key=one.key, value=one.value, file=one.file, line=one.line, column=one.column) for one in settings
    )


class Configuring:
    """Mixed into the client."""

    async def configuration(
        self: Calls, *, stale: bool = False, deadline_s: float | None = None
    ) -> v.ConfigurationAnswer:
        """Return the configuration of the site (operators)."""
        return await self._read("/v1/configuration", {}, v.ConfigurationAnswer, stale, deadline_s)

    async def compare_configuration(
        self: Calls,
        settings: Iterable[Setting],
        *,
        partial: bool = False,
        expect_revision: int | None = None,
        deadline_s: float | None = None,
    ) -> v.CompareAnswer:
        """Return what `configure` with the same arguments would change; nothing is changed (operators)."""
        request = v.CompareRequest(settings=bodies_of(settings), partial=partial, expect_revision=expect_revision)
        return await self._call("POST", "/v1/configuration/diff", request, v.CompareAnswer, deadline_s)

    async def configure(
        self: Calls,
        settings: Iterable[Setting],
        *,
        partial: bool = False,
        expect_revision: int | None = None,
        command_id: str | None = None,
        deadline_s: float | None = None,
    ) -> v.ConfigurationAnswer:
        """Change the configuration, all of it in one entry or nothing (operators)."""
        request = v.ConfigureRequest(
            command_id=command_id or self.new_command_id(),
            settings=bodies_of(settings),
            partial=partial,
            expect_revision=expect_revision,
        )
        return await self._write("POST", "/v1/configuration", request, v.ConfigurationAnswer, deadline_s)

    async def add_pool(
        self: Calls, name: str, request: v.PoolAddRequest, *, deadline_s: float | None = None
    ) -> PoolView:
        """Make a pool that is not there (operators)."""
        return await self._write("POST", _path(name, "add"), request, PoolView, deadline_s)

    async def change_pool(
        self: Calls, name: str, request: v.PoolChangeRequest, *, deadline_s: float | None = None
    ) -> PoolView:
        """Change what is named of a pool, whoever uses it (operators)."""
        return await self._write("POST", _path(name, "change"), request, PoolView, deadline_s)

    async def remove_pool(
        self: Calls, name: str, *, command_id: str | None = None, deadline_s: float | None = None
    ) -> v.PoolRemovedAnswer:
        """Remove a pool that nobody uses (operators)."""
        request = v.PoolRemoveRequest(command_id=command_id or self.new_command_id())
        return await self._write("POST", _path(name, "remove"), request, v.PoolRemovedAnswer, deadline_s)


def _path(name: str, what: str) -> str:
    return f"/v1/pools/{quote(name, safe='')}/{what}"

"""Machines of a cluster, as who carries a drill out meets them: helpers, certificates, the site's own word."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from typing import Any, Final

import aiohttp
import msgspec

from cluster.cli.drills.preconditions import Site
from cluster.config import Config
from cluster.drill import HelperAnswer, HelperChannel, HelperRefused, LookRequest
from cluster.security import certificate_of, client_context, valid_until
from cluster.system import Address, Clock
from replica.values import MICROSECONDS_PER_SECOND

HALT: Final = "drill.halt"
"""Name of the file beside forebay.toml that keeps drills from beginning, and ends one that is under way."""

SHAKE_S: Final = 2.0
"""How long a replica may take to show its certificate, seconds."""

ANSWER_S: Final = 2.0
"""Seconds in which Prometheus answers."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Bytes of an answer that are read: one that is larger is more than nothing."""


class Machines:
    """What one configuration says of them, asked with one identity."""

    def __init__(self, config: Config, identity: str, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._tls = config.tls_files(identity)

    @property
    def config(self) -> Config:
        """The configuration."""
        return self._config

    @property
    def identity(self) -> str:
        """Who asks."""
        return self._identity

    @property
    def halt_file(self) -> str:
        """The file that says that there shall be no drill; empty: it is not there."""
        file = self._config.file.parent / HALT
        return str(file) if file.exists() else ""

    def site(self) -> Site:
        """Return what the configuration says that matters for a plan."""
        here = datetime.datetime.fromtimestamp(self._clock.now() / MICROSECONDS_PER_SECOND)  # noqa: DTZ006  # the site's
        return Site(
            node_down_s=self._config.timing.node_down_s,
            snapshot_every_entries=self._config.storage.snapshot_every_entries,
            never=self._config.drill.forbids(here.weekday(), here.hour * 60 + here.minute),
            halt=self.halt_file,
        )

    async def channel(self, target: str) -> HelperChannel:
        """Return a connection to the helper of a target's machine; HelperRefused."""
        helper = self._config.helper_of(target)
        if helper is None:
            remedy = "add [[helper]] with it among its targets to forebay.toml, and run it on that machine"
            raise HelperRefused(f"no helper is for {target}", remedy)
        return await HelperChannel.open(helper.name, helper.address, self._tls, self._config.cluster.id)

    async def look(self, scenario: str, target: str) -> tuple[HelperAnswer | str, float]:
        """Return what the helper says to a plan, or why there is nothing, and how far its clock is off, seconds."""
        try:
            channel = await self.channel(target)
            try:
                answer = await channel.ask(LookRequest(scenario, target))
            finally:
                await channel.close()
        except HelperRefused as error:
            return str(error), 0.0
        return answer, (answer.figures.get("now_us", 0) - self._clock.now()) / MICROSECONDS_PER_SECOND

    async def certificates_s(self) -> dict[str, float]:
        """Return for how long the certificates are valid that replicas show, and the own one, seconds, by whose."""
        shown = {self._identity: certificate_of(self._config.tls.certificates, self._identity).valid_until}
        context = client_context(self._tls)

        async def one(name: str, at: Address) -> None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(SHAKE_S):
                    _, writer = await asyncio.open_connection(at.host, at.port, ssl=context)
                    shown[name] = valid_until(writer.get_extra_info("peercert") or {})
                    writer.close()

        await asyncio.gather(*(one(replica.name, replica.api) for replica in self._config.replicas))
        now = self._clock.now()
        return {name: (until - now) / MICROSECONDS_PER_SECOND for name, until in shown.items()}


class Alarm:
    """Expression, asked again and again. Whoever cannot be asked has not said that all is well."""

    def __init__(self, prometheus: str, stop_when: str) -> None:
        self._url = f"{prometheus.rstrip('/')}/api/v1/query"
        self._stop_when = stop_when

    async def ask(self) -> str:
        """Return why a drill has to end, empty while it has not."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url, params={"query": self._stop_when}, allow_redirects=False) as answer,
            ):
                data = await answer.content.read(ANSWER_BYTES_MAX)
                found = _query_result(msgspec.json.decode(data)) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
            found = None
        if found is None:
            return f"Prometheus does not say whether {self._stop_when}"
        return f"Prometheus says that {self._stop_when}" if found else ""


def _query_result(answer: Any) -> bool | None:
    """Return whether anything came of a query; None for what is no answer to one."""
    if not isinstance(answer, dict) or answer.get("status") != "success":
        return None
    result = answer["data"].get("result") if isinstance(answer.get("data"), dict) else None
    return bool(result) if isinstance(result, list) else None

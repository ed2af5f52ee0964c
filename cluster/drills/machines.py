"""Machines of a cluster from a coordinator's view: helpers, certificates, the site's rules for drills."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from typing import Any, Final

import aiohttp
import msgspec

from forebay.cluster.config import Config
from forebay.cluster.drills.helper import HelperAnswer, HelperChannel, HelperRefused, LookRequest
from forebay.cluster.drills.preconditions import Site
from forebay.cluster.security import certificate_of, client_context, valid_until
from forebay.cluster.system import Address, Clock
from forebay.replica.values import MICROSECONDS_PER_SECOND

HALT: Final = "drill.halt"
"""Name of the file beside forebay.toml that forbids drills and aborts a running one."""

SHAKE_S: Final = 2.0
"""Time limit for a TLS handshake with a replica, seconds."""

ANSWER_S: Final = 2.0
"""Time limit for Prometheus, seconds."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Bytes read of an answer of Prometheus."""


class Machines:
    """Machines of a configuration, contacted with one identity."""

    def __init__(self, config: Config, identity: str, clock: Clock) -> None:
        self._config = config
        self._identity = identity
        self._clock = clock
        self._tls = config.tls_files(identity)

    @property
    def config(self) -> Config:
        """Configuration of the cluster."""
        return self._config

    @property
    def identity(self) -> str:
        """Name of the certificate that requests use."""
        return self._identity

    @property
    def halt_file(self) -> str:
        """Path of the file that forbids drills; empty if it does not exist."""
        file = self._config.file.parent / HALT
        return str(file) if file.exists() else ""

    def site(self) -> Site:
        """Return the settings that a plan depends on."""
        here = datetime.datetime.fromtimestamp(self._clock.now() / MICROSECONDS_PER_SECOND)  # noqa: DTZ006  # the site's
        return Site(
            node_down_s=self._config.timing.node_down_s,
            snapshot_every_entries=self._config.storage.snapshot_every_entries,
            never=self._config.drill.forbids(here.weekday(), here.hour * 60 + here.minute),
            halt=self.halt_file,
        )

    async def channel(self, target: str) -> HelperChannel:
        """Connect to the helper of a target's machine.

        Raises:
            HelperRefused: if there is no helper, or it does not accept the connection.
        """
        helper = self._config.helper_of(target)
        if helper is None:
            remedy = "add a [[helper]] with this target to forebay.toml, and run it on the target's machine"
            raise HelperRefused(f"{target} has no helper", remedy)
        return await HelperChannel.open(helper.name, helper.address, self._tls, self._config.cluster.id)

    async def look(self, scenario: str, target: str) -> tuple[HelperAnswer | str, float]:
        """Return the helper's answer about a fault, or an error sentence, and its clock offset, seconds."""
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
        """Return the remaining validity of the replicas' certificates and of this process's, seconds, by name."""
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
    """Prometheus expression that aborts a drill if it has results or cannot be queried."""

    def __init__(self, prometheus: str, stop_when: str) -> None:
        self._url = f"{prometheus.rstrip('/')}/api/v1/query"
        self._stop_when = stop_when

    async def ask(self) -> str:
        """Return the reason to abort the drill, or an empty string."""
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
            return f"Prometheus did not answer the query {self._stop_when}"
        return f"the Prometheus query {self._stop_when} has results" if found else ""


def _query_result(answer: Any) -> bool | None:
    """Return whether a query's result has rows; None for an invalid answer."""
    if not isinstance(answer, dict) or answer.get("status") != "success":
        return None
    result = answer["data"].get("result") if isinstance(answer.get("data"), dict) else None
    return bool(result) if isinstance(result, list) else None

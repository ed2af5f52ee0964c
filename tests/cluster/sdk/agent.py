"""An agent for tests of the Python API: it performs every order at once."""

from __future__ import annotations

from typing import Any

from forebay.cluster.client import Client as ClusterClient
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import agents as agent_schemas
from forebay.replica.messages.commands import OperationDone, ScriptEnded, ScriptStarted
from forebay.replica.model.job_states import JobState


class Agent:
    """An agent that performs every order at once."""

    def __init__(self, config: Config, node: str) -> None:
        self._client = ClusterClient(config.endpoints, config.tls_files(node))
        self._replica, self._node = config.endpoints[0], node

    async def register(self) -> None:
        request = agent_schemas.RegisterRequest(
            command_id=self._client.new_command_id(), instance="i", storage_id="s", cpus=8
        )
        await self._client.register(self._node, request)

    async def work(self) -> None:
        """Perform orders until none is left."""
        while True:
            polled = await self._client.poll(
                self._node, agent_schemas.PollRequest(instance="i", wait_s=0), self._replica
            )
            if not polled.orders:
                return
            for order in polled.orders:
                results: tuple[Any, ...] = (OperationDone(),)
                if order.stage == "run":
                    results = (ScriptStarted(), ScriptEnded(JobState.COMPLETED))
                for result in results:
                    report = agent_schemas.OperationReport(
                        command_id=self._client.new_command_id(),
                        job=order.job,
                        attempt=order.attempt,
                        stage=order.stage,  # type: ignore[arg-type]
                        result=result,
                    )
                    await self._client.report(self._node, agent_schemas.ReportsRequest(reports=(report,)))

    async def close(self) -> None:
        await self._client.close()


def access(config: Config, who: str) -> dict[str, Any]:
    """Return the arguments of `connect` for a certificate."""
    files = config.tls_files(who)
    urls = [address.url for address in config.endpoints]
    return {
        "urls": urls,
        "authority": str(files.authority),
        "certificate": str(files.certificate),
        "key": str(files.key),
    }

"""Connection from a drill's coordinator to a helper."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from typing import Final

import msgspec

from forebay.cluster.client.attempt import cause_of
from forebay.cluster.drills.helper.messages import (
    ANSWERS,
    JSON,
    LINE_BYTES_MAX,
    PROTOCOL,
    Ask,
    HelperAnswer,
    HelperRefused,
)
from forebay.cluster.security import HELPER_HOST, TlsFiles, client_context, identify
from forebay.cluster.system import Address

ANSWER_S: Final = 60.0
"""Timeout of an answer, seconds: longer than a helper takes to cause or undo a fault."""

CONNECT_S: Final = 5.0


class HelperChannel:
    """Connection with one request at a time."""

    def __init__(self, name: str, cluster_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._name = name
        self._reader = reader
        self._writer = writer
        self._turn = asyncio.Lock()

    @classmethod
    async def open(cls, name: str, address: Address, tls: TlsFiles, cluster_id: str) -> HelperChannel:
        """Connect to the helper of that name.

        Raises:
            HelperRefused: The helper does not answer, or has another identity.
            TlsError: This process's certificate cannot be used.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                reader, writer = await asyncio.open_connection(
                    address.host,
                    address.port,
                    ssl=client_context(tls),
                    server_hostname=HELPER_HOST,
                    limit=LINE_BYTES_MAX,
                )
        except ssl.SSLCertVerificationError as error:
            issue = f"forebay cert issue {name} --role helper --replace"
            remedy = (
                f"check its address, {address}, in [[helper]] of forebay.toml, or issue its certificate again: {issue}"
            )
            raise HelperRefused(
                f"the certificate of helper {name} is not valid ({error.verify_message})", remedy
            ) from error
        except (OSError, TimeoutError) as error:
            remedy = f"start it on that machine: forebay run helper --name {name}"
            raise HelperRefused(
                f"helper {name} is not reachable at {address} ({error or 'timed out'})", remedy
            ) from error
        shown = identify(writer.get_extra_info("peercert"), cluster_id=cluster_id)
        if (shown.role, shown.name) != ("helper", name):
            writer.close()
            raise HelperRefused(f"{address} belongs to {shown}, not to helper {name}", "see [[helper]] in forebay.toml")
        return cls(name, cluster_id, reader, writer)

    async def ask(self, ask: Ask) -> HelperAnswer:
        """Send a request and return the answer.

        Raises:
            HelperRefused: The helper does not answer, or rejects the request.
        """
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_S):
                    self._writer.write(JSON.encode(ask) + b"\n")
                    await self._writer.drain()
                    answer = ANSWERS.decode(await self._reader.readuntil(b"\n"))
            except (OSError, TimeoutError, EOFError, asyncio.LimitOverrunError, msgspec.MsgspecError) as error:
                raise HelperRefused(
                    f"helper {self._name} does not answer ({cause_of(error)})", "see its log"
                ) from error
        if answer.protocol < PROTOCOL:
            raise HelperRefused(f"helper {self._name} has an earlier release", "update it, and start it again")
        if not answer.done:
            raise HelperRefused(answer.sentence, answer.remedy)
        return answer

    async def close(self) -> None:
        """Close the connection."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

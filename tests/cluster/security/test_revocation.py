"""A revoked certificate is rejected at every listener, and its open connections end."""

import asyncio
import ssl

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.security.certificates import certificate_of
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from tests.cluster.channel.test_channel import channel_of
from tests.cluster.harness import Harness, story
from tests.cluster.security.test_peers import read_to_end


async def connections(
    config: Config, channel: int, who: str
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Return three connections: to the channel, idle at the API, and at the API with a request in progress."""
    context = client_context(config.tls_files(who))
    api = config.replica("r1").api
    made = []
    for place, path in ((Address("127.0.0.1", channel), ""), (api, "/healthz"), (api, "/v1/events")):
        reader, writer = await asyncio.open_connection(place.host, place.port, ssl=context, server_hostname="127.0.0.1")
        if path:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        else:
            assert await reader.read(1)
        made.append((reader, writer))
    return made


@pytest.mark.parametrize("by", ["name", "serial"])
@story
async def test_revoked_certificate_is_rejected_and_its_connections_end(config: Config, by: str) -> None:
    serial = certificate_of(config.tls.certificates, "alice").serial
    certificate = "user:alice" if by == "name" else f"serial:{serial}"
    async with Harness(config) as harness, channel_of(harness) as channel:
        open_ones = await connections(config, channel.port, "alice")
        others = await connections(config, channel.port, "bob")
        assert (await harness.ask("GET", "/v1/jobs", who="alice")).status == 200
        body = {"command_id": harness.new_id(), "reason": "key lost"}
        answer = await harness.ask("PUT", f"/v1/revocations/{certificate}", body)
        assert answer.status == 200, answer.body
        (row,) = answer.body["revocations"]
        assert (row["certificate"], row["reason"], row["by"]) == (certificate, "key lost", "operator")
        assert (row["until"] is None) == (by == "name")
        for reader, writer in open_ones:
            await read_to_end(reader)
            writer.close()
        refused = await harness.ask("GET", "/v1/jobs", who="alice")
        assert (refused.status, refused.sentence) == (401, f"{certificate} was revoked by operator: key lost")
        with pytest.raises((ConnectionError, ssl.SSLError, AssertionError)):
            await connections(config, channel.port, "alice")
        assert harness.service.peers.count >= len(others)
        assert (await harness.ask("GET", "/v1/jobs", who="bob")).status == 200

        removed = await harness.ask("POST", f"/v1/revocations/{certificate}/delete", {"command_id": harness.new_id()})
        assert removed.body["revocations"] == []
        for reader, writer in await connections(config, channel.port, "alice"):
            writer.close()
            del reader
        for _, writer in others:
            writer.close()


@story
async def test_new_certificate_of_the_same_user_is_accepted(config: Config) -> None:
    tls = config.tls.certificates
    former = certificate_of(tls, "bob").serial
    async with Harness(config) as harness:
        path = f"/v1/revocations/serial:{former}"
        assert (await harness.ask("PUT", path, {"command_id": harness.new_id()})).status == 200
        assert (await harness.ask("GET", "/v1/jobs", who="bob")).status == 401
        issue(load_authority(tls), tls, role=Role.USER, name="bob", at=SystemClock().now(), replace=True)
        await harness._sessions.pop("bob").close()
        assert (await harness.ask("GET", "/v1/jobs", who="bob")).status == 200


@story
async def test_only_operators_read_and_change_revocations_and_members_cannot_be_revoked(config: Config) -> None:
    async with Harness(config) as harness:
        body = {"command_id": harness.new_id()}
        assert (await harness.ask("GET", "/v1/revocations", who="alice")).status == 403
        assert (await harness.ask("PUT", "/v1/revocations/user:bob", body, who="alice")).status == 403
        assert (await harness.ask("POST", "/v1/revocations/user:bob/delete", body, who="n1")).status == 403
        member = await harness.ask("PUT", "/v1/revocations/replica:r1", body)
        assert (member.status, member.code) == (409, "wrong_state") and "is a member" in member.sentence
        late = await harness.ask(
            "PUT", "/v1/revocations/user:bob", {"command_id": harness.new_id(), "valid_until": "soon"}
        )
        assert late.status == 400 and "is not a time" in late.sentence

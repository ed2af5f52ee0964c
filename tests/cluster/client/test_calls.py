"""A call against real TLS servers that misbehave: it happens once, ends in time, and says truthfully how it ended."""

import asyncio
import json
import socket
from collections.abc import Iterable
from typing import Any

import pytest

from forebay.cluster.client import ApiError, Client
from forebay.cluster.client import blocking as blocking_module
from forebay.cluster.client import exchange as exchange_module
from forebay.cluster.client import http_responses as responses_module
from forebay.cluster.client.attempt import broken
from forebay.cluster.client.calls import REDIRECTS_MAX
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.agents import PollRequest
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.requests import DrainRequest
from forebay.cluster.security.identity import Identity, Role
from forebay.cluster.security.tls import TlsError, TlsFiles
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import Clock, SystemClock
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.client.misbehaving import (
    REQUEST_S,
    Misbehaving,
    Pki,
    answering,
    dropping,
    failing,
    hanging,
    job,
    redirecting,
    serving,
)

pytestmark = pytest.mark.usefixtures("either_way")


def client_of(
    tls: TlsFiles, servers: Iterable[Misbehaving | Address], deadline_s: float = 20.0, clock: Clock | None = None
) -> Client:
    addresses = [server if isinstance(server, Address) else server.address for server in servers]
    return Client(addresses, tls, deadline_s=deadline_s, clock=clock)


def request_of(client: Client) -> SubmitRequest:
    return SubmitRequest(command_id=client.new_command_id(), script="#!/bin/sh\n", time_limit_s=60, workdir="/")


def test_a_submit_is_sent_as_json_with_the_identity_of_the_certificate(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.replica, answering(job(), 201)) as server, client_of(pki.operator, [server]) as client:
            request = request_of(client)
            view = await client.call(ops.SUBMIT_JOB, request)
            assert (view.job_id, view.state, view.revision) == (7, "PENDING", 12)
            [(method, path, body)] = server.requests
            assert (method, path) == ("POST", "/v1/jobs")
            assert json.loads(body)["command_id"] == request.command_id
            assert server.identities == [Identity(Role.OPERATOR, "operator")]

    asyncio.run(scenario())


def test_a_connection_dropped_after_the_write_is_retried_with_the_same_command_id(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, dropping(), dropping(), answering(job(), 201)) as server,
            client_of(pki.operator, [server]) as client,
        ):
            view = await client.call(ops.SUBMIT_JOB, request_of(client))
            assert view.job_id == 7
            assert len(server.command_ids) == 3
            assert len(set(server.command_ids)) == 1

    asyncio.run(scenario())


def test_the_retry_goes_to_another_replica_with_the_same_bytes(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, dropping()) as first,
            serving(pki.replica, answering(job(), 201)) as second,
            client_of(pki.operator, [first, second]) as client,
        ):
            await client.call(ops.SUBMIT_JOB, request_of(client))
            assert first.requests == second.requests
            # Whoever answered what only a leader can is asked first from now on.
            await client.call(ops.SUBMIT_JOB, request_of(client))
            assert (len(first.requests), len(second.requests)) == (1, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize(("status", "code"), [(503, "no_leader"), (429, "queue_full"), (502, "gateway"), (504, "late")])
def test_a_replica_that_cannot_now_is_asked_again(pki: Pki, status: int, code: str) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, failing(status, code), failing(status, code), answering(job(), 201)) as server,
            client_of(pki.operator, [server]) as client,
        ):
            await client.call(ops.SUBMIT_JOB, request_of(client))
            assert len(server.command_ids) == 3
            assert len(set(server.command_ids)) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 500])
def test_a_rejection_is_not_retried_and_says_place_and_remedy(pki: Pki, status: int) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, failing(status, "unknown_pool")) as server,
            client_of(pki.operator, [server]) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            error = caught.value
            assert (error.status, error.code, error.outcome) == (status, "unknown_pool", "rejected")
            assert str(error) == "field x: it is unknown_pool; mend it"
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_a_redirect_leads_to_the_leader_with_method_body_and_query(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.replica, answering(job(), 201)) as leader:
            follower_says = redirecting(lambda _: f"{leader.address.url}/v1/jobs")
            async with (
                serving(pki.replica, follower_says) as follower,
                client_of(pki.operator, [follower, leader]) as client,
            ):
                await client.call(ops.SUBMIT_JOB, request_of(client))
                assert leader.requests == follower.requests
                await client.call(ops.SUBMIT_JOB, request_of(client))
                assert (len(leader.requests), len(follower.requests)) == (2, 1)

    asyncio.run(scenario())


def test_replicas_that_redirect_in_a_circle_end_in_an_error_that_says_so(pki: Pki) -> None:
    async def scenario() -> None:
        to_itself = redirecting(lambda server: f"{server.address.url}/v1/jobs")
        most = 3 * (REDIRECTS_MAX + 1)
        async with (
            serving(pki.replica, to_itself) as server,
            client_of(pki.operator, [server], most * REQUEST_S, server.clock) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            assert caught.value.code == "redirect_loop"
            assert "redirected" in caught.value.sentence
            # A redirect carries nothing out.
            assert caught.value.outcome == "rejected"
            # A round is one try and its redirects; that rounds are apart is a law of its own.
            assert REDIRECTS_MAX < len(server.requests) <= most

    asyncio.run(scenario())


def test_an_election_that_ends_redirects_is_survived(pki: Pki) -> None:
    async def scenario() -> None:
        to_itself = redirecting(lambda server: f"{server.address.url}/v1/jobs")
        circles = [to_itself] * (2 * (REDIRECTS_MAX + 1))
        async with (
            serving(pki.replica, *circles, answering(job(), 201)) as server,
            client_of(pki.operator, [server]) as client,
        ):
            assert (await client.call(ops.SUBMIT_JOB, request_of(client))).job_id == 7

    asyncio.run(scenario())


@pytest.mark.parametrize("location", ["http://127.0.0.1:80/v1/jobs", "", "https://nowhere/v1/jobs", "ftp:x"])
def test_a_redirect_to_what_is_no_api_address_is_not_followed(pki: Pki, location: str) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, redirecting(lambda _: location)) as server,
            client_of(pki.operator, [server], clock=server.clock) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SHOW_JOB, id=7)
            assert caught.value.code == "bad_answer"
            assert "redirected to" in caught.value.sentence

    asyncio.run(scenario())


def test_a_replica_that_hangs_is_left_for_the_next_one(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client.call, "__kwdefaults__", {**(Client.call.__kwdefaults__ or {}), "attempt_s": 0.2})

    async def scenario() -> None:
        async with (
            serving(pki.replica, hanging()) as frozen,
            serving(pki.replica, answering(job(), 201)) as healthy,
            client_of(pki.operator, [frozen, healthy]) as client,
        ):
            await client.call(ops.SUBMIT_JOB, request_of(client))
            assert frozen.requests == healthy.requests

    asyncio.run(scenario())


def test_a_frozen_replica_that_never_shakes_hands_costs_a_handshakes_time_and_not_an_answers(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.client.calls.CONNECT_S", 0.1)
    monkeypatch.setattr(Client.call, "__kwdefaults__", {**(Client.call.__kwdefaults__ or {}), "attempt_s": 600.0})

    async def scenario() -> None:
        with socket.socket() as frozen:
            frozen.bind(("127.0.0.1", 0))
            frozen.listen(8)
            address = Address("127.0.0.1", int(frozen.getsockname()[1]))
            async with serving(pki.replica, answering(job(), 201)) as healthy:
                async with Client([address, healthy.address], pki.operator, deadline_s=600.0) as client:
                    async with asyncio.timeout(60):
                        await client.call(ops.SUBMIT_JOB, request_of(client))
                    assert client._endpoints.order == (healthy.address, address)
            async with Client([address], pki.operator, deadline_s=0.3) as client:
                with pytest.raises(ApiError, match="did not finish a handshake within") as raised:
                    await client.call(ops.SUBMIT_JOB, request_of(client))
                assert raised.value.outcome == "rejected"

    asyncio.run(scenario())


def test_a_redirect_back_to_a_silent_leader_does_not_cost_another_attempt(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client.call, "__kwdefaults__", {**(Client.call.__kwdefaults__ or {}), "attempt_s": 0.2})

    async def scenario() -> None:
        async with serving(pki.replica, hanging()) as frozen:
            unaware = redirecting(lambda _: f"{frozen.address.url}/v1/jobs")
            async with (
                serving(pki.replica, unaware) as second,
                serving(pki.replica, answering(job(), 201)) as third,
                client_of(pki.operator, [frozen, second, third]) as client,
            ):
                await client.call(ops.SUBMIT_JOB, request_of(client))
                assert len(frozen.requests) == 1
                assert len(second.requests) == 1

    asyncio.run(scenario())


def test_a_write_that_may_have_arrived_is_unknown_at_the_deadline(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, dropping()) as server,
            client_of(pki.operator, [server], clock=server.clock) as client,
        ):
            request = request_of(client)
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request)
            assert (caught.value.code, caught.value.outcome) == ("outcome_unknown", "unknown")
            assert request.command_id in caught.value.remedy
            assert set(server.command_ids) == {request.command_id}

    asyncio.run(scenario())


def test_a_503_that_says_unknown_is_unknown_and_one_that_says_refused_is_refused(pki: Pki) -> None:
    async def outcome(behaviour: Any) -> ApiError:
        async with (
            serving(pki.replica, behaviour) as server,
            client_of(pki.operator, [server], clock=server.clock) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            return caught.value

    unknown = asyncio.run(outcome(failing(503, "leadership_lost", outcome="unknown")))
    assert (unknown.outcome, unknown.code) == ("unknown", "outcome_unknown")
    refused = asyncio.run(outcome(failing(503, "no_leader")))
    assert (refused.outcome, refused.code, refused.status) == ("rejected", "no_leader", 503)


def test_a_write_that_reached_nobody_is_refused_not_unknown(pki: Pki, free_address: Address) -> None:
    async def scenario() -> None:
        async with client_of(pki.operator, [free_address], deadline_s=0.3) as client:
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            assert (caught.value.code, caught.value.outcome, caught.value.status) == ("unreachable", "rejected", 0)
            assert str(free_address) in caught.value.sentence

    asyncio.run(scenario())


def test_a_dead_replica_is_passed_over(pki: Pki, free_address: Address) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, answering(job())) as server,
            client_of(pki.operator, [free_address, server]) as client,
        ):
            assert (await client.call(ops.SHOW_JOB, id=7)).job_id == 7

    asyncio.run(scenario())


def test_a_full_queue_that_frees_only_after_the_deadline_is_an_error_at_once(pki: Pki) -> None:
    async def scenario() -> None:
        full = failing(429, "queue_full", headers={"Retry-After": "60"})
        async with serving(pki.replica, full) as server, client_of(pki.operator, [server], deadline_s=30.0) as client:
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            assert (caught.value.status, caught.value.code) == (429, "queue_full")
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_a_replica_of_another_authority_is_refused_with_the_authority_that_was_expected(
    pki: Pki, foreign_pki: Pki
) -> None:
    async def scenario() -> None:
        async with (
            serving(foreign_pki.replica, answering(job())) as server,
            client_of(pki.operator, [server]) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            error = caught.value
            assert (error.code, error.outcome) == ("untrusted", "rejected")
            assert "not signed by the expected authority, the authority 'Forebay demo'" in error.sentence
            assert str(pki.operator.authority) in error.sentence
            assert server.requests == []

    asyncio.run(scenario())


def test_a_certificate_of_another_authority_is_refused_before_anything_is_sent(pki: Pki, foreign_pki: Pki) -> None:
    mixed = TlsFiles(
        authority=pki.operator.authority,
        certificate=foreign_pki.operator.certificate,
        key=foreign_pki.operator.key,
    )
    with pytest.raises(TlsError) as caught:
        Client([Address("127.0.0.1", 1)], mixed)
    assert "the certificate of operator 'operator'" in str(caught.value)
    assert "issued by 'Forebay mars'" in str(caught.value)
    assert "is not signed by the authority 'Forebay demo'" in str(caught.value)


def test_a_replica_refuses_a_client_of_another_authority_and_the_error_names_the_certificate(
    pki: Pki, foreign_pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = TlsFiles(
        authority=pki.operator.authority,
        certificate=foreign_pki.operator.certificate,
        key=foreign_pki.operator.key,
    )
    for module in ("tls", "quick_check"):
        monkeypatch.setattr(f"forebay.cluster.security.{module}.examine", lambda files: None)

    async def scenario() -> None:
        async with (
            serving(pki.replica, answering(job())) as server,
            client_of(mixed, [server], deadline_s=0.5) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SHOW_JOB, id=7)
            assert "reject" in str(caught.value)
            assert "issued by 'Forebay mars'" in str(caught.value)
            assert server.requests == []

    asyncio.run(scenario())


def test_an_expired_certificate_is_named_with_its_date(pki: Pki) -> None:
    in_ten_years = ManualClock(Instant(SystemClock().now() + 10 * 366 * 86_400 * 1_000_000))
    with pytest.raises(TlsError, match=r"operator.pem: the certificate expired on 20\d\d-\d\d-\d\d"):
        Client([Address("127.0.0.1", 1)], pki.operator, clock=in_ten_years)
    with pytest.raises(TlsError, match="set the clock"):
        Client([Address("127.0.0.1", 1)], pki.operator, clock=ManualClock(Instant(1_000_000)))


def test_a_replica_at_an_address_that_its_certificate_does_not_name_is_refused(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.elsewhere, answering(job())) as server, client_of(pki.operator, [server]) as client:
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SHOW_JOB, id=7)
            assert caught.value.code == "untrusted"
            assert "is for another address" in caught.value.sentence
            assert "127.0.0.1" in caught.value.remedy

    asyncio.run(scenario())


def test_an_agents_certificate_cannot_pose_as_a_replica(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.agent, answering(job())) as server, client_of(pki.operator, [server]) as client:
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SHOW_JOB, id=7)
            assert caught.value.code == "untrusted"
            assert server.requests == []

    asyncio.run(scenario())


def test_one_untrusted_replica_does_not_hide_the_others(pki: Pki, foreign_pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(foreign_pki.replica, answering(job(1))) as foreign,
            serving(pki.replica, failing(503, "no_leader"), answering(job(2))) as own,
            client_of(pki.operator, [foreign, own]) as client,
        ):
            assert (await client.call(ops.SHOW_JOB, id=2)).job_id == 2

    asyncio.run(scenario())


def test_an_answer_that_is_too_large_is_not_read_to_its_end(pki: Pki, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_module, "ANSWER_BYTES_MAX", 1000)

    async def scenario() -> None:
        async with (
            serving(pki.replica, answering({"openapi": "x" * 2000})) as server,
            client_of(pki.operator, [server]) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SHOW_OPENAPI)
            assert caught.value.code == "answer_too_large"
            assert "1000 bytes" in caught.value.sentence
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_an_answer_of_another_shape_names_the_field(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, answering({**job(), "job_id": "seven"}, 201)) as server,
            client_of(pki.operator, [server]) as client,
        ):
            with pytest.raises(ApiError) as caught:
                await client.call(ops.SUBMIT_JOB, request_of(client))
            # It was carried out, as far as anybody can tell.
            assert (caught.value.code, caught.value.outcome) == ("bad_answer", "unknown")
            assert "job_id" in caught.value.sentence

    asyncio.run(scenario())


def test_fields_of_a_newer_server_are_ignored(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, answering({**job(), "colour": "blue"})) as server,
            client_of(pki.operator, [server]) as client,
        ):
            assert (await client.call(ops.SHOW_JOB, id=7)).job_id == 7

    asyncio.run(scenario())


def test_a_stale_read_says_so_and_is_answered_by_whoever_is_asked(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, answering({"revision": 3, "pools": []})) as server,
            client_of(pki.operator, [server]) as client,
        ):
            assert (await client.call(ops.LIST_POOLS, stale=True)).revision == 3
            assert (await client.call(ops.LIST_POOLS)).revision == 3
            assert [path for _, path, _ in server.requests] == ["/v1/pools?stale=ok", "/v1/pools"]

    asyncio.run(scenario())


def test_the_status_of_one_replica_is_asked_of_that_one_only(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, failing(500, "never_asked")) as first,
            serving(pki.replica, failing(404, "it_answered")) as second,
            client_of(pki.operator, [first, second]) as client,
        ):
            with pytest.raises(ApiError, match="it_answered"):
                await client.call(ops.SHOW_STATUS, replica=second.address, digest=True)
            assert first.requests == []
            assert second.requests == [("GET", "/v1/status?digest=yes", b"")]

    asyncio.run(scenario())


def test_names_in_paths_cannot_lead_elsewhere(pki: Pki) -> None:
    async def scenario() -> None:
        async with (
            serving(pki.replica, failing(404, "unknown_node")) as server,
            client_of(pki.operator, [server]) as client,
        ):
            with pytest.raises(ApiError):
                request = DrainRequest(command_id=client.new_command_id(), reason="z")
                await client.call(ops.DRAIN_NODE, request, name="../jobs/1?x=1#y")
            assert server.requests[0][1] == "/v1/nodes/..%2Fjobs%2F1%3Fx%3D1%23y/drain"

    asyncio.run(scenario())


def test_a_long_poll_may_take_its_wait_besides_the_time_of_an_attempt(
    pki: Pki, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def record(kind: Any) -> None:
        original = kind.send

        async def recording(self: Any, *arguments: Any, timeout_s: float, connect_s: float) -> Any:
            asked.append(timeout_s)
            return await original(self, *arguments, timeout_s=timeout_s, connect_s=connect_s)

        monkeypatch.setattr(kind, "send", recording)

    record(exchange_module.Exchange)
    record(blocking_module.BlockingExchange)

    async def scenario() -> None:
        async with (
            serving(pki.replica, answering({"revision": 4, "orders": []})) as server,
            client_of(pki.agent, [server]) as client,
        ):
            answer = await client.poll("n1", PollRequest(instance="i", wait_s=30), server.address)
            assert (answer.revision, answer.orders) == (4, ())
            assert asked == [35.0]
            assert server.requests[0][1] == "/v1/agents/n1/poll"

    asyncio.run(scenario())


def test_a_cancelled_call_leaves_no_request_behind(pki: Pki) -> None:
    async def scenario() -> None:
        async with serving(pki.replica, hanging()) as server, client_of(pki.operator, [server]) as client:
            call = asyncio.ensure_future(client.call(ops.SHOW_JOB, id=7))
            await server.arrived.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            # Nobody retries on behalf of a caller who has gone.
            assert len(server.requests) == 1

    asyncio.run(scenario())


def test_a_closed_connection_is_not_reported_as_a_count_of_bytes() -> None:
    error = broken(Address("127.0.0.1", 7411), asyncio.IncompleteReadError(b"", None), None)
    assert "broke before the answer was complete (the connection was closed)" in str(error)

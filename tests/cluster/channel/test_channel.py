"""The channel does what the API does, for the same people, with the same answers; and it is bounded."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

import forebay.cluster.api.worker.channel as server_module
from forebay.cluster.api.local_backend import LocalBackend
from forebay.cluster.api.worker.channel import ChannelServer
from forebay.cluster.client.channel import ChannelClient, ChannelConnection, ChannelError
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import requests as r
from forebay.cluster.schemas.channel_frames import (
    CHANNEL_VERSION,
    FRAME_BYTES_MAX,
    LENGTH,
    CommandFrame,
    HelloFrame,
    encode_frame,
)
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.system.address import Address
from forebay.replica.values.limits import SCRIPT_BYTES_MAX
from tests.cluster.harness import PLAIN, SCRIPT, Harness, story, until
from tests.ports import free_port


@contextlib.asynccontextmanager
async def channel_of(harness: Harness) -> AsyncIterator[ChannelServer]:
    tls = server_context(harness.config.tls_files("r1"))
    server = ChannelServer(LocalBackend(harness.service), address=Address("127.0.0.1", 0), tls=lambda: tls)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def connect(harness: Harness, server: ChannelServer, who: str = "alice") -> ChannelConnection:
    tls = client_context(harness.config.tls_files(who))
    return await ChannelConnection.open(Address("127.0.0.1", server.port), tls, harness.config.cluster.id)


def submission(harness: Harness, **changes: Any) -> r.SubmitCommand:
    body = {"script": PLAIN, "time_limit_s": 60, "workdir": str(harness.config.file.parent / "out"), "hold": True}
    return r.SubmitCommand(command_id=harness.new_id(), **{**body, **changes})


@story
async def test_commands_sent_together_are_settled_in_one_batch_and_each_is_answered(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        batches = harness.controller.proposer.counts.batches
        done = await asyncio.gather(*[connection.ask(submission(harness)) for _ in range(50)])
        assert [answer.job for answer in done] == list(range(1, 51))
        assert [answer.revision for answer in done] == list(range(done[0].revision, done[0].revision + 50))
        assert harness.controller.proposer.counts.batches <= batches + 3
        assert harness.controller.state.jobs[50].request.user == "alice"
        connection.close()


class Writes:
    """Stands before a transport and counts what is written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.count += 1
        self._transport.write(data)


@story
@pytest.mark.parametrize("together", [1, 2, 7])
async def test_the_last_answer_of_a_connection_leaves_at_once_with_those_before_it(
    config: Config, together: int
) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        (other_end,) = server.connections
        assert other_end._transport is not None
        written = other_end._transport = Writes(other_end._transport)  # type: ignore[assignment]
        asking = Writes(connection._transport)  # type: ignore[arg-type]
        connection._transport = asking  # type: ignore[assignment]
        answers = [connection.ask(submission(harness)) for _ in range(together)]
        assert asking.count == 1, "who asks first waits for nobody"
        await until(lambda: sum(len(flight.waiters) for flight in harness.controller.proposer._in_flight) == together)
        assert asking.count == min(together, 2)
        before = written.count
        for _ in range(together):
            harness.engine.commit()
        await asyncio.sleep(0)
        harness.engine.commit()
        assert written.count == before + 1
        assert sorted([(await answer).job for answer in answers]) == list(range(1, together + 1))
        connection.close()


@story
@pytest.mark.parametrize("together", [1, 3, 7])
async def test_those_whose_answers_came_together_ask_again_together(config: Config, together: int) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        for _ in range(2):
            asked = Writes(connection._transport)  # type: ignore[arg-type]
            connection._transport = asked  # type: ignore[assignment]
            answers = [connection.ask(submission(harness)) for _ in range(together)]
            await asyncio.gather(*answers)
        assert asked.count == 1, "a frame that leaves before the others is a batch of its own"
        connection.close()


COMMANDS: list[Callable[[Harness], r.BulkCommand]] = [
    lambda harness: submission(harness),
    lambda harness: submission(harness, user="bob"),
    lambda harness: submission(harness, script="#!/bin/sh\n#DW jobdw capacity=lots\n"),
    lambda harness: submission(harness, script=SCRIPT, bb="pool=nowhere capacity=1MiB"),
    lambda harness: submission(harness, dependencies=("never:1",)),
    lambda harness: submission(harness, script="#!/bin/sh\n" + "#" * SCRIPT_BYTES_MAX),
    lambda harness: r.HoldCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.ReleaseCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.UpdateCommand(command_id=harness.new_id(), job_id=1, comment="later"),
    lambda harness: r.UpdateCommand(command_id=harness.new_id(), job_id=1, bb="capacity=lots"),
    lambda harness: r.CancelCommand(command_id=harness.new_id(), job_id=77),
    lambda harness: r.HoldCommand(command_id=harness.new_id(), job_id="1"),
    lambda harness: r.CancelCommand(command_id=harness.new_id(), job_id="1_[2-3]"),
    lambda harness: r.CancelCommand(command_id=harness.new_id(), job_id="1_[2-"),
    lambda harness: r.SuspendCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.ContinueCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.RequeueCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.ClearCommand(command_id=harness.new_id(), job_id=1),
    lambda harness: r.ClearCommand(command_id=harness.new_id(), name="lake"),
    lambda harness: r.ClearCommand(command_id=harness.new_id()),
    lambda harness: r.PoolCommand(command_id=harness.new_id(), name="fast", quantity="96MiB", granularity="8MiB"),
    lambda harness: r.PoolCommand(command_id=harness.new_id(), name="fast", quantity="many", granularity="8MiB"),
    lambda harness: r.DrainCommand(command_id=harness.new_id(), node="n9", reason="x"),
    lambda harness: r.HoldCommand(command_id="0" * 32, job_id=1),
    lambda harness: r.HoldCommand(command_id="000000000000700080" + "0" * 14, job_id=1),
]


@story
async def test_each_identity_gets_the_same_answer_to_each_command_as_in_bulk_over_http(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        await harness.submit(who="bob", hold=True)
        for who, make in itertools.product(("operator", "alice", "bob"), COMMANDS):
            connection = await connect(harness, server, who)
            # Two of a kind: the same id again would be answered from the receipts.
            over_http = await harness.ask(
                "POST", "/v1/commands", {"commands": [msgspec.to_builtins(make(harness))]}, who=who
            )
            (expected,) = over_http.body["results"]
            await harness.ask("POST", "/v1/jobs/1/hold", {"command_id": harness.new_id()}, who="bob")  # as it was
            try:
                await connection.ask(make(harness))
            except ChannelError as error:
                view = expected["error"]
                found = {
                    "code": error.code,
                    "sentence": error.sentence,
                    "remedy": error.remedy,
                    "place": error.place,
                    "outcome": error.outcome,
                }
                assert error.status == expected["status"]
                assert {key: value for key, value in found.items() if key != "sentence"} == {
                    key: view[key] for key in found if key != "sentence"
                }
                assert error.sentence == view["sentence"] or "ago by the cluster's time" in error.sentence
            else:
                assert expected["status"] in (200, 201), expected
            await harness.ask("POST", "/v1/jobs/1/hold", {"command_id": harness.new_id()}, who="bob")
            connection.close()


@pytest.mark.parametrize("who", ["n1", "r1"])
def test_agents_and_replicas_are_turned_away_as_the_api_does(config: Config, who: str) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness, channel_of(harness) as server:
            answer = await harness.ask("POST", "/v1/commands", {"commands": []}, who=who)
            assert answer.status == 403
            with pytest.raises(ApiError, match="closed it at once"):
                await connect(harness, server, who)
            assert not server.connections

    run()


@story
async def test_a_retry_over_the_channel_of_what_came_over_http_gets_the_first_answer(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        body = harness.job()
        first = await harness.ask("POST", "/v1/jobs", body, who="alice")
        done = await connection.ask(r.SubmitCommand(**body))
        assert (done.job, len(harness.controller.state.jobs)) == (first.body["job_id"], 1)
        connection.close()


@story
async def test_who_does_not_lead_says_where_the_leaders_channel_is(config: Config) -> None:
    other = msgspec.structs.replace(config.replicas[0], name="r2", channel=Address("127.0.0.1", free_port()))
    config = msgspec.structs.replace(config, replicas=(*config.replicas, other))
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        harness.engine.depose("r2")
        with pytest.raises(ChannelError) as told:
            await connection.ask(submission(harness))
        assert (told.value.status, told.value.outcome, told.value.leader) == (307, "rejected", str(other.channel))
        harness.engine.depose(None)
        with pytest.raises(ChannelError) as told:
            await connection.ask(submission(harness))
        assert (told.value.status, told.value.code, told.value.leader) == (503, "no_leader", "")
        connection.close()


@story
async def test_leadership_lost_under_way_leaves_the_outcome_unknown_and_the_same_id_settles_it_once(
    config: Config,
) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        command = submission(harness)
        answer = connection.ask(command)
        await until(lambda: harness.engine.uncommitted > 0)
        harness.engine.depose("r1", lose=False)
        with pytest.raises(ChannelError) as told:
            await answer
        assert (told.value.status, told.value.outcome) == (503, "unknown")
        harness.engine.lead()
        again = connection.ask(command)
        await until(lambda: again.done())
        assert again.result().job == 1
        assert len(harness.controller.state.jobs) == 1
        connection.close()


@story
async def test_an_entry_that_is_not_committed_in_time_is_answered_as_unknown(config: Config) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        answer = connection.ask(submission(harness))
        await until(lambda: harness.engine.uncommitted > 0)
        for known in server.connections:
            known.sweep(asyncio.get_running_loop().time() + server_module.COMMIT_WAIT_S + 1)
        with pytest.raises(ChannelError) as told:
            await answer
        assert told.value.outcome == "unknown"
        harness.engine.commit()
        connection.close()


@story
async def test_a_late_answer_is_not_given_to_a_later_command_with_the_same_number(config: Config) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        first = connection.ask(submission(harness))
        await until(lambda: harness.engine.uncommitted > 0)
        for known in server.connections:
            known.sweep(asyncio.get_running_loop().time() + server_module.COMMIT_WAIT_S + 1)
        with pytest.raises(ChannelError):
            await first
        connection._number -= 1
        second = connection.ask(submission(harness))
        await until(lambda: harness.engine.uncommitted > 1)
        harness.engine.commit()
        assert (await second).job == 2
        connection.close()


@story
async def test_a_broken_connection_leaves_the_outcome_unknown_and_the_command_stands(config: Config) -> None:
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        answer = connection.ask(submission(harness))
        await until(lambda: harness.engine.uncommitted > 0)
        connection.close()
        with pytest.raises(ApiError) as told:
            await answer
        assert told.value.outcome == "unknown"
        harness.engine.commit()
        assert len(harness.controller.state.jobs) == 1


@story
async def test_no_more_than_the_bound_is_outstanding_and_what_is_sent_beyond_it_waits(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "OUTSTANDING_MAX", 4)
    async with Harness(config, automatic=False) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        answers = [connection.ask(submission(harness)) for _ in range(30)]
        jobs = 0
        while jobs < 30:
            await until(lambda: harness.engine.uncommitted > 0)
            assert all(len(known._waiting) <= 4 for known in server.connections)
            harness.engine.commit()
            assert len(harness.controller.state.jobs) - jobs <= 4
            jobs = len(harness.controller.state.jobs)
        assert [(await answer).job for answer in answers] == list(range(1, 31))
        connection.close()


def hello(harness: Harness, **changes: Any) -> bytes:
    fields = {"version": CHANNEL_VERSION, "cluster": harness.config.cluster.id, **changes}
    return encode_frame(HelloFrame(**fields))


def ask(number: int, command: Any) -> bytes:
    return encode_frame(CommandFrame(number, msgspec.Raw(msgspec.msgpack.encode(command))))


WRONG: dict[str, Callable[[Harness], bytes]] = {
    "another cluster": lambda harness: hello(harness, cluster="0" * 32),
    "another version": lambda harness: hello(harness, version=99),
    "no greeting": lambda harness: ask(1, submission(harness)),
    "too long": lambda harness: hello(harness) + LENGTH.pack(FRAME_BYTES_MAX + 1),
    "not MessagePack": lambda harness: hello(harness) + LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "unknown kind": lambda harness: hello(harness) + LENGTH.pack(2) + msgspec.msgpack.encode([77]),
    "a number twice": lambda harness: hello(harness) + ask(1, submission(harness)) + ask(1, submission(harness)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_channel_of_this_cluster_is_closed_and_nobody_else_notices(config: Config, wrong: str) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness, channel_of(harness) as server:
            good = await connect(harness, server)
            tls = client_context(harness.config.tls_files("alice"))
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=tls)
            writer.write(WRONG[wrong](harness))
            await reader.read()  # until it is closed
            writer.close()
            assert (await good.ask(submission(harness))).job >= 1
            good.close()

    run()


@story
async def test_a_command_that_is_malformed_is_refused_by_its_number_and_the_connection_goes_on(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        connection = await connect(harness, server)
        body = msgspec.to_builtins(submission(harness))
        bad = connection.ask({**body, "colour": "red"})  # type: ignore[arg-type]
        with pytest.raises(ChannelError) as told:
            await bad
        assert (told.value.status, told.value.place) == (400, "colour")
        assert (await connection.ask(submission(harness))).job == 1
        connection.close()


@story
async def test_a_program_follows_the_leader_and_sends_the_same_id_until_it_is_carried_out(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        dead = Address("127.0.0.1", free_port())
        live = Address("127.0.0.1", server.port)
        async with ChannelClient([dead, live], harness.config.tls_files("alice"), harness.config.cluster.id) as channel:
            assert (await channel.perform(submission(harness))).job == 1
            harness.engine.depose(None)
            waiting = asyncio.create_task(channel.perform(submission(harness)))
            await until(lambda: harness.controller.proposer.counts.commands > 0 and not waiting.done())
            harness.engine.lead()
            assert (await waiting).job == 2
            with pytest.raises(ChannelError) as told:
                await channel.perform(r.CancelCommand(command_id=harness.new_id(), job_id=99))
            assert told.value.status == 404


@story
async def test_when_nobody_leads_until_the_deadline_the_program_is_told_that_nothing_happened(config: Config) -> None:
    async with Harness(config) as harness, channel_of(harness) as server:
        live = Address("127.0.0.1", server.port)
        harness.engine.depose(None)
        async with ChannelClient([live], harness.config.tls_files("alice"), harness.config.cluster.id) as channel:
            with pytest.raises(ApiError) as told:
                await channel.perform(submission(harness), deadline_s=2.0)
            assert told.value.outcome == "rejected"

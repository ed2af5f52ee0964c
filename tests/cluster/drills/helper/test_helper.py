"""Helper: accepted callers, rejections before any change, and the end of every fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.cluster.client import ApiError
from forebay.cluster.config import Config, ConfigError, DrillConfig, HelperConfig
from forebay.cluster.drills.helper import (
    BeginRequest,
    EndRequest,
    HelperAnswer,
    HelperChannel,
    HelperRefused,
    LookRequest,
    RenewRequest,
)
from forebay.cluster.drills.helper import service as module
from forebay.cluster.drills.helper.record import UndoRecord
from forebay.cluster.drills.helper.service import Helper
from forebay.cluster.schemas.drills import DrillAnswer
from forebay.cluster.security import Credentials, TlsFiles, server_context
from forebay.cluster.system import Address, SystemClock
from tests.cluster.drills.helper.held import holding, state_of
from tests.cluster.harness import story
from tests.ports import free_port

DRILL = DrillAnswer(
    revision=9, drill=3, scenario="leader-hang", target="r1", by="operator", verdict="under way", began=None,
    until=None, plan="f003ad4d",
)  # fmt: skip
BEGIN = BeginRequest(3, "f003ad4d", "leader-hang", "r1", 30)


@pytest.fixture
def machine(config: Config, tmp_path: Path) -> Config:
    """Configuration of a machine with r1 and n1 that allows signals to them."""
    helper = HelperConfig("h1", Address("127.0.0.1", free_port()), ("r1", "n1"))
    drill = DrillConfig(allow=("process",), directory=tmp_path / "drill")
    agents = tuple(replace(agent, directory=tmp_path / agent.name) for agent in config.agents)
    return replace(config, helpers=(helper,), drill=drill, agents=agents)


class Started:
    """Helper that runs in this event loop, and the drill that the cluster knows."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.drill: DrillAnswer | None = DRILL
        self.asked = 0

    async def known(self, number: int) -> DrillAnswer:
        self.asked += 1
        if self.drill is None:
            raise ApiError(0, "unreachable", "no replica answered")
        return self.drill

    def files(self, who: str) -> TlsFiles:
        return self.config.tls_files(who)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        credentials = Credentials(self.files("h1"), serves=True)
        helper = Helper(self.config, "h1", self.known, SystemClock(), credentials=credentials)
        stop = asyncio.Event()
        running = asyncio.create_task(helper.run(stop))
        while True:  # until it listens
            try:
                await (await self.channel()).close()
                break
            except HelperRefused:
                assert not running.done(), running
                await asyncio.sleep(0)
        try:
            yield
        finally:
            stop.set()
            await running

    async def channel(self, who: str = "operator") -> HelperChannel:
        helper = self.config.helpers[0]
        return await HelperChannel.open("h1", helper.address, self.files(who), self.config.cluster.id)

    async def refused(self, ask: Any, who: str = "operator") -> str:
        """Return the sentence and remedy of a rejection that starts no process."""
        channel = await self.channel(who)
        with pytest.raises(HelperRefused) as error:
            await channel.ask(ask)
        await channel.close()
        return f"{error.value.sentence}; {error.value.remedy}"

    def is_settled(self) -> bool:
        record = UndoRecord(self.config.drill.directory / "h1", wait=True)
        try:
            return record.read() is None
        finally:
            record.close()


@pytest.fixture
def r1(machine: Config) -> Iterator[int]:
    with holding(machine.wal_directory("r1")) as process:
        yield process.pid


async def until(pid: int, stopped: bool) -> None:
    while (state_of(pid) == "T") is not stopped:
        await asyncio.sleep(0.01)


@story
async def test_a_fault_lasts_while_renewed_and_is_undone_on_request(machine: Config, r1: int) -> None:
    started = Started(machine)
    async with started.serving():
        assert (await (await started.channel()).ask(LookRequest("leader-hang", "r1"))).done
        assert state_of(r1) != "T" and started.asked == 0, "who looks does nothing"
        channel = await started.channel()
        await channel.ask(BEGIN)
        await until(r1, stopped=True)
        answer: HelperAnswer = await channel.ask(RenewRequest(3))
        assert 0 < answer.figures["left_us"] <= 3_000_000
        assert (
            await started.refused(LookRequest("leader-hang", "r1"))
            == "drill 3 is under way on this machine; wait for its end"
        )
        assert (await started.refused(RenewRequest(3), "dora")).startswith("drill 3 of drill dora is not under way")
        assert (await started.refused(replace(BEGIN, drill=4))).startswith("drill 3 is under way on this machine")
        await channel.ask(EndRequest(3))
        await until(r1, stopped=False)
        assert started.is_settled()
        assert (await started.refused(RenewRequest(3))).startswith(
            "drill 3 of operator operator is not under way on this machine"
        )
        assert (await started.refused(BEGIN)).startswith("drill 3 has already run on this machine")


@story
async def test_a_fault_ends_with_its_lease_if_the_coordinator_vanishes(
    machine: Config, r1: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEASE_S", 0.3)
    started = Started(machine)
    async with started.serving():
        channel = await started.channel()
        await channel.ask(BEGIN)
        await until(r1, stopped=True)
        await channel.close()
        await until(r1, stopped=False)
        await asyncio.to_thread(started.is_settled)


@story
async def test_a_fault_ends_after_its_maximum_duration_despite_renewals(machine: Config, r1: int) -> None:
    started = Started(machine)
    async with started.serving():
        channel = await started.channel()
        await channel.ask(replace(BEGIN, duration_s=1))
        with pytest.raises(HelperRefused, match="its lease has ended"):
            while True:
                await channel.ask(RenewRequest(3))
                await asyncio.sleep(0.01)
        await until(r1, stopped=False)


@story
async def test_a_helper_undoes_the_fault_of_its_killed_process(machine: Config, r1: int) -> None:
    started = Started(machine)
    async with started.serving():
        channel = await started.channel()
        await channel.ask(BEGIN)
        await until(r1, stopped=True)
        performers = [pid for pid in children() if b"cluster.drills.helper.performer" in command(pid)]
        assert len(performers) == 1
        os.kill(performers[0], signal.SIGKILL)
        await until(r1, stopped=False)


@story
async def test_a_terminated_helper_undoes_its_fault(machine: Config, r1: int) -> None:
    started = Started(machine)
    async with started.serving():
        await (await started.channel()).ask(BEGIN)
        await until(r1, stopped=True)
    assert state_of(r1) != "T" and started.is_settled()


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# ---- rejections


CLUSTER: dict[str, tuple[DrillAnswer | None, str]] = {
    "the cluster does not answer": (None, "the cluster cannot confirm that drill 3 is under way"),
    "the drill has ended": (replace(DRILL, verdict="passed"), "drill 3 is passed"),
    "the drill is lost": (replace(DRILL, verdict="lost"), "drill 3 is lost"),
    "the drill is to end": (replace(DRILL, abort="eve: enough"), "drill 3 is being aborted"),
    "a stale plan": (
        replace(DRILL, plan="00000000"),
        "drill 3 is 00000000 leader-hang r1, not f003ad4d leader-hang r1",
    ),
    "another scenario": (
        replace(DRILL, scenario="switchover"),
        "drill 3 is f003ad4d switchover r1, not f003ad4d leader-hang r1",
    ),
    "another target": (replace(DRILL, target="r2"), "drill 3 is f003ad4d leader-hang r2, not f003ad4d leader-hang r1"),
    "somebody else's": (replace(DRILL, by="eve"), "drill 3 was started by eve, not by operator operator"),
}


@pytest.mark.parametrize("why", CLUSTER)
def test_a_drill_unknown_to_the_cluster_is_rejected_before_any_change(machine: Config, r1: int, why: str) -> None:
    @story
    async def run() -> None:
        started = Started(machine)
        started.drill, sentence = CLUSTER[why]
        async with started.serving():
            assert (await started.refused(BEGIN)).startswith(sentence)
            assert state_of(r1) != "T" and started.is_settled()

    run()


HERE: dict[str, tuple[BeginRequest, dict[str, Any], str]] = {
    "nothing is allowed": (BEGIN, {"allow": ()}, "the machine of helper h1 does not permit process faults"),
    "another kind is allowed": (
        replace(BEGIN, scenario="disk-full"),
        {},
        "the machine of helper h1 does not permit disk faults",
    ),
    "another machine's target": (replace(BEGIN, target="r2"), {}, "r2 is not a target of helper h1"),
    "an agent for a replica": (
        replace(BEGIN, target="n1"),
        {},
        "leader-hang requires a replica as target, and n1 is not a replica",
    ),
    "a replica for an agent": (
        replace(BEGIN, scenario="agent-kill"),
        {},
        "agent-kill requires an agent as target, and r1 is not an agent",
    ),
    "no scenario": (replace(BEGIN, scenario="flood"), {}, "no helper supports flood"),
    "no helper's scenario": (replace(BEGIN, scenario="switchover"), {}, "no helper supports switchover"),
    "a disk that others need": (
        replace(BEGIN, scenario="disk-full"),
        {"allow": ("disk",)},
        "",
    ),
    "the site's hours": (
        BEGIN,
        {"never": ("Mon-Sun 00:00-24:00",)},
        "helper h1 permits no drills during Mon-Sun 00:00-24:00",
    ),
    "no second": (
        BEGIN,
        {"require_second": True},
        "helper h1 requires confirmation by a second operator (require_second)",
    ),
}


@pytest.mark.parametrize("why", HERE)
def test_a_fault_forbidden_on_the_machine_is_rejected_before_any_change(
    machine: Config, r1: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, changes, sentence = HERE[why]
    if why == "a disk that others need":
        monkeypatch.setattr(
            "forebay.cluster.drills.helper.allowed.disk_fault",
            lambda directory: "it is on the root filesystem, which other programs need",
        )
        sentence = "it is on the root filesystem"

    @story
    async def run() -> None:
        started = Started(replace(machine, drill=replace(machine.drill, **changes)))
        async with started.serving():
            assert (await started.refused(ask)).startswith(sentence)
            assert state_of(r1) != "T" and started.is_settled()
            if why != "no second":
                assert started.asked == 0, "the cluster is not asked for what is not done anyway"
                assert (await started.refused(LookRequest(ask.scenario, ask.target))).startswith(sentence)

    run()


@story
async def test_a_drill_starts_after_the_second_operator_approved(machine: Config, r1: int) -> None:
    started = Started(replace(machine, drill=replace(machine.drill, require_second=True)))
    started.drill = replace(DRILL, second="eve")
    async with started.serving():
        channel = await started.channel()
        await channel.ask(BEGIN)
        await channel.ask(EndRequest(3))


@story
async def test_a_caller_without_the_operator_or_drill_role_is_rejected(machine: Config, r1: int) -> None:
    started = Started(machine)
    async with started.serving():
        for who in ("alice", "n1", "r1", "slurm", "auditor", "h1"):
            assert "may not use a helper; use a certificate with one of the roles drill, operator" in (
                await started.refused(BEGIN, who)
            )
        assert started.asked == 0
        assert (await started.refused(BEGIN, "dora")).startswith("drill 3 was started by operator, not by drill dora")


@story
async def test_a_stopped_target_is_rejected_by_name(machine: Config) -> None:
    started = Started(machine)
    async with started.serving():
        assert (await started.refused(BEGIN)).startswith("r1 is not running: no process holds the lock")
        assert started.is_settled()


@story
async def test_an_invalid_request_gets_an_error_and_ends_nothing(machine: Config) -> None:
    started = Started(machine)
    async with started.serving():
        for bad in ({"ask": "burn"}, {"ask": "renew"}, {"ask": "renew", "drill": 0}, [1]):
            assert (await started.refused(bad)).startswith("the request is not valid: ")
        for bad in (replace(BEGIN, duration_s=121), replace(BEGIN, duration_s=0), replace(BEGIN, plan="x" * 65)):
            assert (await started.refused(bad)).startswith("the request is not valid: ")


@story
async def test_a_missing_or_wrong_helper_is_named(machine: Config) -> None:
    started = Started(machine)
    with pytest.raises(HelperRefused, match="helper h1 is not reachable at .*forebay run helper --name h1"):
        await started.channel()
    async with started.serving():
        helper = machine.helpers[0]
        with pytest.raises(HelperRefused, match="belongs to helper h1, not to helper h2"):
            await HelperChannel.open("h2", helper.address, started.files("operator"), machine.cluster.id)


@story
async def test_leftovers_of_an_earlier_helper_are_undone_before_listening(machine: Config, r1: int) -> None:
    from forebay.cluster.drills.helper.faults import Stop, ThisMachine, of_target

    real = ThisMachine()
    record = UndoRecord(machine.drill.directory / "h1")
    record.begin(of_target(2, "r1", Stop(str(machine.wal_directory("r1"))), real), real)
    record.close()
    await until(r1, stopped=True)
    started = Started(machine)
    async with started.serving():
        assert state_of(r1) != "T" and started.is_settled()


HOURS = (
    ("Mon-Fri 08:00-18:00", (0, 8 * 60), (5, 9 * 60)),
    ("Sat-Mon 00:00-24:00", (6, 1439), (1, 0)),
    ("Wed 12:00-12:01", (2, 720), (2, 721)),
)


@pytest.mark.parametrize(("text", "within", "without"), HOURS)
def test_a_weekly_period_contains_exactly_its_minutes(
    text: str, within: tuple[int, int], without: tuple[int, int]
) -> None:
    drill = DrillConfig(never=(text,))
    assert drill.forbids(*within) == text and drill.forbids(*without) == ""


@pytest.mark.parametrize("text", ["", "Mon", "Mon 8:00-9:00", "Mon 09:00-08:00", "Mon 00:00-25:00", "Mon 00:60-01:00"])
def test_invalid_weekly_periods_are_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="08:00-18:00"):
        DrillConfig(never=(text,))


BAD_TABLES = {
    '[[helper]]\nname = "h1"\naddress = "127.0.0.1:7431"\ntargets = ["r9"]\n': "replica or agent 'r9' does not exist",
    '[[helper]]\nname = "r1"\naddress = "127.0.0.1:7431"\ntargets = []\n': "'r1' is taken by replica[1].name",
    '[[helper]]\nname = "h1"\naddress = "127.0.0.1:7431"\ntargets = ["r1", "r1"]\n': "'r1' is taken by helper[1]",
    '[drill]\nallow = ["everything"]\n': "found 'everything'",
    '[drill]\nstart = ["systemctl"]\n': "write the absolute path of a program",
    "[drill]\nevery_days = {switchover = 30}\n": "remind is missing",
    '[drill]\nremind = ["ops"]\n': "every_days is missing",
    '[drill]\nevery_days = {switch-over = 30}\nremind = ["ops"]\n': "found 'switch-over'",
    '[drill]\nevery_days = {switchover = 0}\nremind = ["ops"]\n': "drill.every_days",
    '[drill]\nevery_days = {switchover = 1}\nremind = ["a b"]\n': "write a mail address",
    '[drill]\nautomatic = ["all"]\n': "use one of: switchover",
    '[drill]\nprometheus = "http://a:b@10.0.0.9"\nstop_when = "up"\n': "write its address without a name",
    '[drill]\nprometheus = "http://10.0.0.9"\n': "stop_when is missing",
    '[drill]\nstop_when = "up == 0"\n': "prometheus is missing",
    "[drill]\nalow = []\n": "did you mean 'allow'",
}


@pytest.mark.parametrize("table", BAD_TABLES)
def test_each_mistake_in_the_drill_tables_is_rejected_with_its_place(
    founded: Config, tmp_path: Path, table: str
) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(f"{founded.file.read_text()}\n{table}")
    with pytest.raises(ConfigError) as error:
        Config.load(file)
    assert BAD_TABLES[table] in str(error.value) and error.value.line > 0


@story
async def test_a_helper_without_a_valid_certificate_is_rejected_with_a_remedy(machine: Config) -> None:
    helper = machine.helpers[0]

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    context = server_context(machine.tls_files("r1"))
    async with await asyncio.start_server(close, helper.address.host, helper.address.port, ssl=context):
        with pytest.raises(HelperRefused, match="the certificate of helper h1 is not valid") as refused:
            await HelperChannel.open("h1", helper.address, machine.tls_files("operator"), machine.cluster.id)
    assert str(helper.address) in refused.value.remedy
    assert "forebay cert issue h1 --role helper --replace" in refused.value.remedy

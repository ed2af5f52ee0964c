"""Faults that a machine's configuration allows for a partition and a full disk, and its rejections."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.config import Config, DrillConfig, HelperConfig
from forebay.cluster.drills.helper import HelperChannel, HelperRefused, LookRequest, faults
from forebay.cluster.drills.helper import allowed as module
from forebay.cluster.drills.helper.allowed import fault_of
from forebay.cluster.drills.helper.faults import Cut, Fill, disk_fault, nft_fault
from forebay.cluster.drills.helper.messages import JSON, HelperAnswer
from forebay.cluster.drills.helper.performer import Lease, Lines, wait_for_end
from forebay.cluster.system import Address, SystemClock
from tests.cluster.harness import make_cluster, story


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Three replicas at three addresses; the first has a helper on its machine."""
    config = make_cluster(tmp_path_factory.mktemp("three"), replicas=3)
    replicas = tuple(
        replace(one, peer=Address(f"10.0.0.{number}", 7400), api=Address(f"10.0.0.{number}", 7410))
        for number, one in enumerate(config.replicas, 1)
    )
    helper = HelperConfig("h1", Address("10.0.0.1", 7431), ("r1",))
    drill = DrillConfig(allow=("network", "disk"))
    return replace(config, replicas=replicas, helpers=(helper,), drill=drill)


def cut(config: Config, scenario: str) -> str:
    found = fault_of(config, config.helpers[0], scenario, "r1", 7)
    assert isinstance(found, Cut) and found.table == "forebay_drill_7"
    return found.rules


def test_a_partition_drops_cluster_traffic_and_keeps_the_helper_port_open(
    three: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "nft_fault", lambda: "")
    arriving = "type filter hook input priority -10; policy accept;\n    tcp dport 7431 accept\n"
    leaving = "type filter hook output priority -10; policy accept;\n    tcp sport 7431 accept\n"
    whole, hears, speaks = (cut(three, name) for name in ("partition", "partition-in", "partition-out"))
    peers, ports = "{ 10.0.0.2, 10.0.0.3 }", "{ 7400, 7410 }"
    drops = {
        arriving: (f"ip saddr {peers} tcp dport {ports} drop", f"ip saddr {peers} tcp sport {ports} drop"),
        leaving: (f"ip daddr {peers} tcp sport {ports} drop", f"ip daddr {peers} tcp dport {ports} drop"),
    }
    for rules, chains in ((whole, (arriving, leaving)), (hears, (arriving,)), (speaks, (leaving,))):
        for chain in (arriving, leaving):
            assert (chain in rules) == (chain in chains)
            assert all((drop in rules) == (chain in chains) for drop in drops[chain])
    for anybody in (f"    tcp dport {ports} drop", f"    tcp sport {ports} drop"):
        assert anybody in whole and anybody not in hears + speaks, "clients reach a replica that hears no other"


def test_a_replica_with_a_shared_address_is_not_cut_off(three: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "nft_fault", lambda: "")
    first, second, third = three.replicas
    shared = replace(three, replicas=(first, replace(second, api=first.api), third))
    with pytest.raises(HelperRefused, match=r"r1 shares the address 10\.0\.0\.1 with another replica"):
        cut(shared, "partition")
    unknown = replace(three, replicas=(first, replace(second, peer=Address("no-such-host.invalid", 1)), third))
    with pytest.raises(HelperRefused, match="the address of no-such-host.invalid cannot be resolved on this machine"):
        cut(unknown, "partition")


def test_a_machine_without_nft_or_root_is_rejected(three: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.shutil, "which", lambda name: None)
    with pytest.raises(HelperRefused, match="this machine has no nft"):
        cut(three, "partition")
    monkeypatch.setattr(faults.shutil, "which", lambda name: "/usr/sbin/nft")
    monkeypatch.setattr(faults.os, "geteuid", lambda: 1000)
    assert nft_fault().startswith("the helper does not run as root")


def test_only_a_filesystem_unused_by_others_is_filled(
    three: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert disk_fault(Path("/")) == "/ is on the root filesystem, which other programs need"
    config = replace(three, storage=replace(three.storage, directory=tmp_path))
    (tmp_path / "r1").mkdir()
    monkeypatch.setattr(module, "disk_fault", lambda directory: "it is on the root filesystem")
    with pytest.raises(HelperRefused, match="it is on the root filesystem; give the replica a file system of its own"):
        fault_of(config, config.helpers[0], "disk-full", "r1", 7)
    monkeypatch.setattr(module, "disk_fault", lambda directory: "")
    found = fault_of(config, config.helpers[0], "disk-full", "r1", 7)
    assert found == Fill(str(tmp_path / "r1" / "drill-7.fill"), str(tmp_path / "r1" / "wal"), "r1")


@story
async def test_a_helper_of_an_earlier_release_is_rejected_before_the_fault() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(JSON.encode(HelperAnswer(done=True, protocol=0)) + b"\n")

    class Writer:
        def write(self, data: bytes) -> None:
            pass

        async def drain(self) -> None:
            pass

    channel = HelperChannel("h1", "1f", reader, Writer())  # type: ignore[arg-type]
    with pytest.raises(HelperRefused, match="helper h1 has an earlier release; update it"):
        await channel.ask(LookRequest("leader-hang", "r1"))


def lasted_s(said: bytes, lease_s: float, duration_s: float, *, gone: bool = False) -> float:
    """Return the duration of a fault whose helper sends these lines and then ends or falls silent."""
    end, begin = os.pipe()
    os.write(begin, said)
    if gone:
        os.close(begin)
    clock = SystemClock()
    since_s = clock.monotonic_s()
    wait_for_end(Lines(end), Lease(SystemClock(), lease_s, duration_s))
    took_s = clock.monotonic_s() - since_s
    os.close(end)
    if not gone:
        os.close(begin)
    return took_s


def test_a_fault_ends_with_its_lease_or_its_maximum_duration() -> None:
    far = f"lease {SystemClock().monotonic_s() + 3_600}\n".encode()
    assert lasted_s(b"", 0.2, 60) >= 0.2, "nobody renews it"
    assert lasted_s(far * 3, 60, 0.3) >= 0.3, "however often it is renewed"
    for said in (b"end\n", far + b"end\n", b"what\n"):
        assert lasted_s(said, 3_600, 3_600) < 60
    for said in (b"", far, b"lea"):
        assert lasted_s(said, 3_600, 3_600, gone=True) < 60, "the helper is gone"


@story
@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ConnectionResetError("reset by peer"), "reset by peer"),
        (TimeoutError(), "TimeoutError"),
        (asyncio.LimitOverrunError("too long", 9), "too long"),
    ],
)
async def test_a_missing_helper_answer_is_reported_with_its_cause(failure: Exception, said: str) -> None:
    class Writer:
        def write(self, data: bytes) -> None:
            raise failure

    channel = HelperChannel("h1", "1f", asyncio.StreamReader(), Writer())  # type: ignore[arg-type]
    with pytest.raises(HelperRefused, match=f"helper h1 does not answer .{said}."):
        await channel.ask(LookRequest("leader-hang", "r1"))

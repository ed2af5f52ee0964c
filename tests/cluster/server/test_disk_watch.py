"""A leader with a full or slow disk transfers leadership; without any space, commands are rejected."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.consensus import ChangeRefused, Role
from forebay.cluster.schemas import StatusView
from forebay.cluster.server.disk_watch import ASKED_EVERY_S, BETTER, QUICKER, DiskWatch, Room, room_of
from forebay.cluster.server.pending import USERS
from forebay.cluster.system import SLOW_SYNC_S
from forebay.replica.values import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import Harness, story

GIB = 1024**3
FILLS = (0.1, USERS.fill_max - BETTER - 0.01, USERS.fill_max - BETTER + 0.01, USERS.fill_max - 0.01, 0.81, 1.0)
SILENT = None
UNSAID = -1.0


def room(fill: float) -> Room:
    return Room(GIB, round(GIB / fill) - GIB)


class World:
    """Leader r1, peers with disks of the given fill, and the recorded transfers."""

    def __init__(self, mine: float, **peers: float | None) -> None:
        self.mine: Room | None = room(mine)
        self.fills = peers
        self.times: dict[str, float | None] = {}
        """Sync times by peer."""
        self.sync_s: float | None = None
        self.role = Role.LEADER
        self.asked = 0
        self.led: list[str | None] = []
        self.refuses = False
        self.clock = ManualClock(Instant(1))
        self.watch = DiskWatch(
            self,  # type: ignore[arg-type]
            measure=lambda: self.mine,
            map_size_bytes=2 * GIB,
            ask=self.ask,
            clock=self.clock,
        )

    def peers(self) -> list[Any]:
        return [
            *(SimpleNamespace(name=name, votes=True, clock_off=False) for name in self.fills),
            SimpleNamespace(name="learner", votes=False, clock_off=False),
            SimpleNamespace(name="an hour ahead", votes=True, clock_off=True),
        ]

    async def ask(self, peer: str) -> StatusView:
        self.asked += 1
        fill = self.fills[peer]
        if fill is SILENT:
            raise OSError("the peer does not answer")
        room_bytes = None if fill is UNSAID else room(fill).free_bytes
        found: Any = SimpleNamespace(replica=peer, journal_fill=0.5, room_bytes=room_bytes, sync_s=self.times.get(peer))
        return found  # type: ignore[no-any-return]

    async def transfer(self, target: str | None = None) -> str | None:
        if self.refuses:
            raise ChangeRefused("the target lags", "wait")
        self.led.append(target)
        self.role = Role.FOLLOWER
        return target

    async def look(self) -> None:
        self.watch.poll()
        for _ in range(10):
            await asyncio.sleep(0)


@story
async def test_leadership_moves_to_a_disk_with_space_and_only_then_commands_are_rejected() -> None:
    for mine, second, third in itertools.product(FILLS, (*FILLS, SILENT), (*FILLS, SILENT)):
        world = World(mine, r2=second, r3=third)
        await world.look()
        where = (mine, second, third)
        heard = [fill for fill in (second, third) if fill is not SILENT]
        if mine <= USERS.fill_max:
            assert (world.led, world.watch.is_scarce, world.asked) == ([], False, 0), where
        elif min(heard, default=1.0) <= USERS.fill_max - BETTER:
            best = "r2" if second is not SILENT and (third is SILENT or second <= third) else "r3"
            assert (world.led, world.watch.is_scarce) == ([best], False), where
        else:
            assert (world.led, world.watch.is_scarce) == ([], True), where
        wanted = world.mine.fill_with(GIB) if world.mine is not None and world.watch.is_scarce else 0.0
        assert world.watch.fill_with(GIB) == wanted, where


@story
async def test_scarcity_ends_with_free_space_or_a_new_leader() -> None:
    world = World(0.9, r2=0.9)
    await world.look()
    assert world.watch.is_scarce
    world.watch.stop()
    assert not world.watch.is_scarce
    await world.look()
    assert not world.watch.is_scarce and world.asked == 1, "peers are not asked continuously"
    world.clock.advance(ASKED_EVERY_S)
    await world.look()
    assert world.watch.is_scarce
    world.mine = room(0.5)
    await world.look()
    assert not world.watch.is_scarce
    world.mine = None
    await world.look()
    assert not world.watch.is_scarce, "without a report of the file system nothing is rejected"


@story
async def test_rejected_transfer_is_retried_later_and_rejects_no_commands() -> None:
    world = World(0.9, r2=0.1)
    world.refuses = True
    await world.look()
    assert (world.led, world.watch.is_scarce) == ([], False)
    world.refuses = False
    world.clock.advance(ASKED_EVERY_S)
    await world.look()
    assert world.led == ["r2"]


TIMES = (None, 0.0004, SLOW_SYNC_S / QUICKER, SLOW_SYNC_S - 1e-6, SLOW_SYNC_S, QUICKER * SLOW_SYNC_S, 1.0)


@story
async def test_leadership_moves_to_a_much_faster_disk_with_space() -> None:
    for mine, second, third, fill in itertools.product(TIMES, TIMES, TIMES, (0.1, UNSAID, 0.99, SILENT)):
        world = World(0.1, r2=fill, r3=0.1)
        world.sync_s, world.times = mine, {"r2": second, "r3": third}
        await world.look()
        where = (mine, second, third, fill)
        heard = {"r3": third} | ({"r2": second} if fill in (0.1, UNSAID) else {})
        quick = {name: took for name, took in heard.items() if took is not None}
        best = min(quick, key=lambda name: (quick[name], name), default=None)
        if mine is None or mine < SLOW_SYNC_S:
            assert (world.led, world.asked) == ([], 0), where
        elif best is not None and quick[best] * QUICKER <= mine:
            assert world.led == [best], where
        else:
            assert (world.led, world.asked) == ([], 2), where
        assert not world.watch.is_scarce, where


@story
async def test_slow_and_full_disk_is_left_once_and_a_slow_disk_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    world = World(0.9, r2=0.1, r3=0.1)
    world.sync_s, world.times = 1.0, {"r2": 0.5, "r3": 0.001}
    await world.look()
    assert len(world.led) == 1
    world = World(0.1, r2=0.1)
    world.sync_s, world.times = 0.1, {"r2": 0.1}
    for _ in range(3):
        await world.look()
        world.clock.advance(ASKED_EVERY_S)
    assert (world.led, world.asked) == ([], 3)
    assert [one.getMessage() for one in caplog.records if "disk sync" in one.getMessage()] == [
        "a disk sync takes 100 ms, and no other replica's disk is much faster; every command waits that long"
    ]
    world.sync_s = 0.001
    await world.look()
    assert world.asked == 3 and "fast enough again: 1.0 ms" in caplog.text


@story
async def test_cluster_with_full_disks_rejects_users_commands_until_there_is_space(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        found = room(USERS.fill_max + 0.02)
        monkeypatch.setattr("forebay.cluster.server.controller.room_of", lambda directory, used_bytes: found)
        harness.controller.disk_watch.poll()
        for _ in range(10):
            await asyncio.sleep(0)
        refused = await harness.submit()
        assert (refused.status, refused.code) == (507, "journal_full")
        assert "make room on the disks" in refused.body["error"]["remedy"]
        found = room(0.5)
        harness.controller.disk_watch.poll()
        assert (await harness.submit()).status == 201


def test_measured_disk_is_the_directorys_and_a_missing_one_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def said(directory: Path) -> SimpleNamespace:
        asked.append(directory)
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    assert room_of(tmp_path / "none", 1) is None
    monkeypatch.setattr(os, "statvfs", said)
    assert room_of(tmp_path, 5) == Room(5, 3 * 4096) and asked == [tmp_path]

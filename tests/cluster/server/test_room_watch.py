"""Room on disks: a leader without any lets another one lead, and where nobody has some it is refused in time."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.config.config import Config
from cluster.consensus import ChangeRefused
from cluster.schemas import StatusView
from cluster.server.pending import USERS
from cluster.server.room_watch import ASKED_EVERY_S, BETTER, Room, RoomWatch, room_of
from replica.values import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import Harness, story

GIB = 1024**3
FILLS = (0.1, USERS.fill_max - BETTER - 0.01, USERS.fill_max - BETTER + 0.01, USERS.fill_max - 0.01, 0.81, 1.0)
SILENT = None


def room(fill: float) -> Room:
    return Room(GIB, round(GIB / fill) - GIB)


class World:
    """A leader r1, peers with disks that are so full, and whom the leadership went to."""

    def __init__(self, mine: float, **peers: float | None) -> None:
        self.mine: Room | None = room(mine)
        self.fills = peers
        self.asked = 0
        self.led: list[str | None] = []
        self.refuses = False
        self.clock = ManualClock(Instant(1))
        self.watch = RoomWatch(
            self,  # type: ignore[arg-type]
            measure=lambda: self.mine,
            map_size_bytes=2 * GIB,
            ask=self.ask,
            clock=self.clock,
        )

    def peers(self) -> list[Any]:
        return [SimpleNamespace(name=name, votes=True) for name in self.fills] + [
            SimpleNamespace(name="learner", votes=False)
        ]

    async def ask(self, peer: str) -> StatusView:
        self.asked += 1
        fill = self.fills[peer]
        if fill is SILENT:
            raise OSError("it does not answer")
        found: Any = SimpleNamespace(replica=peer, journal_fill=0.5, room_bytes=room(fill).free_bytes)
        return found  # type: ignore[no-any-return]

    async def transfer(self, target: str | None = None) -> str | None:
        if self.refuses:
            raise ChangeRefused("it lags", "wait")
        self.led.append(target)
        return target

    async def look(self) -> None:
        self.watch.poll()
        for _ in range(10):
            await asyncio.sleep(0)


@story
async def test_who_leads_has_room_or_nobody_has_and_only_then_anything_is_refused() -> None:
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
async def test_it_is_over_when_there_is_room_again_or_somebody_else_leads() -> None:
    world = World(0.9, r2=0.9)
    await world.look()
    assert world.watch.is_scarce
    world.watch.stop()
    assert not world.watch.is_scarce
    await world.look()
    assert not world.watch.is_scarce and world.asked == 1, "nobody is asked all the time"
    world.clock.advance(ASKED_EVERY_S)
    await world.look()
    assert world.watch.is_scarce
    world.mine = room(0.5)
    await world.look()
    assert not world.watch.is_scarce
    world.mine = None
    await world.look()
    assert not world.watch.is_scarce, "where the file system does not say, nothing is refused"


@story
async def test_a_handing_over_that_is_refused_is_tried_again_later_and_nothing_is_refused_for_it() -> None:
    world = World(0.9, r2=0.1)
    world.refuses = True
    await world.look()
    assert (world.led, world.watch.is_scarce) == ([], False)
    world.refuses = False
    world.clock.advance(ASKED_EVERY_S)
    await world.look()
    assert world.led == ["r2"]


@story
async def test_a_cluster_whose_disks_are_full_refuses_what_users_ask_for_and_takes_it_when_they_are_not(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Harness(config) as harness:
        found = room(USERS.fill_max + 0.02)
        monkeypatch.setattr("cluster.server.controller.room_of", lambda directory, used_bytes: found)
        harness.controller.room_watch.poll()
        for _ in range(10):
            await asyncio.sleep(0)
        refused = await harness.submit()
        assert (refused.status, refused.code) == (507, "journal_full")
        assert "make room on the disks" in refused.body["error"]["remedy"]
        found = room(0.5)
        harness.controller.room_watch.poll()
        assert (await harness.submit()).status == 201


def test_the_disk_is_that_of_the_directory_and_one_that_is_gone_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def said(directory: Path) -> SimpleNamespace:
        asked.append(directory)
        return SimpleNamespace(f_bavail=3, f_frsize=4096)

    assert room_of(tmp_path / "none", 1) is None
    monkeypatch.setattr(os, "statvfs", said)
    assert room_of(tmp_path, 5) == Room(5, 3 * 4096) and asked == [tmp_path]

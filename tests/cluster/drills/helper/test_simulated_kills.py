"""A kill of any process at any step of any drill: the fault is undone within its lease, and the record is empty."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.config import Config, DrillConfig, HelperConfig
from forebay.cluster.drills import coordinator, final_checks, probes
from forebay.cluster.drills.coordinator import LEASE_MORE_S
from forebay.cluster.drills.helper import LEASE_S
from forebay.cluster.drills.helper import service as helping
from forebay.cluster.drills.helper.record import UndoRecord
from forebay.cluster.drills.scenarios import SCENARIOS
from forebay.cluster.system import Address
from tests.cluster.drills.helper.simulated import PROBE_S, RESTART_S, VICTIMS, Simulated

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
"""Coroutines of a killed process are closed in the middle, or before they began."""

SETTLED_S = 2 * RESTART_S + 1.0
"""Time to restart a helper, which may wait for another process."""

WHOLE_S = 150.0
"""Longer than any drill, with whatever it waits for."""


@pytest.fixture
def world(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    for name, value in (("LOOK_S", 0.5), ("CONTROL_S", 0.5), ("SETTLE_S", 0.5), ("BACK_S", 10.0)):
        monkeypatch.setattr(coordinator, name, value)
    monkeypatch.setattr(final_checks, "AGREE_S", 2.0)
    monkeypatch.setattr(final_checks, "LOOK_S", 0.5)
    for name in ("PROBE_EVERY_S", "READ_EVERY_S"):
        monkeypatch.setattr(probes, name, PROBE_S)
    # With one thread, a process that would wait for the record tries again instead.
    monkeypatch.setattr(helping, "UndoRecord", lambda directory, wait: UndoRecord(directory))
    drill = DrillConfig(allow=("process", "network", "disk"), directory=tmp_path)
    targets = ("r1", "r2", "n1")
    return replace(config, helpers=(HelperConfig("h1", Address("127.0.0.1", 7431), targets),), drill=drill)


def simulated(
    world: Config, monkeypatch: pytest.MonkeyPatch, scenario: str, victim: str = "", at: int = -1
) -> Simulated:
    made = Simulated(world, scenario, world.drill.directory, victim, at)
    monkeypatch.setattr(helping, "fault_of", made.fault_of)
    monkeypatch.setattr(helping, "ThisMachine", lambda up=None: made.machine)
    return made


@pytest.mark.campaign(3)
@pytest.mark.parametrize("scenario", [name for name, one in SCENARIOS.items() if not one.on_copy])
def test_a_kill_at_any_step_undoes_the_fault_within_its_lease(
    world: Config, monkeypatch: pytest.MonkeyPatch, scenario: str
) -> None:
    clean = simulated(world, monkeypatch, scenario).run(WHOLE_S)
    assert not clean.faults and not clean.said, (clean.faults, clean.said)
    assert clean.answer().verdict == "passed" and not [*clean.left], clean.answer().sentence
    verdicts = Counter[str]()
    for victim in VICTIMS:
        for at in range(len(clean.steps)):
            what = f"{scenario}: {victim} killed at step {at}, {clean.steps[at]}"
            run = simulated(world, monkeypatch, scenario, victim, at)
            killed_s = None
            run.run(0.0)
            while run.killed_s is None and run.timeline.now_s < WHOLE_S:
                run.timeline.run(0.05)
            killed_s = run.killed_s
            assert killed_s is not None, what
            run.timeline.run(LEASE_S + SETTLED_S)
            if victim in ("coordinator", "network", "operator"):
                assert not [*run.left], f"{what}: {[*run.left]}"
            if victim == "coordinator":
                run.timeline.run(max(0.0, killed_s + 5 + LEASE_MORE_S + 1 - run.timeline.now_s))
                if 1 in run.state.state.drills:
                    assert run.answer().verdict != "under way", what
            run.timeline.run(WHOLE_S, until=run.is_over, every_s=1.0)
            run.timeline.run(SETTLED_S)
            assert not [*run.left], f"{what}: {[*run.left]}"
            assert not run.faults, f"{what}: {run.faults}"
            if 1 in run.state.state.drills:
                ended = run.answer()
                allowed = {"lost"} if victim in ("coordinator", "network") else set()
                assert ended.verdict in {"passed", "failed", "aborted"} | allowed, f"{what}: {ended}"
                assert ended.sentence or ended.verdict == "lost", what
                verdicts[ended.verdict] += 1
    assert verdicts["aborted"] and verdicts["lost"] and verdicts["passed"], verdicts

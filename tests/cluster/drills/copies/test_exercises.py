"""Losses that an exercise reports, and the disk space it needs."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.drills.copies.exercises import lost_writes
from forebay.cluster.drills.copies.resources import COPIES, measure_resources
from forebay.cluster.drills.figures import Probe
from forebay.cluster.drills.final_checks import Resent

FAULT_S = 10.0
SAID_AFTER = 50


def test_announced_losses_differ_from_unannounced_ones() -> None:
    probes = (
        Probe(1.0, 1.1, "kept", 40),
        Probe(2.0, 2.1, "gone early", 45),
        Probe(8.0, 8.5, "gone late", 60),
        Probe(9.0, 9.1, "gone, not answered", 61),
        Probe(11.0, 11.1, "gone after it", 70),
        Probe(3.0, None, "never acknowledged"),
    )
    again = Resent({"kept": 40, "gone early": 90, "gone late": 91, "gone after it": 92}, {})
    found = lost_writes(probes, again, FAULT_S, SAID_AFTER)
    assert found.said == ("gone late", "gone, not answered")
    assert found.unsaid == ("gone after it", "gone early")
    assert found.span_us == 1_500_000, "from the first that is gone to the fault"
    nothing_said = lost_writes(probes, again)
    assert nothing_said.said == () and len(nothing_said.unsaid) == 4


writes = st.lists(
    st.builds(
        Probe,
        st.floats(0, 20),
        st.one_of(st.none(), st.floats(0, 20)),
        st.uuids().map(str),
        st.integers(1, 100),
    ),
    max_size=20,
    unique_by=lambda one: one.command_id,
)


@given(writes, st.data())
def test_every_acknowledged_write_is_kept_or_lost_as_announced(probes: list[Probe], data: st.DataObject) -> None:
    again = {
        one.command_id: one.revision + data.draw(st.sampled_from((0, 0, 7)))
        for one in probes
        if data.draw(st.booleans())
    }
    found = lost_writes(probes, Resent(again, {}), FAULT_S, SAID_AFTER)
    acknowledged = {one.command_id: one for one in probes if one.answered_s is not None}
    there = {name for name, one in acknowledged.items() if again.get(name) == one.revision}
    assert {*found.said, *found.unsaid} == acknowledged.keys() - there and not {*found.said} & {*found.unsaid}
    for name in found.said:
        assert acknowledged[name].sent_s <= FAULT_S and acknowledged[name].revision > SAID_AFTER


def test_needed_disk_space_grows_with_the_snapshot(tmp_path: Path) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9 kB\nMemAvailable:    2048 kB\n")
    small, large = measure_resources(tmp_path, 0, memory), measure_resources(tmp_path, 1 << 30, memory)
    assert small.memory_bytes == 2048 * 1024 and small.free_bytes > 0 and small.fault == ""
    assert large.needed_bytes - small.needed_bytes >= (COPIES + 1) << 30
    assert large.needed_memory_bytes > small.needed_memory_bytes
    assert measure_resources(tmp_path / "none", 0, tmp_path / "none").fault == "No such file or directory"

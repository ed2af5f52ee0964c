"""A drill as a page: it says what the figures say, names what people named as text, and needs nothing but itself."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from cluster.cli.drills.report import COMPARED, ROWS_MAX, render_page
from cluster.cli.exits import Failure
from cluster.cli.files import write_whole
from cluster.schemas.drills import DrillAnswer, DrillView
from cluster.schemas.ledger import LeaderTermView, StoryRow
from tests.browser import CHROMIUM, browser
from tests.cluster.cli.drills.test_preconditions import drill
from tests.cluster.harness import story as on_a_loop

FIGURES = {
    "write_stop_us": 375_500, "write_stop_at_us": 2_000_000, "fault_at_us": 2_000_000, "begun_us": 200_000,
    "held_us": 5_000_000, "watched_us": 7_000_000, "goal_us": 500_000, "writes_lost": 0, "states_agree": 1,
    "read_stop_us": 400_000, "runs_again": 0,
}  # fmt: skip
DRILL = DrillAnswer(
    revision=90, drill=9, scenario="leader-hang", target="r1", by="ann", verdict="passed", plan="f003ad4d",
    second="eve",
    began="2026-01-31T12:00:00Z", until="2026-01-31T12:02:00Z", ended="2026-01-31T12:00:10Z", figures=FIGURES,
    sentence="r1 is back", forced=("digests",),
)  # fmt: skip
TERMS = (
    LeaderTermView(
        term=1, leader="r1", first_index=1, last_index=9, from_at="2026-01-31T11:00:00Z",
        to_at="2026-01-31T12:00:02Z", silent_s=None,
    ),
    LeaderTermView(
        term=2, leader="r2", first_index=10, last_index=19, from_at="2026-01-31T12:00:02.4Z", to_at=None, silent_s=0.4
    ),
    LeaderTermView(term=3, leader=None, first_index=20, last_index=20, from_at=None, to_at=None, silent_s=None),
)  # fmt: skip


def story(count: int) -> tuple[StoryRow, ...]:
    row = StoryRow(revision=9, at="12:00", actor="agent n1", command="c", event="e", sentence="job 4 <b>ran</b>")
    return (row,) * count


def page(**changes: object) -> str:
    shown = {"drill": DRILL, "earlier": (), "terms": TERMS, "story": story(1), "command": "made", **changes}
    return render_page(*shown.values())  # type: ignore[arg-type]


def test_every_figure_is_on_the_page_as_json_has_it() -> None:
    text = page()
    for name, value in FIGURES.items():
        assert f'<td>{name}</td><td class="n">{value}</td>' in text
    assert "<td>375.5 ms</td><td>at most 500.0 ms</td>" in text
    for said in ("passed: r1 is back", "ann, and eve agreed", "f003ad4d", "digests", "made"):
        assert f"<td>{said}</td>" in text


def test_the_stop_of_writes_the_fault_and_the_terms_are_drawn_where_they_were() -> None:
    text = page()
    wide = 1100 - 170 - 16

    def bar(title: str) -> tuple[float, float]:
        found = re.search(rf'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"[^>]*><title>{title}', text)
        assert found is not None, title
        return (float(found[1]) - 170) / wide * 10, float(found[2]) / wide * 10

    stop_s, stopped_s = bar("no write was acknowledged for 375.5 ms")
    assert abs(stop_s - 4.0) < 0.01 and abs(stopped_s - 0.3755) < 0.01
    fault_s, held_s = bar("leader-hang of r1")
    assert abs(fault_s - 2.0) < 0.01 and abs(held_s - 5.2) < 0.01
    assert abs(bar("r1 led term 1")[1] - 2.0) < 0.01 and abs(bar("r2 led term 2")[0] - 2.4) < 0.01
    assert "led term 3" not in text, "it was not of that time"


def test_drills_of_its_kind_before_it_are_compared_and_no_others() -> None:
    def one(number: int, scenario: str) -> DrillView:
        return drill(number, scenario=scenario, figures={"write_stop_us": number * 1000})

    earlier = (one(10, "leader-hang"), one(8, "leader-hang"), one(7, "switchover"), one(6, "leader-hang"))
    text = page(earlier=earlier)
    assert "before it of its kind: 2<" in text and "<td>8.0 ms</td>" in text and "<td>6.0 ms</td>" in text
    assert "<td>7.0 ms</td>" not in text and "<td>10.0 ms</td>" not in text
    many = tuple(one(number, "leader-hang") for number in range(8, -40, -1))
    assert f"of its kind: {COMPARED}<" in page(earlier=many)


def test_what_people_wrote_is_text_and_the_page_needs_nothing_but_itself() -> None:
    text = page(drill=replace(DRILL, sentence="<script>alert(1)</script>", target='"><img src=x>'))
    assert "<script" not in text and "<img" not in text and "job 4 &lt;b&gt;ran&lt;/b&gt;" in text
    assert not re.search(r"(src|href)=|url\(|@import", text.replace("src=x", ""))
    assert "default-src 'none'" in text


def test_a_drill_without_figures_has_a_page_and_a_long_story_is_cut_and_says_so() -> None:
    text = page(drill=replace(DRILL, figures={}, verdict="aborted"), story=story(ROWS_MAX + 1))
    assert f"The first {ROWS_MAX}; there is more." in text and "led term 1" in text
    assert text.count("job 4 ") == ROWS_MAX


def test_a_page_that_cannot_be_written_is_bad_input_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for output in (tmp_path / "file" / "page", tmp_path / "none" / "page", tmp_path):
        with pytest.raises(Failure, match="cannot be written"):
            write_whole(output, b"page", "--html")
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


# ---- in a browser


RESTORED = replace(
    DRILL,
    scenario="restore",
    verdict="failed",
    sentence="r3 had a different state at revision 7",
    second="",
    forced=(),
    figures={
        "write_stop_us": 2_100_000, "write_stop_at_us": 0, "fault_at_us": 3_000_000, "watched_us": 6_000_000,
        "goal_us": 60_000_000, "read_stop_us": 2_000_000, "stands_loss_us": 5_000_000, "writes_lost": 0,
        "folds_agree": 1, "behind_revisions": 12, "states_agree": 1,
    },
)  # fmt: skip

ROWS = "[...document.querySelectorAll('tr')].map(row => [...row.cells].map(cell => cell.textContent))"
BARS = """Object.fromEntries([...document.querySelectorAll('rect')].map(one => {
    const at = one.getBoundingClientRect(), whole = one.ownerSVGElement.getBoundingClientRect();
    return [one.textContent, [(at.left - whole.left) / whole.width * 1100, at.width / whole.width * 1100]];
}))"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: scripts/install-backends --browser")
@on_a_loop
async def test_a_browser_shows_what_the_json_says_and_asks_nobody(tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.look(width=1300, height=1600)
        for shown in (DRILL, RESTORED):
            file = tmp_path / f"{shown.scenario}.html"
            file.write_text(page(drill=shown))
            tab.asked.clear()
            await tab.open(file.as_uri())
            rows, said = await tab.run(ROWS), json.loads(msgspec.json.encode(shown))
            figures = {row[0]: row[1] for row in rows if row[0] in said["figures"]}
            assert figures == {name: str(value) for name, value in said["figures"].items()}
            facts = {row[0]: row[1] for row in rows if len(row) == 2}
            assert facts["Verdict"] == f"{said['verdict']}: {said['sentence']}" and facts["Plan"] == said["plan"]
            assert facts["By"] == said["by"] + (f", and {said['second']} agreed" if said["second"] else "")
            assert facts["Preconditions overridden"] == (", ".join(said["forced"]) or "none")
            bars, wide_s = await tab.run(BARS), (1100 - 170 - 16) / 10
            stop_us, at_us = said["figures"]["write_stop_us"], said["figures"]["write_stop_at_us"]
            ((left, width),) = (at for title, at in bars.items() if title.startswith("no write was acknowledged for"))
            began_s = (said["figures"]["fault_at_us"] + at_us) / 1e6
            assert abs(left - 170 - began_s * wide_s) < 1 and abs(width - stop_us / 1e6 * wide_s) < 1
            (lasted,) = (at[1] for title, at in bars.items() if title.startswith(f"{said['scenario']} of r1"))
            assert abs(lasted - (5.2 if shown is DRILL else 5.0) * wide_s) < 1
            assert tab.said == [] and tab.asked == [file.as_uri()]

"""The page of a drill shows all figures, escapes texts, and is self-contained."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from forebay.cluster.cli.exits import Failure
from forebay.cluster.cli.files import write_whole
from forebay.cluster.drills.figure_labels import format_figure, label_of
from forebay.cluster.drills.report import COMPARED, ROWS_MAX, render_page
from forebay.cluster.schemas.drills import DrillAnswer, DrillView
from forebay.cluster.schemas.ledger import LeaderTermView, StoryRow
from tests.browser import CHROMIUM, browser
from tests.cluster.drills.test_preconditions import drill
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


def table(text: str, heading: str) -> list[list[str]]:
    """Return the rows of the first table behind a heading."""
    rows = text[text.index(heading) :].partition("<table>")[2].partition("</table>")[0].split("<tr>")
    return [found for row in rows if (found := re.findall(r"<td[^>]*>([^<]*)</td>", row))]


def page(**changes: object) -> str:
    shown = {"drill": DRILL, "earlier": (), "terms": TERMS, "story": story(1), "command": "made", **changes}
    return render_page(*shown.values())  # type: ignore[arg-type]


def test_every_json_figure_is_on_the_page() -> None:
    text = page()
    figures = {row[0]: row[1:] for row in table(text, "<h2>Figures</h2>")}
    assert {label_of(name): format_figure(name, value) for name, value in FIGURES.items()} == {
        label: value for label, (value, _) in figures.items()
    }
    assert figures["Writes stopped"] == ["375.5 ms", "at most 500.0 ms"]
    assert figures["Replicas consistent"] == ["yes", "yes"] and figures["Re-runs"] == ["0", "0"]
    for said in ("r1 is back", "ann, approved by eve", "f003ad4d", "digests", "made"):
        assert f"<td>{said}</td>" in text


@pytest.mark.parametrize(
    ("verdict", "figures", "kinds"),
    [
        ("passed", {}, ["good", "", "good", "good", "good"]),
        ("failed", {"write_stop_us": 900_000, "writes_lost": 1, "runs_again": 2}, ["bad", "", "bad", "bad", "bad"]),
        ("aborted", None, ["warn", "", "", "", ""]),
    ],
)
def test_the_first_block_has_the_verdict_and_its_figures(
    verdict: str, figures: dict[str, int] | None, kinds: list[str]
) -> None:
    text = page(drill=replace(DRILL, verdict=verdict, figures={} if figures is None else FIGURES | figures))
    first = text[text.index('<div class="tiles">') : text.index("<table")]
    found = re.findall(r'<div class="tile (\w*)"><span>([^<]*)</span><b>([^<]*)</b>', first)
    labels = ["Verdict", "Goal", "Measured", "Acknowledged writes lost", "Jobs re-run"]
    assert [label for _, label, _ in found] == labels and [kind for kind, _, _ in found] == kinds
    assert found[0][2] == verdict and text.index("<h1>") < text.index('<div class="tiles">') < text.index("<h2>")
    if figures:
        assert [value for *_, value in found[1:]] == ["≤ 500.0 ms", "900.0 ms", "1", "2"]


def test_every_timeline_colour_is_in_the_legend() -> None:
    text = page()
    legend = set(re.findall(r'<span class="(\w+)"></span>', text))
    assert legend == set(re.findall(r'<rect [^>]*class="(\w+)"', text))


def test_stop_fault_and_terms_are_drawn_at_their_times() -> None:
    text = page()

    def bar(title: str) -> tuple[float, float]:
        found = re.search(rf'<rect x="([0-9.]+)" y="[0-9.]+" width="([0-9.]+)"[^>]*><title>{title}', text)
        assert found is not None, title
        return float(found[1]) / 100, float(found[2]) / 100

    stop_s, stopped_s = bar("no write was acknowledged for 375.5 ms")
    assert abs(stop_s - 4.0) < 0.01 and abs(stopped_s - 0.3755) < 0.01
    fault_s, held_s = bar("leader-hang of r1")
    assert abs(fault_s - 2.0) < 0.01 and abs(held_s - 5.2) < 0.01
    assert abs(bar("r1: leader in term 1")[1] - 2.0) < 0.01 and abs(bar("r2: leader in term 2")[0] - 2.4) < 0.01
    assert "in term 3" not in text, "it was not of that time"


def test_only_earlier_drills_of_the_same_kind_are_compared() -> None:
    def one(number: int, scenario: str) -> DrillView:
        return drill(number, scenario=scenario, figures={"write_stop_us": number * 1000})

    earlier = (one(10, "leader-hang"), one(8, "leader-hang"), one(7, "switchover"), one(6, "leader-hang"))
    text = page(earlier=earlier)
    rows = table(text, "Earlier leader-hang drills: 2<")
    assert [(row[0], row[4]) for row in rows] == [("8", "8.0 ms"), ("6", "6.0 ms")]
    assert "Earlier" not in page(earlier=earlier[:1])
    many = tuple(one(number, "leader-hang") for number in range(8, -40, -1))
    assert f"drills: {COMPARED}<" in page(earlier=many)


def test_texts_are_escaped_and_the_page_is_self_contained() -> None:
    text = page(drill=replace(DRILL, sentence="<script>alert(1)</script>", target='"><img src=x>'))
    assert "<script" not in text and "<img" not in text and "job 4 &lt;b&gt;ran&lt;/b&gt;" in text
    assert not re.search(r"(src|href)=|url\(|@import", text.replace("src=x", ""))
    assert "default-src 'none'" in text


def test_a_drill_without_figures_has_a_page_and_long_histories_are_cut() -> None:
    text = page(drill=replace(DRILL, figures={}, verdict="aborted"), story=story(ROWS_MAX + 1))
    assert f"The first {ROWS_MAX} events; there are more." in text and "in term 1" in text
    assert text.count("job 4 ") == ROWS_MAX


def test_an_unwritable_page_is_bad_input_and_leaves_no_file(tmp_path: Path) -> None:
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
    return [one.textContent, [(at.left - whole.left) / whole.width * 1000, at.width / whole.width * 1000]];
}))"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: scripts/install-backends --browser")
@on_a_loop
async def test_a_browser_shows_the_json_figures_offline(tmp_path: Path) -> None:
    async with browser(tmp_path / "profile") as tab:
        await tab.look(width=1300, height=1600)
        for shown in (DRILL, RESTORED):
            file = tmp_path / f"{shown.scenario}.html"
            file.write_text(page(drill=shown))
            tab.asked.clear()
            await tab.open(file.as_uri())
            rows, said = await tab.run(ROWS), json.loads(msgspec.json.encode(shown))
            figures = {label_of(name): format_figure(name, value) for name, value in said["figures"].items()}
            assert {row[0]: row[1] for row in rows if row[0] in figures} == figures
            facts = {row[0]: row[1] for row in rows if len(row) == 2}
            assert facts["Result"] == said["sentence"] and facts["Plan"] == said["plan"]
            assert facts["By"] == said["by"] + (f", approved by {said['second']}" if said["second"] else "")
            assert facts["Preconditions overridden"] == (", ".join(said["forced"]) or "none")
            bars, wide_s = await tab.run(BARS), 100
            stop_us, at_us = said["figures"]["write_stop_us"], said["figures"]["write_stop_at_us"]
            ((left, width),) = (at for title, at in bars.items() if title.startswith("no write was acknowledged for"))
            began_s = (said["figures"]["fault_at_us"] + at_us) / 1e6
            assert abs(left - began_s * wide_s) < 1 and abs(width - stop_us / 1e6 * wide_s) < 1
            (lasted,) = (at[1] for title, at in bars.items() if title.startswith(f"{said['scenario']} of r1"))
            assert abs(lasted - (5.2 if shown is DRILL else 5.0) * wide_s) < 1
            assert tab.said == [] and tab.asked == [file.as_uri()]

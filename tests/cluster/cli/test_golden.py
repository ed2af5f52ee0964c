"""Exact output of commands at a fixed width.

FOREBAY_REWRITE_GOLDEN=1 writes the files again; check the difference before you commit it.
"""

import datetime
import io
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from forebay.cluster.cli.text.job import job_block, spans, timeline, why_text
from forebay.cluster.cli.text.output import INDENT, MARK, ROWS_STYLED_MAX, SHORTENED_MIN, Listing, show, table
from forebay.cluster.cli.text.squeue import STANDARD, Column, Field, format_line, read_format, sort_jobs
from forebay.cluster.cli.text.tables import buffers_table, jobs_table, members_table, nodes_table, pools_table
from forebay.cluster.cli.text.transfer import draw_transfers, job_transfers_text, receipt_text, transfers_table
from forebay.cluster.schemas.job_fields import JobDetailsView
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.schemas.transfers import JobTransfersView
from forebay.cluster.system.clock import parse_instant
from tests.cluster.cli.test_commands import BUFFER, MEMBER, NODE, POOL, WHY
from tests.cluster.cli.transfer_views import OF_A_JOB, RECEIPT, TRANSFERS
from tests.cluster.cli.views import HISTORY, JOBS, NO_BUFFER, PENDING, RUNNING, job

GOLDEN = Path(__file__).parent / "golden"
NOW = parse_instant("2026-01-31T12:00:00Z")
WIDTH = 120
DOWN = msgspec.structs.replace(
    NODE, name="n2", state="DOWN", reason="not heard of for 30 s", jobs=(), last_contact_s=None
)
LOST = msgspec.structs.replace(
    MEMBER, name="r2", role="unknown", reachable=False, term=None, commit_index=None, applied_index=None, revision=None,
    lag_entries=None, last_contact_s=12.5,
)  # fmt: skip
STUCK = job(
    state="STAGE_OUT", reason="burst_buffer/native: data_out: no space left", burst_buffer_state="staging-out",
    hold="admin", system_comment="no space left on /results", node="n1", exit_code=2,
    start_time="2026-01-30T10:00:00.000000Z", end_time="2026-01-31T11:00:00.000000Z",
)  # fmt: skip

ARRAY_TASK = job(
    job_id=28, name="sweep", uid=None, hold="user", node=None, tres="cpu=2,node=1,bb/datawarp=16M",
    system_comment="11/20/26 22:14:57 burst_buffer/lua: data_in: gone\n11/20/26 22:15:57 burst_buffer/lua: setup: gone",
    details=JobDetailsView(
        gid=65534, account="physics", qos="high", licenses=("matlab:2",), reservation="night", partition="debug",
        nice=5, array_job_id=25, array_task_id=3, array_throttle=2, requeue=False, restarts=1, singleton=True,
        mail_types=("stage_out", "fail"), comment="a sweep", deadline="2026-02-01T00:00:00.000000Z", suspended_s=7,
    ),
)  # fmt: skip


def block(view: JobView) -> str:
    return job_block(view, NOW, zone=datetime.UTC, uid={"alice": 1001}.get, group={65534: "nogroup"}.get)


def queue_text(columns: tuple[Column, ...]) -> str:
    rows = sort_jobs((*JOBS.jobs, STUCK, ARRAY_TASK))
    cells = [partial(field_of, view) for view in rows]
    return "\n".join(format_line(columns, cell) for cell in (lambda field: field.heading, *cells))


def field_of(view: JobView, field: Field) -> str:
    return field.shows(view, NOW)


SHOWN: dict[str, Callable[[], None]] = {
    "job-list": lambda: show(jobs_table([*JOBS.jobs, STUCK], NOW)),
    "job-list-empty": lambda: show(jobs_table([], NOW)),
    "job-show-pending": lambda: click.echo(block(PENDING)),
    "job-show-running": lambda: click.echo(block(RUNNING)),
    "job-show-stuck": lambda: click.echo(block(STUCK)),
    "job-show-array": lambda: click.echo(block(ARRAY_TASK)),
    "queue": lambda: click.echo(queue_text(read_format(STANDARD))),
    "queue-format": lambda: click.echo(queue_text(read_format("%i|%.5A|%8j|%T|%r|%a %q %B %Q%%"))),
    "job-show-no-buffer": lambda: click.echo(block(NO_BUFFER)),
    "job-history": lambda: show(timeline(HISTORY, NOW)),
    "job-history-unfinished": lambda: show(
        timeline(msgspec.structs.replace(HISTORY, rows=HISTORY.rows[:2], complete=False), NOW)
    ),
    "job-why": lambda: click.echo(why_text(WHY)),
    "pool-list": lambda: show(pools_table([POOL])),
    "buffer-list": lambda: show(buffers_table([BUFFER])),
    "node-list": lambda: show(nodes_table([NODE, DOWN])),
    "transfer-list": lambda: show(transfers_table(TRANSFERS)),
    "transfer-drawing": lambda: show(draw_transfers(TRANSFERS)),
    "transfer-drawing-empty": lambda: show(draw_transfers([])),
    "transfer-show": lambda: click.echo(job_transfers_text(OF_A_JOB)),
    "transfer-show-nothing": lambda: click.echo(job_transfers_text(JobTransfersView(revision=5, job_id=42))),
    "transfer-receipt": lambda: click.echo(receipt_text(RECEIPT)),
    "job-show-transfers": lambda: click.echo(block(msgspec.structs.replace(STUCK, transfers=OF_A_JOB))),
    "member-list": lambda: show(members_table([MEMBER, LOST])),
}


@pytest.mark.parametrize("name", SHOWN)
def test_command_output_matches_the_golden_files(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    SHOWN[name]()
    text = capsys.readouterr().out
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get("FOREBAY_REWRITE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()
    assert max(map(len, text.splitlines())) <= WIDTH


def test_every_golden_file_is_used() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(SHOWN)


def test_a_pipe_gets_each_job_on_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(jobs_table([job(reason="x" * 500)], NOW))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[1].endswith("x" * 500)


def test_every_table_cell_has_a_word(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    show(jobs_table([PENDING, NO_BUFFER], NOW))
    header, *rows = capsys.readouterr().out.splitlines()
    assert {len(row.split()) for row in rows} == {len(header.split())}


@pytest.mark.parametrize("name", [name for name in SHOWN if name.endswith("list")])
def test_a_fitting_table_is_identical_to_the_rich_output(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    SHOWN[name]()
    written = capsys.readouterr().out
    monkeypatch.setattr("forebay.cluster.cli.text.output.Listing.width", 10**6)
    monkeypatch.setattr("forebay.cluster.cli.text.output.Listing._is_simple", lambda _: False)
    SHOWN[name]()
    assert written == capsys.readouterr().out


# Rich drops trailing blanks of the last cell, and cells that contain only zero-width characters.
_CELLS = (
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    .map(str.strip)
    .filter(lambda text: text == "" or cell_len(text) > 0)
)


@given(
    st.lists(st.tuples(*[_CELLS] * 3), max_size=5),
    st.booleans(),
)
def test_random_cells_are_identical_to_the_rich_output(rows: list[tuple[str, str, str]], header: bool) -> None:
    made = table(("A", "LONGER", "C"), rows, right=frozenset({"LONGER"}), flexible=frozenset({"C"}), header=header)
    console = Console(file=io.StringIO(), width=1_000, highlight=False, markup=False, emoji=False, no_color=True)
    console.print(made)
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line.rstrip() for line in drawn.split("\n")]
    assert made.text().split("\n") == lines


@given(
    st.lists(st.tuples(*[st.text("0123456789", min_size=1, max_size=30)] * 5, st.text("abc", max_size=90)), min_size=1),
    st.integers(30, 120),
)
def test_figures_are_never_cut_in_narrow_terminals(rows: list[tuple[str, ...]], room: int) -> None:
    made = table(("A", "B", "C", "D", "E", "REASON"), rows, right=frozenset({"B"}), flexible=frozenset({"REASON"}))
    lines = made.text(room=room).splitlines()
    each, rest = divmod(len(lines), len(rows) + 1)
    assert rest == 0, "all rows have as many lines"
    assert max(map(len, lines)) <= max(room, 30 + INDENT)
    for number, row in enumerate(rows, 1):
        words = " ".join(lines[number * each : (number + 1) * each]).split()
        assert words[:5] == [*row[:5]]
        if not any(one[5] for one in rows):
            assert len(words) == 5, "a column that shows nothing is left out"
            continue
        reason = row[5] or "-"
        assert words[5] == reason or (words[5].endswith(MARK) and reason.startswith(words[5][:-1]))
        assert len(words[5]) >= min(len(reason), SHORTENED_MIN)


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("name", [name for name in SHOWN if name.endswith("list")])
def test_every_listing_keeps_whole_figures_in_a_narrow_terminal(
    name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    SHOWN[name]()
    whole = capsys.readouterr().out.split()
    monkeypatch.setenv("COLUMNS", str(columns))
    SHOWN[name]()
    text = capsys.readouterr().out
    figures = [word for word in whole if any(sign.isdigit() for sign in word) and not word.endswith((":", ","))]
    missing = [word for word in figures if word not in text.split()]
    assert missing == []


def test_an_80_column_timeline_keeps_whole_states_and_durations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    reasons = [f"BurstBufferResourcesOf{number}" for number in range(len(HISTORY.rows))]
    rows = tuple(msgspec.structs.replace(row, reason=reason) for row, reason in zip(HISTORY.rows, reasons, strict=True))
    show(timeline(msgspec.structs.replace(HISTORY, rows=rows), NOW))
    bars = capsys.readouterr().out.partition("Time in each state")[2]
    assert [reason for reason in reasons[:-1] if f"({reason})" not in bars] == []
    assert "DURATION  SHARE" in bars and "10.00 s" in bars and "█" * 32 in bars


def test_a_long_reason_is_shortened_to_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    show(jobs_table([job(reason="no\nspace " * 50, name="n", pool="p")], NOW))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and len(lines[1]) <= 100 and lines[1].endswith(MARK)


def test_a_very_long_table_is_printed_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn(self: Listing) -> None:
        raise AssertionError("rich takes half a millisecond a row")

    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(Listing, "__rich__", drawn)
    show(jobs_table([job(reason="x" * 500)] * (ROWS_STYLED_MAX + 1), NOW))
    assert len(capsys.readouterr().out.splitlines()) == ROWS_STYLED_MAX + 2


def test_the_spans_of_a_history_cover_it_without_overlap() -> None:
    found = spans(HISTORY.rows)
    assert found[0].start == parse_instant(HISTORY.rows[0].at)
    assert found[-1].until == parse_instant(HISTORY.rows[-1].at)
    assert all(earlier.until == later.start for earlier, later in zip(found, found[1:], strict=False))
    assert spans(HISTORY.rows[:-1])[-1].until is None


@pytest.mark.parametrize(("reachable", "shown"), [(True, "yes (data lost: "), (False, "no (data lost: ")])
def test_a_replica_with_lost_data_is_listed_with_the_replace_command(reachable: bool, shown: str) -> None:
    row = msgspec.structs.replace(LOST, role="rejected", reachable=reachable, forgot=True)
    text = members_table([row]).text()
    assert f"{shown}cluster replace r2)" in text and "rejected" in text

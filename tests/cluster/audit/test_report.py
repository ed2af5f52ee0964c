"""Reports match the ledger of a window, and the page is self-contained."""

import json
import os
import re
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.render import job_words
from forebay.cluster.audit.report import COLUMNS, StateBar, WindowReport, page_of, read_window
from forebay.cluster.audit.report.page import JOBS_DRAWN_MAX, KIND_COLOURS, KINDS, NO_WAIT, drawn_jobs
from forebay.cluster.audit.report.window import BARS_MAX, Window
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.page import BAR_WIDTH_MIN, ChartFrame, number
from forebay.cluster.system import format_instant
from forebay.replica.fold import apply_batch
from forebay.replica.messages import Event, TransferRecorded
from forebay.replica.model import BufferState, JobState, Pool, Stage
from forebay.replica.state import EMPTY, State
from forebay.replica.values import NEVER, Instant
from forebay.replica.views import buffer_word
from forebay.snapshots import inspect
from forebay.wal import EntryKind, Environment, Ledger, decode_batch, kind_of
from tests.cluster.audit.ledgers import make, typed
from tests.golden.archive import unpack

Lived = list[tuple[int, State]]
"""Each time of a batch, and the state after it."""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    unpack(directory)
    return directory / "r1"


@pytest.fixture(scope="module")
def lived(replica: Path) -> Lived:
    state, found = EMPTY, list[tuple[int, State]]()
    with Environment.open_readonly(replica / "wal") as environment:
        for entry in Ledger(environment).read(1, limit=10_000):
            if kind_of(entry.data) is EntryKind.BATCH:
                batch = decode_batch(entry.data)
                state = apply_batch(state, batch) or state
                # The clock was set back at the end of that day; a report keeps the time constant meanwhile.
                found.append((max(int(batch.at), found[-1][0] if found else 0), state))
    return found


@pytest.fixture(scope="module")
def events(replica: Path) -> list[Event]:
    with Environment.open_readonly(replica / "wal") as environment:
        batches = [
            one.data for one in Ledger(environment).read(1, limit=10_000) if kind_of(one.data) is EntryKind.BATCH
        ]
    return [event for data in batches for entry in decode_batch(data).entries for event in entry.events]


def _report(replica: Path, *words: object) -> WindowReport:
    done = typed("audit", "report", "--data", replica, "--json", *words)
    assert done.exit_code == 0, done.output
    return msgspec.json.decode(done.stdout, type=WindowReport)


@pytest.fixture(scope="module")
def whole(replica: Path) -> WindowReport:
    return _report(replica)


def _columns(lived: Lived, report: WindowReport) -> dict[int, list[State]]:
    window = Window(report.source.from_us, report.source.to_us)
    found: dict[int, list[State]] = {}
    for at_us, state in lived:
        found.setdefault(window.column(at_us), []).append(state)
    return found


def test_pool_steps_keep_the_last_and_extreme_values_of_each_column(lived: Lived, whole: WindowReport) -> None:
    window = Window(whole.source.from_us, whole.source.to_us)
    assert {pool.name for pool in whole.pools} == {name for _, state in lived for name in state.pools}
    for pool in whole.pools:
        steps: dict[int, list[tuple[int, int, int, int]]] = {}
        for step in pool.steps:
            steps.setdefault(window.column(step[0]), []).append(step)
        carried = 0
        for column, states in sorted(_columns(lived, whole).items()):
            held = [state.held_bytes.get(pool.name, 0) for state in states]
            seen = [carried, *(step[1] for step in steps.get(column, ()))]
            assert max(seen) >= max(held) and min(seen) <= min(held)
            assert set(seen[1:]) <= set(held)
            assert seen[-1] == held[-1]
            assert len(steps.get(column, ())) <= 4
            carried = seen[-1]


def test_report_capacities_match_the_pool(lived: Lived, whole: WindowReport) -> None:
    last = lived[-1][1]
    for pool in whole.pools:
        known = last.pools.get(pool.name, Pool(pool.name, 0, 1))
        served = max(0, known.quantity_bytes - known.out_of_service_bytes)
        assert pool.steps[-1][1:] == (last.held_bytes.get(pool.name, 0), served, known.quantity_bytes)


def test_job_bars_are_contiguous_and_match_the_states(lived: Lived, whole: WindowReport) -> None:
    assert not whole.jobs_left_out
    by_job = {job.job: job for job in whole.jobs}
    requeued = {
        job
        for (_, one), (_, after) in zip(lived, lived[1:], strict=False)
        for job in one.finished
        if job in after.unfinished
    }
    assert len(by_job) == len(whole.jobs)
    for job in whole.jobs:
        gaps = [before for before, after in zip(job.bars, job.bars[1:], strict=False) if before.to_us != after.from_us]
        assert not gaps or job.job in requeued
        assert all(bar.to_us is not None for bar in job.bars[:-1])
    seen = 0
    assert requeued
    for number_of, (at_us, state) in enumerate(lived):
        is_last_of_its_time = number_of + 1 == len(lived) or lived[number_of + 1][0] != at_us
        if not is_last_of_its_time:
            continue
        for job_id in state.unfinished:
            job = by_job[job_id]
            bar = [bar for bar in job.bars if bar.from_us <= at_us and (bar.to_us is None or bar.to_us > at_us)][-1]
            known = state.jobs[job_id]
            assert (bar.state, bar.attempt) == (known.state.name, known.attempt)
            assert bar.burst_buffer_state == buffer_word(state, job_id)
            seen += 1
    assert seen > 1_000


def test_finished_jobs_have_results_and_others_continue(lived: Lived, whole: WindowReport) -> None:
    last = lived[-1][1]
    for job in whole.jobs:
        assert (job.bars[-1].to_us is None) == (job.job in last.unfinished)
        if job.job in last.finished:
            assert job.result == last.jobs[job.job].state.name


def test_each_sample_counts_all_pending_jobs_of_its_column(lived: Lived, whole: WindowReport) -> None:
    window, columns = Window(whole.source.from_us, whole.source.to_us), _columns(lived, whole)
    assert len(whole.waiting) > 100
    for seen in whole.waiting:
        last = columns[window.column(seen.at_us)][-1]
        pending = sum(last.jobs[job].state.name == "PENDING" for job in last.unfinished)
        assert sum(seen.jobs.values()) == pending
    assert len(whole.waiting) <= COLUMNS


def test_report_commands_and_terms_match_the_ledger(lived: Lived, whole: WindowReport) -> None:
    assert sum(whole.commands) == lived[-1][1].revision - whole.source.first_revision + 1
    assert [term.term for term in whole.terms] == [1, 2]
    assert whole.source.last_revision == lived[-1][1].revision


def test_a_report_from_a_snapshot_equals_a_full_fold(
    replica: Path, lived: Lived, whole: WindowReport, tmp_path: Path
) -> None:
    bare = tmp_path / "r1"
    shutil.copytree(replica / "wal", bare / "wal")
    begun = inspect(next((replica / "snapshots").iterdir()))
    later = format_instant(Instant(begun.at + 1))
    ours, full = _report(replica, "--from", later), _report(bare, "--from", later)
    assert ours == full
    before = max(state.revision for _, state in lived if state.at <= begun.at)
    assert ours.source.first_revision == before + 1
    assert ours.source.last_revision == whole.source.last_revision


def test_a_window_that_ends_early_stops_the_fold(lived: Lived, replica: Path, whole: WindowReport) -> None:
    middle = lived[len(lived) // 2][0]
    with Environment.open_readonly(replica / "wal") as environment:
        report = read_window(Ledger(environment), (), from_us=None, to_us=middle)
    assert report.source.to_us == middle
    expected = next(before for (_, before), (at_us, _) in zip(lived, lived[1:], strict=False) if at_us > middle)
    assert report.source.last_revision == expected.revision
    assert all(bar.from_us <= middle for job in report.jobs for bar in job.bars)


def test_only_named_jobs_are_drawn(replica: Path, whole: WindowReport) -> None:
    chosen = [whole.jobs[3], whole.jobs[40]]
    report = _report(replica, *(f"--job={job.job}" for job in chosen))
    assert list(report.jobs) == chosen
    assert report.pools == whole.pools


def _rows(replica: Path, *words: object) -> list[dict[str, Any]]:
    done = typed("audit", "jobs", "--data", replica, "--json", *words)
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["jobs"]
    return found


def test_every_past_job_is_listed_in_its_last_state(lived: Lived, replica: Path) -> None:
    last = {job: state for _, state in lived for job in state.jobs}
    assert any(job not in lived[-1][1].jobs for job in last)  # some were purged
    rows = _rows(replica)
    assert len(rows) == len(last)
    for row, (job_id, state) in zip(rows, sorted(last.items()), strict=True):
        job = state.jobs[job_id]
        assert row["job"] == (job_words(state, job_id) if job.external_job is None else job.display_name)
        assert (row["state"], row["user"], row["nodes"]) == (job.state.name, job.request.user, job.node)
        assert (row["started_at"], row["ended_at"]) == (format_instant(job.started_at), format_instant(job.ended_at))
        if job.ended_at != NEVER and job.started_at != NEVER:
            assert row["elapsed_s"] == (job.ended_at - job.started_at) // 1_000_000


def test_a_window_lists_the_jobs_present_in_it(lived: Lived, replica: Path) -> None:
    first, end = lived[len(lived) // 3][0], lived[len(lived) // 2][0]
    inside = [state for at_us, state in lived if first <= at_us <= end]
    before = [state for at_us, state in lived if at_us < first][-1]
    there = {
        job
        for state in (before, *inside)
        for job, one in state.jobs.items()
        if not one.ended_at or one.ended_at >= first
    }
    window = ("-S", format_instant(Instant(first)), "-E", format_instant(Instant(end)))
    rows = _rows(replica, *window)
    assert len(rows) == len(there)
    assert {row["job"] for row in rows} == {
        job_words(state, job) if state.jobs[job].external_job is None else state.jobs[job].display_name
        for job in there
        for state in [next(state for state in (*reversed(inside), before) if job in state.jobs)]
    }
    users = {row["user"] for row in rows}
    assert [row for user in sorted(users) for row in _rows(replica, *window, "-u", user)] == sorted(
        rows, key=lambda row: row["user"]
    )
    assert all(row["state"] == "CANCELLED" for row in _rows(replica, *window, "-s", "cancelled"))
    # A row that is wider than the terminal continues on indented lines.
    shown = typed("audit", "jobs", "--data", replica, *window).stdout.splitlines()
    assert len([line for line in shown if not line.startswith("    ")]) == len(rows) + 1
    refused = typed("audit", "jobs", "--data", replica, "-s", "DONE")
    assert refused.exit_code == ExitCode.BAD_INPUT
    assert "use one of PENDING, " in refused.stderr


class _Page(HTMLParser):
    """Parsed page: its rectangles, titles, and external references."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.bars: list[tuple[dict[str, str], str]] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.policy = ""
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        self.attributes |= set(named)
        if tag == "rect":
            self.bars.append((named, ""))
        if named.get("http-equiv") == "Content-Security-Policy":
            self.policy = named["content"]
        self._in_title = tag == "title"

    def handle_data(self, data: str) -> None:
        if self._in_title and self.bars and not self.bars[-1][1]:
            self.bars[-1] = (self.bars[-1][0], data)
        self._in_title = False


def test_each_bar_of_the_page_has_its_position(whole: WindowReport) -> None:
    page, frame = _Page(page_of(whole, "made")), ChartFrame(whole.source.from_us, whole.source.to_us)
    drawn = [bar for bar in page.bars if not bar[1].startswith("term ")]
    jobs = drawn_jobs(whole.jobs)
    assert len(jobs) == JOBS_DRAWN_MAX < len(whole.jobs)
    stays = [(job, bar) for job in jobs for bar in job.bars]
    assert len(drawn) == len(stays)
    for (attributes, title), (job, bar) in zip(drawn, stays, strict=True):
        end_us = whole.source.to_us if bar.to_us is None else bar.to_us
        left, right = frame.x(bar.from_us), frame.x(end_us)
        assert attributes["x"] == number(left)
        assert attributes["width"] == number(max(right - left, BAR_WIDTH_MIN))
        assert attributes["class"] == KINDS[bar.word]
        assert title.startswith(f"{job.called} {job.name}: {bar.word}")


def test_headline_figures_cover_all_jobs(lived: Lived, events: list[Event], whole: WindowReport) -> None:
    last, totals = lived[-1][1], whole.totals
    jobs = {job for _, state in lived for job in state.jobs}
    assert sum(totals.outcomes.values()) == len(jobs) == len(whole.jobs)
    assert totals.outcomes["UNFINISHED"] == len(last.unfinished)
    waits = sorted(job.waited_us for job in whole.jobs)
    assert totals.wait_p50_us == waits[(len(waits) + 1) // 2 - 1] and totals.wait_p95_us in waits
    assert sum(wait <= totals.wait_p95_us for wait in waits) >= 0.95 * len(waits)
    receipts = [event.receipt for event in events if isinstance(event, TransferRecorded)]
    assert receipts and {one.stage for one in receipts} <= {Stage.STAGE_IN, Stage.STAGE_OUT}
    for stage, size_bytes in ((Stage.STAGE_IN, totals.staged_in_bytes), (Stage.STAGE_OUT, totals.staged_out_bytes)):
        assert size_bytes == sum(one.size_bytes for one in receipts if one.stage is stage)
    assert totals.failovers == len(whole.terms) - 1
    for reason, found in totals.reasons.items():
        of_it = [job for job in whole.jobs if job.main_reason == reason]
        assert (found.jobs, found.waited_us) == (len(of_it), sum(job.waited_us for job in of_it))


def test_undrawn_jobs_are_counted_by_reason(whole: WindowReport) -> None:
    text = page_of(whole, "made")
    rest = len(whole.jobs) - JOBS_DRAWN_MAX
    assert f"The other {rest:,} jobs" in text
    table = text.partition("The other")[2].partition("</table>")[0]
    assert sum(map(int, re.findall(r'class="n" data-label="Jobs">(\d+)<', table))) == rest
    assert text.index("Median wait") < text.index("95th percentile") < text.index("<h2>")
    for label in ("Jobs", "Failed jobs", "Data moved", "Failovers", "Unplanned interruptions"):
        assert text.index(f"<span>{label}</span>") < text.index("<h2>")


def test_one_task_of_an_array_is_drawn(whole: WindowReport) -> None:
    tasks = [msgspec.structs.replace(whole.jobs[0], job=n, called=f"7_{n}", waited_us=n) for n in range(1, 9)]
    assert [job.called for job in drawn_jobs(tasks)] == ["7_8"]
    assert tasks[0].main_reason in (NO_WAIT, *tasks[0].bars[0].reasons)


def test_every_bar_state_has_a_colour() -> None:
    words = [None, *(state.word for state in BufferState)]
    for state, word in product(JobState, words):
        assert KINDS[StateBar(state.name, word, 0, 1, 1).word] in KIND_COLOURS


def test_a_report_page_makes_no_requests(whole: WindowReport) -> None:
    text = page_of(whole, "made")
    page = _Page(text)
    assert page.policy.startswith("default-src 'none'")
    assert not page.tags & {"script", "link", "img", "iframe", "object", "embed", "form", "a", "base", "use", "image"}
    assert not page.attributes & {"src", "href", "action", "data", "srcset", "xlink:href"}
    assert not re.search(r"url\(|@import|https?:", text)


def test_user_names_are_escaped_on_the_page(whole: WindowReport) -> None:
    evil = '</title><script>alert(1)</script><img src=x onerror="alert(1)">&amp;'
    job = msgspec.structs.replace(whole.jobs[0], name=evil, user=evil, pool=evil)
    pool = msgspec.structs.replace(whole.pools[0], name=evil)
    report = msgspec.structs.replace(whole, jobs=(job,), pools=(pool,), moved={evil: (1,) * COLUMNS})
    page = _Page(page_of(report, evil))
    assert not page.tags & {"script", "img"}


def test_report_pages_are_deterministic(replica: Path, tmp_path: Path) -> None:
    pages = []
    for seed in ("0", "424242"):
        page = tmp_path / f"page-{seed}.html"
        words = ["audit", "report", "--data", str(replica), "-o", str(page)]
        subprocess.run(
            [*_forebay(), *words],
            check=True,
            capture_output=True,
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": "Asia/Kathmandu"},
        )
        pages.append(page.read_text().replace(page.name, "page.html"))
    assert pages[0] == pages[1]


def _forebay() -> list[str]:
    import sys

    return [sys.executable, "-m", "forebay.cluster.cli"]


def test_an_endlessly_retried_job_does_not_grow_the_page() -> None:
    from forebay.cluster.audit.report.window import _JobTrack

    life = _JobTrack("1", "loop", "ada", "fast", 1)
    for attempt in range(BARS_MAX + 50):
        life.becomes(("PENDING", "staging-in", attempt), attempt * 10)
    seen = life.ended(1, "", (BARS_MAX + 50) * 10)
    assert len(seen.bars) == BARS_MAX and seen.left_out == 50
    assert seen.waited_us == (BARS_MAX + 50) * 10


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([], ExitCode.BAD_INPUT, "give either -o FILE or --json"),
        (["--json", "-o", "x.html"], ExitCode.BAD_INPUT, "give either -o FILE or --json"),
        (["--json", "--from", "yesterday"], ExitCode.BAD_INPUT, "'yesterday' is not a time"),
        (["--json", "--to", "2999-01-01"], ExitCode.BAD_INPUT, "'2999-01-01' is in the future"),
        (["--json", "--from", "2025-01-01"], ExitCode.NOT_FOUND, "the window begins after the end of the ledger"),
        (["--json", "--job", "123456"], ExitCode.NOT_FOUND, "nothing happened to job 123456 in this window"),
        (["-o", "none/x.html"], ExitCode.BAD_INPUT, "none/x.html cannot be written: No such file"),
    ],
)
def test_an_impossible_report_is_an_error(
    replica: Path, words: list[str], code: ExitCode, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = typed("audit", "report", "--data", replica, *words)
    assert done.exit_code == code, done.output
    assert said in done.output + done.stderr


def test_a_failed_write_keeps_the_old_page(tmp_path: Path) -> None:
    make(tmp_path / "r1")
    page = tmp_path / "page.html"
    page.mkdir()
    done = typed("audit", "report", "--data", tmp_path / "r1", "-o", page)
    assert done.exit_code == ExitCode.BAD_INPUT
    assert not list(tmp_path.glob(".page*"))


# ---- in a browser

BAR_PIXELS = (966, 16)
"""Widest and highest bar in a window that is 1300 wide, pixels: the page without its margins and the names of jobs."""

CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: scripts/install-backends --browser")
def test_a_browser_draws_the_bars_at_their_figures_offline(whole: WindowReport, tmp_path: Path) -> None:
    jobs = sorted(whole.jobs, key=lambda job: -max(_share(whole, bar) for bar in job.bars))[:12]
    page = tmp_path / "page.html"
    page.write_text(page_of(msgspec.structs.replace(whole, jobs=tuple(jobs), waiting=(), pools=(), terms=()), "made"))
    picture = tmp_path / "page.png"
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"),
            *("--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1300,1600", f"--screenshot={picture}"),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in done.stderr
    colours = [_rgb(KIND_COLOURS[KINDS[bar.word]]) for job in jobs for bar in job.bars if _share(whole, bar) > 0.05]
    rows = list(_png(picture.read_bytes()))
    # Each bar is a rectangle of one colour, in the scale of the chart's width.
    wide, high = BAR_PIXELS
    for colour in set(colours):
        widest = max(_longest(row, colour) for row in rows)
        expected = max(
            _share(whole, bar) * wide
            for job in jobs
            for bar in job.bars
            if _rgb(KIND_COLOURS[KINDS[bar.word]]) == colour
        )
        assert abs(widest - expected) < 0.12 * expected + 4, (colour, widest, expected)
        assert sum(_longest(row, colour) > widest * 0.9 for row in rows) >= high - 3


def _share(report: WindowReport, bar: Any) -> float:
    end_us = report.source.to_us if bar.to_us is None else bar.to_us
    return float(end_us - bar.from_us) / (report.source.to_us - report.source.from_us)


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _longest(row: list[tuple[int, int, int]], colour: tuple[int, int, int]) -> int:
    best = run = 0
    for pixel in row:
        run = run + 1 if pixel == colour else 0
        best = max(best, run)
    return best


def _png(data: bytes) -> Iterator[list[tuple[int, int, int]]]:
    """Yield the rows of a PNG image with eight bits per colour, decoded by its filters."""
    place, packed, width, depth = 8, b"", 0, 3
    while place < len(data):
        length, kind = int.from_bytes(data[place : place + 4], "big"), data[place + 4 : place + 8]
        body = data[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, depth = int.from_bytes(body[:4], "big"), {2: 3, 6: 4}[body[9]]
            assert body[8] == 8 and body[12] == 0
        elif kind == b"IDAT":
            packed += body
        place += 12 + length
    raw, stride = zlib.decompress(packed), width * depth
    before = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1 : start + 1 + stride])
        for at in range(stride):
            left = row[at - depth] if at >= depth else 0
            above, corner = before[at], before[at - depth] if at >= depth else 0
            match raw[start]:
                case 1:
                    row[at] = (row[at] + left) & 255
                case 2:
                    row[at] = (row[at] + above) & 255
                case 3:
                    row[at] = (row[at] + (left + above) // 2) & 255
                case 4:
                    guess = left + above - corner
                    near = min((left, above, corner), key=lambda one: abs(guess - one))
                    row[at] = (row[at] + near) & 255
        before = row
        yield [(row[at], row[at + 1], row[at + 2]) for at in range(0, stride, depth)]

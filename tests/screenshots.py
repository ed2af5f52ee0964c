"""Pictures of the status page and of reports: `python -m tests.screenshots --into DIRECTORY`.

A replica serves a working day of so many jobs (`tests.working_day`) to Chromium, light and dark, on a desk and on a
phone; the report of a drill is that of its test. `--docs` writes the pictures of docs/images instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from forebay.cluster.audit.report import page_of, read_window
from forebay.cluster.config import Config
from forebay.cluster.config.new_site import Founding, PoolSpec, create_site
from forebay.cluster.drills.report import render_page
from forebay.cluster.schemas.ledger import StoryRow
from forebay.cluster.system import SystemClock
from forebay.wal import Environment, Ledger
from tests.browser import SCREENS, Browser, browser, relayed
from tests.cluster.drills.test_preconditions import drill
from tests.cluster.drills.test_report import DRILL, FIGURES, TERMS
from tests.cluster.harness import Harness, placed
from tests.working_day import CLUSTER, NODES, WorkingDay, write_ledger

PAGES = ("", "/jobs", "/jobs?state=FAILED", "/transfers", "/nodes", "/jobs/17", "/jobs/nothing")

DOCS = Path(__file__).parents[1] / "docs" / "images"
DOCS_BYTES_MAX = 150_000
"""Size of a picture in the documents, bytes."""

DOCS_JOBS = 500
"""Jobs of the day in the documents: they fill the pools now and then."""

HISTORY_S = 600.0
"""Seconds that the replica may take to read its ledger for the charts: a bound against hanging."""

PLOTS = "document.querySelectorAll('#pools .plot').length === 2"
"""Whether the overview shows the history of both pools, which it loads after the rest on a busy machine."""


def site_in(directory: Path) -> Config:
    """Write the configuration and certificates of a replica alone."""
    founding = Founding(
        name=CLUSTER,
        replicas=1,
        agents=NODES,
        pools=(PoolSpec("fast", "96GiB", "64MiB", True), PoolSpec("wide", "768GiB", "64MiB")),
        users=("alice",),
        source_roots=(directory / "in",),
        destination_roots=(directory / "out",),
        allow_root=True,
    )
    return placed(create_site(directory / "site", founding, clock=SystemClock()), directory / "data")


@contextlib.asynccontextmanager
async def serving(directory: Path, jobs: int) -> AsyncIterator[Harness]:
    """Run a replica on the ledger of a day of so many jobs, which ends now; its agents move data."""
    config = site_in(directory)
    clock = SystemClock()
    day = WorkingDay(clock.now(), jobs, cluster_id=config.cluster.id)
    api = str(config.replica("r1").api)
    write_ledger(day, config.wal_directory("r1"), config.cluster.id, "r1", api)
    write_report(config, directory / "report.html")
    async with Harness(config, clock=clock) as harness:
        async with asyncio.timeout(HISTORY_S):
            while not await history_is_read(harness):
                await asyncio.sleep(0.2)
        await report_progress(harness)
        yield harness


async def history_is_read(harness: Harness) -> bool:
    """Return whether the history of pool use has reached the present."""
    use = (await harness.ask("GET", "/v1/history/pools")).body.get("pools", ())
    present = (await harness.ask("GET", "/v1/pools")).body["pools"]
    return {pool["name"]: pool["steps"][-1]["held_bytes"] for pool in use} == {
        pool["name"]: pool["held_bytes"] for pool in present
    }


async def report_progress(harness: Harness) -> None:
    """Have each agent poll once, with how far its transfers are."""
    for number in range(1, NODES + 1):
        node = f"n{number}"
        state = harness.controller.state
        progress = []
        for job in sorted(state.on_node.get(node, ())):
            buffer = state.buffers.get(job)
            if buffer is not None and buffer.state.name in ("STAGING_IN", "STAGING_OUT"):
                total = int(buffer.granted_bytes * 0.8)
                stage = "stage_in" if buffer.state.name == "STAGING_IN" else "stage_out"
                row = {"job": job, "attempt": state.jobs[job].attempt, "stage": stage, "rate_bytes_s": 180e6}
                progress.append({**row, "bytes_done": total * (job % 9 + 1) // 10, "bytes_total": total})
        body = {"instance": "i1", "wait_s": 0, "progress": progress}
        answer = await harness.ask("POST", f"/v1/agents/{node}/poll", body, who=node)
        assert answer.status == 200, answer.body


async def write_pictures(page: Browser, harness: Harness, directory: Path, jobs: int, files: Path) -> None:
    """Write every page and report on every screen."""
    async with relayed(harness.config, "operator", "r1") as url:
        for path in PAGES:
            await report_progress(harness)
            name = path.replace("/", "-").replace("?state=", "-") or "-overview"
            await page.pictures(f"{url}/page{path}", directory, f"{jobs}{name}", SCREENS)
    for report in ("report", "drill"):
        await page.pictures((files / f"{report}.html").as_uri(), directory, f"{jobs}-{report}", SCREENS)


def write_report(config: Config, file: Path) -> None:
    """Write the report of the replica's whole ledger."""
    with Environment.open_readonly(config.wal_directory("r1")) as environment:
        ledger = Ledger(environment)
        report = read_window(ledger, (), from_us=None, to_us=None)
    file.write_text(page_of(report, "forebay audit report html report.html --last 6h"))


def write_drill(file: Path) -> None:
    """Write the report of a drill, with what happened meanwhile and with two earlier drills."""
    earlier = tuple(
        drill(
            number, scenario=DRILL.scenario, target=target, began=f"2026-01-{day}T12:00:00Z",
            figures={"write_stop_us": stop_us, "read_stop_us": 380_000, "target_back_us": 5_900_000, "writes_lost": 0},
        )
        for number, target, day, stop_us in ((7, "r2", 24, 391_200), (4, "r1", 17, 402_700))
    )  # fmt: skip
    story = [
        StoryRow(
            revision=80 + place, at=f"2026-01-31T12:00:{second}Z", actor=actor, command="c", event="e", job_id=job,
            sentence=sentence,
        )
        for place, (second, actor, job, sentence) in enumerate(
            (
                ("00.000000", "operator ann", None, "ann began drill 9: leader-hang of r1"),
                ("01.412000", "agent n2", 41, "staged in: 12 files, 9.6 GiB"),
                ("01.416000", "scheduler", 41, "the script was assigned to n2"),
                ("02.402100", "agent n1", 38, "the script ended: COMPLETED, exit code 0"),
                ("02.403900", "agent n1", 38, "stage-out started"),
                ("06.871500", "user carol", 43, "submitted with 2GiB of pool fast"),
                ("10.000000", "operator ann", None, "drill 9 passed: r1 is back"),
            )
        )
    ]  # fmt: skip
    shown = replace(DRILL, forced=(), figures={**FIGURES, "write_stop_at_us": 12_000})
    file.write_text(render_page(shown, earlier, TERMS, story, "forebay drill show 9 --html drill.html"))


async def write_docs(page: Browser, harness: Harness, files: Path) -> None:
    """Write the pictures of the documents."""
    DOCS.mkdir(exist_ok=True)
    async with relayed(harness.config, "operator", "r1") as url:
        screens: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
            ("page-overview", f"{url}/page", {"width": 1400, "height": 1000}),
            ("page-phone", f"{url}/page", {"width": 390, "height": 844}),
            ("report", (files / "report.html").as_uri(), {"width": 1400, "height": 1000}),
            ("drill-report", (files / "drill.html").as_uri(), {"width": 1400, "height": 800}),
        )
        for name, address, size in screens:
            await report_progress(harness)
            await page.look(**size)
            await page.open(address)
            if address.endswith("/page"):
                await page.until(PLOTS)
            file = DOCS / f"{name}.webp"
            await page.picture(file, first_screen=True)
            assert file.stat().st_size < DOCS_BYTES_MAX, file


async def run(options: Any) -> None:
    for jobs in [DOCS_JOBS] if options.docs else options.jobs:
        with tempfile.TemporaryDirectory(prefix="forebay-pictures-") as place:
            directory = Path(place)
            write_drill(directory / "drill.html")
            async with serving(directory, jobs) as harness, browser(directory / "profile") as page:
                if options.docs:
                    await write_docs(page, harness, directory)
                else:
                    options.into.mkdir(parents=True, exist_ok=True)
                    await write_pictures(page, harness, options.into, jobs, directory)
        print(f"{jobs} jobs: done", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, default=Path("pictures"), help="Directory for the pictures.")
    parser.add_argument("--jobs", type=int, nargs="+", default=[0, 20, 2_000], help="Jobs of the day, one run each.")
    parser.add_argument("--docs", action="store_true", help="Write the pictures of docs/images.")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()

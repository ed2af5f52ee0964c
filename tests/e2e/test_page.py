"""Status page of a real cluster in Chromium: same values as `--json`, keyboard use, small and large screens."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.api.page.labels import format_after, format_moment, format_size, strip_prefix
from forebay.cluster.client import ApiError
from forebay.cluster.schemas import operations as ops
from tests.browser import CHROMIUM, ENTER, SCREENS, TAB, Browser, browser, relayed
from tests.cluster.harness import PATIENCE_S
from tests.faults.local_cluster import USER, LocalCluster

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: scripts/install-backends --browser")

DW = "#DW jobdw capacity={} access_mode=striped type=scratch"
RATE = "64KiB"
"""Rate of a transfer, bytes per second."""

MOVED_BYTES = 128 * 2**20
"""Size of the staged file: the transfer takes 34 minutes, so that the page always shows it in progress."""

STARTS_S = 180.0
"""Time limit for preparing the cluster, seconds: it detects a hang."""

PAGES = ("", "/jobs", "/jobs/1", "/transfers", "/nodes")
WALL = {"wall": {"width": 3840, "height": 2160}}

CELLS = """(id) => [...document.querySelectorAll(`#${id} tbody tr`)].map(
  row => [...row.children].map(cell => cell.innerText.trim().replace(/\\s+/g, " ")))"""

FOCUS = """(() => {
  const one = document.activeElement, style = getComputedStyle(one);
  return [one.tagName, one.getAttribute("href") || one.getAttribute("aria-label") || "", style.outlineStyle !== "none"];
})()"""

NEEDS = "[...document.querySelectorAll('#needs li')].map((one) => one.innerText)"

REACHABLE = """[...document.querySelectorAll("a[href], [tabindex='0'], summary, button, input")]
  .filter((one) => one.getClientRects().length).length"""


def submit(cluster: LocalCluster, name: str, *lines: str) -> int:
    script = cluster.work / name
    script.write_text("\n".join(("#!/bin/sh", *lines, "")))
    words = ["submit", "--json", "--chdir", str(cluster.work), "--job-name", name, str(script)]
    done = subprocess.run(cluster.command(*words, identity=USER), capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout)["job_id"])


def said(cluster: LocalCluster, *words: str) -> Any:
    return json.loads(cluster.forebay("--identity", "operator", *words, "--json"))


def test_the_page_matches_the_command_line_and_is_accessible(tmp_path: Path) -> None:
    cluster = LocalCluster(tmp_path / "c")
    cluster.found({"fast": "256MiB/1MiB,default", "wide": "1GiB/16MiB"}, RATE)
    cluster.start_all()
    try:
        asyncio.run(story(cluster, tmp_path))
        assert not cluster.ended()
    finally:
        cluster.stop_all()


async def story(cluster: LocalCluster, directory: Path) -> None:
    assert cluster.config is not None
    failed, moved = await busy(cluster)
    async with browser(directory / "profile") as page:
        leader = await leader_of(cluster)
        while True:
            # A machine that does other things as well may elect another one meanwhile.
            try:
                async with relayed(cluster.config, "operator", leader) as url:
                    await as_led(cluster, page, url, directory, failed, moved)
                break
            except AssertionError:
                before, leader = leader, await leader_of(cluster)
                if leader == before:
                    raise
        await is_opened_by_a_command(cluster, page)
        other = next(name for name in ("r1", "r2", "r3") if name != leader)
        # Chromium itself would go where a follower sends it, and have no certificate there.
        async with relayed(cluster.config, USER, other) as url:
            async with asyncio.timeout(PATIENCE_S):
                # A replica that is too busy to answer in time shows an error instead.
                await page.open(f"{url}/page?stale=ok")
                while not await page.run("document.getElementById('as-of') !== null"):
                    await page.open(f"{url}/page?stale=ok")
            assert f"From {other} (follower; leader:" in await page.run("document.getElementById('as-of').innerText")
            assert "may be out of date" in await page.run("document.getElementById('banner').innerText")
            await says_that_its_replica_has_gone(cluster, page, url, other)


async def is_opened_by_a_command(cluster: LocalCluster, page: Browser) -> None:
    """Open the link that `forebay page` prints, whichever replica leads, and end the command with Ctrl-C."""
    command = cluster.command("page", "--no-browser", identity=USER)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        link = (await process.stdout.readline()).decode().strip()
        await page.open(link)
        await page.until("document.getElementById('live').textContent.startsWith('Live from')")
        assert await page.run("location.pathname") == "/page"
        # The other replicas' pages want a certificate, which this browser has not.
        assert await page.run("document.querySelectorAll('#replicas a[href]').length") == 0
        await page.open(link.rpartition("/")[0] + "/page/jobs?state=PENDING")
        place = await page.until("document.querySelector('.place')?.innerText")
        assert place.startswith("1–") and "arrays collapsed" in place
        await page.run("document.querySelector('input[name=name]').value = 'WAIT'")
        await page.run("document.querySelector('form button').click()")
        await page.until(
            "new URLSearchParams(location.search).get('name') === 'WAIT' && document.querySelector('.place') !== null"
        )
        assert await page.run(f"({CELLS})('queue').map(row => row[1])") == ["waits"]
    finally:
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 0


async def leader_of(cluster: LocalCluster) -> str:
    async with cluster.client() as client:
        leader = (await client.call(ops.LIST_MEMBERS)).leader
    assert leader is not None
    return leader


async def as_led(cluster: LocalCluster, page: Browser, url: str, directory: Path, failed: int, moved: int) -> None:
    """Open the page of the leader."""
    page.said.clear()
    page.asked.clear()
    await page.look(width=1300, height=900)
    await page.scripts(run=False)
    await page.open(f"{url}/page")
    await says_what_the_commands_say(cluster, page, failed, moved)
    await page.open(f"{url}/page/jobs/{failed}")
    await tells_of_a_job(cluster, page, failed)
    await page.scripts(run=True)
    await looks_right(page, url, directory)
    await can_be_walked_through(page, url)
    await is_kept_up_to_date(cluster, page, url)
    assert not page.said
    assert all(one.startswith((url, "about:")) for one in page.asked)


async def busy(cluster: LocalCluster) -> tuple[int, int]:
    """Prepare objects of every kind; return the job with unexported results, and the job in stage-in."""
    async with cluster.client() as client:
        async with asyncio.timeout(STARTS_S):
            while sum(node.state == "UP" for node in (await _nodes(client))) < 2:
                await asyncio.sleep(0.1)
        await asyncio.to_thread(cluster.forebay, "config", "set", "StageRetries=0")
        (cluster.work / "input").mkdir(exist_ok=True)
        (cluster.work / "input" / "big").write_bytes(b"x" * MOVED_BYTES)
        (cluster.work / "blocked").write_text("a file, where a directory would have to be")
        out = f"#DW stage_out type=file source=$DW_JOB_STRIPED/r destination={cluster.work}/blocked/r"
        failed = submit(cluster, "results", DW.format("8MiB"), out, "echo r > $DW_JOB_STRIPED/r")
        into = f"#DW stage_in type=file source={cluster.work}/input/big destination=$DW_JOB_STRIPED/big"
        moved = submit(cluster, "mover", DW.format("144MiB"), into, "true")
        submit(cluster, "waits", "#SBATCH --array=0-11", DW.format("128MiB"), "true")
        async with asyncio.timeout(STARTS_S):
            while True:
                overview = await client.call(ops.SHOW_OVERVIEW)
                moving = overview.transfers.rate_bytes_s > 0
                use = (await client.call(ops.LIST_POOL_USE)).pools
                if moving and any(one.job_id == failed for one in overview.needs) and use:
                    return failed, moved
                await asyncio.sleep(0.1)


async def _nodes(client: Any) -> Any:
    try:
        return (await client.call(ops.LIST_NODES)).nodes
    except ApiError:
        return ()


def called(job: Any) -> str:
    details = job["details"] or {}
    array = details.get("array_job_id")
    return str(job["job_id"]) if array is None else f"{array}_{details['array_task_id']}"


async def says_what_the_commands_say(cluster: LocalCluster, page: Browser, failed: int, moved: int) -> None:
    text = await page.run("document.body.innerText")
    words = cluster.command("status", "--json")
    status = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, check=False)
    assert status.returncode == 1, "something needs attention"
    overview = json.loads(status.stdout)
    replicas = await page.run(f"({CELLS})('replicas')")
    members = overview["members"]
    assert [row[0] for row in replicas] == [member["name"] for member in members]
    for row, member in zip(replicas, members, strict=True):
        assert row[1].endswith(member["role"]) and row[2].replace(",", "").isdigit()
        # Changing values are only checked for their form.
        assert row[4].endswith(" s") and row[5].endswith(" GiB") and row[6].endswith("% full")
        assert row[7].endswith((" ms", "–")) and row[8].endswith(" days")
    for pool in said(cluster, "pool", "list")["pools"]:
        assert f"{format_size(pool['held_bytes'])} of {format_size(pool['quantity_bytes'])} used" in text
    # The page requests them separately, after the overview.
    await page.until("document.querySelectorAll('#pools svg.strip').length > 0")
    strips = await page.run(
        "[...document.querySelectorAll('#pools svg.strip')].map(one => one.getAttribute('aria-label'))"
    )
    assert [one.split(":")[0] for one in strips] == ["Pool fast", "Pool wide"]
    held = await page.run(
        "document.querySelectorAll('#pools svg.strip')[0].querySelector('.held').getBoundingClientRect().width"
    )
    assert held > 100
    queue = await page.run(f"({CELLS})('queue')")
    jobs = {called(job): job for job in said(cluster, "queue", "--start", "--limit", "100")["jobs"]}
    array = [job for job in jobs.values() if job["name"] == "waits"]
    for row in queue:
        first = row[0].partition(" ")[0]
        job = array[0] if "[" in first else jobs[first]
        assert (row[1], row[2]) == (job["name"], job["user"]) and strip_prefix(job["reason"]) in row[3]
    assert [row[0] for row in queue if "[" in row[0]] == [f"{called(array[0]).partition('_')[0]}_[0-11] 12 tasks"]
    expected = "[...document.querySelectorAll('#queue tbody tr:last-child time')].map(one => one.title)"
    assert (await page.run(expected))[0][:13] == format_moment(array[0]["expected_start"])[:13]
    waiting = " ".join((await page.run("document.querySelector('#queue p').innerText")).split())
    assert all(f"{reason}: {count}" in waiting for reason, count in overview["waiting"].items())
    transfers = {row[0]: row for row in await page.run(f"({CELLS})('transfers')")}
    for transfer in said(cluster, "transfer", "list")["transfers"]:
        # Each failure is shown once, as an item that needs attention.
        assert (transfer["state"] == "failed") == (str(transfer["job_id"]) not in transfers)
        if transfer["state"] != "failed":
            row = transfers[str(transfer["job_id"])]
            assert row[1] == transfer["stage"].replace("_", " ") and row[6] == transfer["user"]
            assert transfer["state"] in row[2]
    assert transfers[str(moved)][4].endswith("B/s") and f"of {format_size(MOVED_BYTES)}" in transfers[str(moved)][3]
    needs = await page.run(
        "[...document.querySelectorAll('#needs li')].map(one => one.innerText.replace(/\\s+/g, ' '))"
    )
    assert len(needs) == overview["needs_count"] == 1
    (need,) = overview["needs"]
    assert need["job_id"] == failed and need["kind"] == "not_exported"
    assert all(one in needs[0] for one in (need["subject"], "not exported", need["remedy"]))
    assert strip_prefix(need["sentence"]).lower() in needs[0].lower()
    assert "Reload for the latest." in text


async def tells_of_a_job(cluster: LocalCluster, page: Browser, job: int) -> None:
    rows = said(cluster, "job", "history", str(job))["rows"]
    cells = await page.run(f"({CELLS})('timeline')")
    assert [row[1] for row in cells] == [" ".join(row["sentence"].split()) for row in rows]
    assert [row[0] for row in cells] == [format_after(row["at"], rows[0]["at"]) for row in rows]
    times = await page.run("[...document.querySelectorAll('#timeline tbody time')].map(one => one.title)")
    assert times == [f"{format_moment(row['at'])} UTC" for row in rows]
    kinds = await page.run("[...document.querySelectorAll('#timeline rect')].map(one => one.getAttribute('class'))")
    assert kinds[-1] == "failed"
    facts = await page.run("document.getElementById('job').innerText")
    shown = said(cluster, "job", "show", str(job))
    assert all(one in facts for one in (shown["name"], shown["user"], shown["node"], strip_prefix(shown["reason"])))


async def looks_right(page: Browser, url: str, directory: Path) -> None:
    """Every page passes the checks of `Browser.pictures`; and pictures are left for a person to look at."""
    for path in PAGES:
        # The others are tables, as are parts of these two.
        screens = {**SCREENS, **WALL} if path in ("", "/jobs/1") else SCREENS
        await page.pictures(f"{url}/page{path}", directory, f"page{path.replace('/', '-')}", screens)


async def can_be_walked_through(page: Browser, url: str) -> None:
    await page.look(width=1300, height=900)
    await page.open(f"{url}/page")
    reachable = await page.run(REACHABLE)
    stops: list[Any] = []
    # A table that is drawn anew while the keys are pressed may take the focus back.
    regions = {"Pending jobs", "Transfers", "Replicas"}
    while len(stops) < reachable or (not regions <= {stop[1] for stop in stops} and len(stops) < 3 * reachable):
        await page.press(TAB)
        stops.append(await page.run(FOCUS))
    assert all(is_visible for *_, is_visible in stops[:reachable]), stops
    assert stops[0][:2] == ["A", "#main"] and [stop[1] for stop in stops[2:6]] == [
        "/page", "/page/jobs", "/page/transfers", "/page/nodes",
    ]  # fmt: skip
    assert regions <= {stop[1] for stop in stops}
    await page.open(f"{url}/page")
    await page.press(TAB)
    await page.press(ENTER)
    assert await page.run("document.activeElement.id") == "main"
    levels = await page.run("[...document.querySelectorAll('h1, h2, h3')].map(one => Number(one.tagName[1]))")
    assert levels[0] == 1 and all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))


async def is_kept_up_to_date(cluster: LocalCluster, page: Browser, url: str) -> None:
    await page.open(f"{url}/page")
    await page.until("document.getElementById('live').textContent.startsWith('Live from')")
    await page.run("document.querySelector('#queue a').focus()")
    before = await page.run("document.activeElement.getAttribute('href')")
    held = submit(cluster, "held", DW.format("128MiB"), "true")
    await asyncio.to_thread(cluster.forebay, "job", "hold", str(held))
    await page.until("document.querySelector('#queue p').innerText.includes('JobHeld')")
    assert await page.run("document.activeElement.getAttribute('href')") == before


async def says_that_its_replica_has_gone(cluster: LocalCluster, page: Browser, url: str, replica: str) -> None:
    await page.until("document.getElementById('live').textContent.startsWith('Live from')")
    cluster.kill(replica)
    await page.until("document.getElementById('live').classList.contains('lost')")
    assert await page.run("document.querySelectorAll('#replicas tbody th').length") == 3

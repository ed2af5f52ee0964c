"""The page shows what the API says to whoever looks, changes nothing, and takes every text for a text."""

from __future__ import annotations

import asyncio
import itertools
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from forebay.cluster.api.history_service.capacity import POINTS_MAX, STEP_US_MAX, Capacity
from forebay.cluster.api.history_service.frames import PoolUseQuery
from forebay.cluster.api.page.labels import (
    POLICY,
    format_after,
    format_ago,
    format_moment,
    format_size,
    format_span,
    group_needs,
    pool_chart,
    strip_prefix,
)
from forebay.cluster.api.page.pages import _PAGES, Pages, RenderedPage
from forebay.cluster.api.statuses import FIRST_WAIT_S, FRESH_S, Statuses
from forebay.cluster.api.watch.attention import _of_job
from forebay.cluster.api.watch.live import replicas_of
from forebay.cluster.api.web import Problem, bad_request
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import (
    ErrorView,
    MemberView,
    NeedView,
    PoolStepView,
    PoolUseAnswer,
    PoolUseView,
    StatusView,
)
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.cluster.system import parse_instant
from forebay.cluster.system.eventloop.slices import Slices
from forebay.replica.model import Buffer, BufferState, Job, JobState, Pool
from forebay.replica.model.requests import JobRequest
from forebay.replica.state import EMPTY, State
from forebay.replica.values import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import PATIENCE_S, PLAIN, Harness, story

PAGES = ("/page", "/page/jobs", "/page/jobs/1", "/page/transfers", "/page/nodes")


@story
async def test_how_far_others_have_come_is_never_an_older_word_of_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    status = StatusView(
        cluster="demo", cluster_id="c", replica="r1", role="leader", term=1, leader="r1", ready=True,
        commit_index=20, applied_index=20, last_index=20, revision=19, room_bytes=7,
    )  # fmt: skip
    old = msgspec.structs.replace(status, replica="r2", commit_index=5, applied_index=5, revision=4)
    r1 = MemberView(name="r1", peer="h:1", api="h:2", role="leader", reachable=True, commit_index=20, lag_entries=0)
    r2 = MemberView(name="r2", peer="h:3", api="h:4", role="follower", reachable=True, lag_entries=0)
    monkeypatch.setattr("forebay.cluster.api.watch.live.members_of", lambda *_: (r1, r2))
    monkeypatch.setattr("forebay.cluster.api.watch.live.status_of", lambda _: status)

    async def of(_: list[str]) -> dict[str, StatusView]:
        return {"r2": old}

    call: Any = SimpleNamespace(service=SimpleNamespace(statuses=SimpleNamespace(of=of), live=None))
    _, (_, found) = await replicas_of(call, EMPTY)
    assert (found.lag_entries, found.commit_index, found.applied_index, found.revision) == (0, None, None, None)
    assert found.room_bytes == 7


class Read(HTMLParser):
    """A page as a browser reads it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(" ".join(data.split()))

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.tags if name == tag]


async def some_jobs(harness: Harness) -> None:
    """Have a node, and more jobs than it has room for."""
    agent = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 2}
    await harness.ask("POST", "/v1/agents/n1/register", agent, who="n1")
    for n in range(8):
        assert (await harness.submit(name=f"job-{n}")).status == 201
    assert (
        await harness.submit(who="bob", script=PLAIN, hold=True, comment="s3cret", output="s3cret.%j")
    ).status == 201


async def read(harness: Harness, path: str, who: str = "operator") -> Read:
    answer = await harness.ask("GET", path, who=who)
    assert answer.status == 200, (path, answer.body)
    return Read(answer.body.decode())


@story
async def test_pages_are_for_people_and_nothing_but_shown(config: Config) -> None:
    async with Harness(config) as harness:
        await some_jobs(harness)
        before = harness.controller.state
        for path, who in itertools.product(PAGES, ("operator", "alice", "n1", "slurm", "auditor", "dora", "r1")):
            answer = await harness.ask("GET", path, who=who)
            assert answer.status == (200 if who in ("operator", "alice") else 403), (path, who)
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
            assert answer.headers["Content-Security-Policy"] == POLICY
            assert answer.headers["Cross-Origin-Resource-Policy"] == "same-origin"
            if who not in ("operator", "alice"):
                assert b"job-" not in answer.body and b"fast" not in answer.body
        for path, method in itertools.product((*PAGES, "/"), ("POST", "PUT", "DELETE")):
            assert (await harness.ask(method, path, data=b"x=1")).status == 405
        # A slow machine may have taken the node for lost meanwhile.
        assert (harness.controller.state.next_job, harness.controller.state.pools) == (before.next_job, before.pools)
        there = await harness.ask("GET", "/")
        assert (there.status, there.headers["Location"]) == (303, "/page")
        for path in ("/page/nothing", "/page/jobs/99", "/page/jobs?after=x", "/page/jobs?what=x", "/page/jobs/%3Cb%3E"):
            answer = await harness.ask("GET", path)
            assert (
                answer.status in (400, 404)
                and b"This page cannot be shown" in answer.body
                and b"<b>" not in answer.body
            )


@story
async def test_whatever_page_is_open_in_a_browser_can_have_nothing_changed_by_its_certificate(config: Config) -> None:
    async with Harness(config) as harness:
        body = msgspec.json.encode(harness.job())
        for header in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
            # Without a Content-Type a browser sends it wherever it likes, and asks nobody first.
            for kind in ({}, {"Content-Type": "application/octet-stream"}):
                answer = await harness.ask("POST", "/v1/jobs", data=body, headers={**header, **kind}, who="alice")
                assert (answer.status, answer.code) == (403, "from_a_browser")
        assert not harness.controller.state.jobs
        for site in ("same-origin", "none"):
            assert (await harness.ask("GET", "/v1/jobs", headers={"Sec-Fetch-Site": site})).status == 200


@story
async def test_a_page_of_another_site_has_nothing_read_by_a_browsers_certificate(config: Config) -> None:
    link = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    frame = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
    async with Harness(config) as harness:
        for site, how in itertools.product(("cross-site", "same-site", "no-such"), (link, frame, {})):
            headers = {"Sec-Fetch-Site": site, **how}
            for path in ("/v1/jobs", "/v1/jobs?stale=ok", "/metrics", "/healthz", *PAGES):
                answer = await harness.ask("GET", path, headers=headers, who="operator")
                if path in PAGES and how is link:
                    # There is no job yet, and whoever follows the link is told so.
                    assert answer.status in (200, 404) and b"of another site" not in answer.body, (path, headers)
                else:
                    assert answer.status == 403, (path, headers)
                    assert b"of another site" in answer.body if path in PAGES else answer.code == "from_a_browser"
        # A reverse proxy, a program or an old browser sends none of them.
        assert (await harness.ask("GET", "/v1/jobs")).status == 200


@story
async def test_a_page_loads_nothing_but_its_own_files_and_has_nothing_written_into_it(config: Config) -> None:
    async with Harness(config) as harness:
        await some_jobs(harness)
        for path in PAGES:
            found = await read(harness, path)
            assert [one["src"] for one in found.all("script")] == ["/page/page.js"]
            assert [one["href"] for one in found.all("link")] == ["/page/icon.svg", "/page/page.css"]
            assert not {tag for tag, _ in found.tags} & {"style", "img", "iframe", "object", "embed", "base"}
            # A form only asks for another page of the same kind.
            forms = [(one["method"], one["action"]) for one in found.all("form")]
            assert forms == ([("get", "/page/jobs")] if path == "/page/jobs" else [])
            marked = [one["href"] for one in found.all("a") if "aria-current" in one]
            assert marked[0] == ("/page/jobs" if path == "/page/jobs/1" else path)
            names = {name for _, attributes in found.tags for name in attributes}
            assert not any(name.startswith("on") or name == "style" for name in names)
            targets = [one["href"] for one in found.all("a")]
            assert all(one.startswith(("/page", "#", harness.url)) for one in targets)
            # What a person hears of it: one heading of the first level, tables with scopes, regions that are named.
            assert len(found.all("h1")) == 1 and found.all("main") and found.all("nav")
            assert all(one.get("scope") in ("col", "row") for one in found.all("th"))
            assert all(one.get("aria-label") for one in found.all("nav") if one) or not found.all("nav")
            assert all(
                "tabindex" in one and one["aria-label"] for one in found.all("div") if one.get("role") == "region"
            )
        for name in ("page.css", "page.js", "icon.svg"):
            answer = await harness.ask("GET", f"/page/{name}")
            assert answer.status == 200 and b"http:" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")


NOON = parse_instant("2026-01-31T12:00:00Z")

EVIL = "\"'><evil onevil=1></table></section><script>evil()</script>{{ 7 * 7 }}&lt;"


def evil(value: Any) -> Any:
    """Return an answer of which everything that is a text, and no time, is hostile; also what names things."""
    if isinstance(value, str):
        try:
            parse_instant(value)
        except ValueError:
            return EVIL
        return value
    if isinstance(value, tuple | list):
        return type(value)(map(evil, value))
    if isinstance(value, dict):
        return {evil(key): evil(one) for key, one in value.items()}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **{name: evil(getattr(value, name)) for name in value.__struct_fields__})
    return value


@story
async def test_every_text_of_every_answer_is_a_text_whatever_it_holds(config: Config) -> None:
    async with Harness(config) as harness:
        await some_jobs(harness)
        async with asyncio.timeout(PATIENCE_S):
            while not (await harness.ask("GET", "/v1/history/pools")).body.get("pools"):
                await asyncio.sleep(0.05)
        pages, work = Pages(), Slices().work("test")
        for path, page in _PAGES.items():
            params = {"id": "1"} if len(path) == 2 else {}
            answers = {}

            async def ask(operation: Any, params: dict[str, str], query: dict[str, str], answers: Any = answers) -> Any:
                target = OPERATIONS[operation.name].target({**params, **query})
                answer = await harness.ask("GET", target)
                if answer.status != 200:
                    assert EVIL in query.values(), answer.body
                    raise bad_request(answer.sentence, answer.remedy, answer.place)
                return evil(msgspec.convert(answer.body, operation.answer))

            found = type("Found", (), {"page": page, "params": params})()
            for query in ({}, {name: EVIL for name in page.query if name != "after"}):
                try:
                    shown = await pages.page(found, dict(query), list(query), ask, work)
                except Problem as problem:
                    shown = RenderedPage(await pages.problem(problem, "/page", work), "", 0)
                text = Read(shown.content.decode())
                assert not {tag for tag, _ in text.tags} & {"evil"}
                assert len(text.all("script")) <= 1
                assert not any("onevil" in attributes for _, attributes in text.tags)
                assert len(text.all("section")) == shown.content.count(b"</section>")
                assert "49" not in " ".join(text.texts).replace(EVIL, "").split()
        view = ErrorView(code=EVIL, sentence=EVIL, remedy=EVIL)
        said = await pages.problem(Problem(400, view.code, view.sentence, view.remedy), "/page/jobs/x", work)
        assert b"<evil" not in said and b"evil onevil" in said


@story
async def test_a_page_is_what_the_api_says_to_him_who_looks_where_data_is_private(config: Config) -> None:
    async with Harness(config) as harness:
        settings = [{"key": "Flags", "value": "PrivateData"}]
        body = {"command_id": harness.new_id(), "settings": settings, "partial": True}
        assert (await harness.ask("POST", "/v1/configuration", body)).status == 200
        await some_jobs(harness)
        await harness.submit(who="bob", comment="s3cret", workdir=str(config.file.parent / "out" / "s3cret"))
        last = harness.controller.state.next_job - 1
        own = await harness.ask("GET", f"/page/jobs/{last}", who="bob")
        other = await harness.ask("GET", f"/page/jobs/{last}", who="alice")
        assert b"16 MiB" in own.body and b"16 MiB" not in other.body
        assert b"is private to its user" in other.body
        for path in (*PAGES, f"/page/jobs/{last}"):
            assert b"s3cret" not in (await harness.ask("GET", path, who="alice")).body


@story
async def test_lists_are_paged_and_counts_are_of_all(config: Config) -> None:
    async with Harness(config) as harness:
        await some_jobs(harness)
        overview = (await harness.ask("GET", "/v1/overview")).body
        jobs = (await harness.ask("GET", "/v1/jobs")).body["jobs"]
        states = [job["state"] for job in jobs]
        assert overview["jobs"] == {state: states.count(state) for state in overview["jobs"]}
        assert sum(overview["jobs"].values()) == len(jobs)
        reasons = [job["reason"] for job in jobs if job["state"] == "PENDING"]
        assert overview["waiting"] == {reason: reasons.count(reason) for reason in set(reasons)}
        assert overview["nodes"] == {"UP": 1}
        assert overview["members"][0]["certificate_until"] > "2026"
        assert overview["members"][0]["room_bytes"] > 0
        expected = (await harness.ask("GET", "/v1/jobs?state=PENDING&after=0&limit=3&expected=yes")).body
        assert expected["truncated"] and len(expected["jobs"]) == 3
        for job in expected["jobs"]:
            alone = (await harness.ask("GET", f"/v1/jobs/{job['job_id']}")).body
            assert (job["expected_start"] is None) == (alone["expected_start"] is None)
            assert job["expected_after"] == alone["expected_after"]
        assert (await harness.ask("GET", "/v1/jobs?expected=yes&limit=101")).status == 400
        assert (await harness.ask("GET", "/v1/nodes?state=DOWN")).body["nodes"] == []
        assert (await harness.ask("GET", "/v1/nodes?after=n1")).body["nodes"] == []
        assert (await harness.ask("GET", "/v1/nodes?state=ASLEEP")).status == 400
        rows = (await harness.ask("GET", "/v1/jobs/1/history")).body["rows"]
        last = (await harness.ask("GET", "/v1/jobs/1/history?last=1")).body
        assert (last["rows"], last["left_out"]) == (rows[-1:], len(rows) - 1)


@story
async def test_a_page_of_jobs_says_where_it_stands_among_all_that_match(config: Config) -> None:
    async with Harness(config) as harness:
        await some_jobs(harness)
        array = await harness.submit(name="Array", array="0-3,7", hold=True)
        first = array.body["job_id"]

        async def asked(query: str, who: str = "alice") -> dict[str, Any]:
            answer = await harness.ask("GET", f"/v1/jobs?{query}", who=who)
            assert answer.status == 200, answer.body
            return dict(answer.body)

        plain = await asked("after=4&limit=3")
        assert (plain["matching"], plain["matching_jobs"], plain["skipped"]) == (14, 14, 4)
        assert [job["job_id"] for job in plain["jobs"]] == [5, 6, 7] and plain["collapsed"] == {}
        newest = await asked("before=5&limit=3")
        assert (newest["skipped"], newest["truncated"]) == (10, True)
        assert [job["job_id"] for job in newest["jobs"]] == [4, 3, 2]
        last = await asked("limit=3")
        assert (last["skipped"], [job["job_id"] for job in last["jobs"]]) == (11, [12, 13, 14])
        assert (await harness.ask("GET", "/v1/jobs?after=1&before=9")).status == 400

        together = await asked("after=0&collapse=yes&name=ARR&state=PENDING")
        assert (together["matching"], together["matching_jobs"]) == (1, 5)
        assert [job["job_id"] for job in together["jobs"]] == [first]
        row = together["collapsed"][str(first)]
        assert (row["reference"], row["count"]) == (f"{first}_[0-3,7]", 5)
        assert row["reasons"] == {"JobHeldUser": 5}
        assert (await asked("name=array&user=bob"))["matching"] == 0
        alone = await asked("after=0&collapse=yes&name=job-3")
        assert (alone["matching"], alone["collapsed"]) == (1, {})
        nodes = await asked("limit=1")
        assert nodes["truncated"]
        found = (await harness.ask("GET", "/v1/nodes?after=n0&limit=1")).body
        assert (found["matching"], found["skipped"], found["truncated"]) == (1, 0, False)
        assert (await harness.ask("GET", "/v1/nodes?after=n1")).body["skipped"] == 1


@pytest.mark.parametrize(
    ("state", "stuck", "kind"),
    [
        (BufferState.STAGING_OUT, True, "not_exported"),
        (BufferState.POST_RUN, True, "not_exported"),
        (BufferState.TEARDOWN_FAIL, True, "teardown_failed"),
        (BufferState.TEARDOWN_FAIL, False, "teardown_failed"),
        (BufferState.STAGING_IN, True, "operation_failed"),
        (BufferState.TEARDOWN, True, "operation_failed"),
        (BufferState.STAGING_OUT, False, None),
        (BufferState.RUNNING, False, None),
        (BufferState.COMPLETE, False, None),
    ],
)
def test_a_job_needs_somebody_where_nothing_goes_on_by_itself(
    state: BufferState, stuck: bool, kind: str | None
) -> None:
    request = JobRequest("j", "u", "", "/", 1)
    job = Job(1, request, JobState.STAGE_OUT, message="said", stuck=stuck)
    found = _of_job(job, Buffer(1, state, "fast", 1))
    assert (found and found[0]) == kind
    assert found is None or (found[1] == "said" and "forebay" in found[2])


def test_items_of_one_cause_are_one_problem_and_others_are_their_own() -> None:
    def need(job: int | None, sentence: str, user: str = "ann", subject: str = "") -> NeedView:
        kind: Any = "not_exported" if job else "node_down"
        return NeedView(kind=kind, subject=subject or f"job {job}", job_id=job, user=user, sentence=sentence)

    rows = [need(1, "full"), need(None, "down", "", "node a"), need(2, "full"), need(None, "down", "", "node b")]
    groups = group_needs([*rows, need(3, "full", "bob"), need(4, "gone")])
    assert [[one.subject for one in group.members] for group in groups] == [
        ["job 1", "job 2"], ["node a"], ["node b"], ["job 3"], ["job 4"],
    ]  # fmt: skip


class _Levels:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()

    async def ask(self, name: str) -> StatusView:
        self.asked.append(name)
        await self.gate.wait()
        return StatusView(
            cluster="c", cluster_id="i", replica=name, role="follower", term=1, leader="r1", ready=True,
            commit_index=1, applied_index=1, last_index=1, revision=1,
        )  # fmt: skip


@story
async def test_a_replica_that_hangs_is_not_waited_for_and_one_that_answers_is_asked_seldom(config: Config) -> None:
    clock, levels = ManualClock(), _Levels()
    controller: Any = type("Controller", (), {"clock": clock, "levels": levels})()
    statuses, loop = Statuses(controller), asyncio.get_running_loop()
    began_s = loop.time()
    assert await statuses.of(["r2"]) == {}
    assert loop.time() - began_s < 50 * FIRST_WAIT_S
    assert await statuses.of(["r2"]) == {}
    assert levels.asked == ["r2"]
    levels.gate.set()
    assert (await statuses.of(["r2"]))["r2"].replica == "r2"
    await statuses.of(["r2"])
    assert levels.asked == ["r2"]
    clock.advance(FRESH_S)
    assert "r2" in await statuses.of(["r2"])
    await asyncio.sleep(0)  # its turn
    assert levels.asked == ["r2", "r2"]
    statuses.stop()


def test_how_full_a_pool_was_is_what_each_step_ended_with_and_is_bounded() -> None:
    capacity, truth, at = Capacity(), list[tuple[int, int]](), 1_700_000_000_000_000
    pools = State().pools.set("fast", Pool("fast", 100, 1))
    for n in range(5_000):
        at += 1_000_000 * (1 + n % 7) * (1 if n < 3_000 else 60)
        held = n * 37 % 101
        capacity.note(State(revision=n, at=Instant(at), pools=pools, held_bytes=State().held_bytes.set("fast", held)))
        truth.append((at, held))
        if n % 500:
            continue
        told = capacity.answer(PoolUseQuery(1))
        (pool,) = told.pools
        assert len(pool.steps) <= POINTS_MAX and told.until == at
        assert pool.steps[-1][1] == held
        step_us = told.step_s * 1e6
        for since, value, served, quantity in pool.steps:
            assert (served, quantity) == (100, 100)
            in_step = [one for moment_us, one in truth if moment_us // step_us == since // step_us]
            assert value == in_step[-1]
    assert told.until - told.since <= 2 * POINTS_MAX * STEP_US_MAX
    assert capacity.answer(PoolUseQuery(1, "fast")).pools == capacity.answer(PoolUseQuery(1)).pools
    assert capacity.answer(PoolUseQuery(1, "none")).pools == ()
    capacity.note(State(revision=9_999, at=Instant(at - 10**12), pools=pools))
    assert capacity.answer(PoolUseQuery(1)).until == at  # a clock that was set back stands still


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (format_size(0), "0 B"), (format_size(1536), "1.50 KiB"), (format_size(12 * 1024**3), "12 GiB"),
        (format_size(3, "nodes"), "3"),
        (format_size(None), "–"), (format_span(3.21), "3.2 s"), (format_span(200_000), "2 d 7 h"),
        (format_span(None), "–"), (format_span(61), "1 min"),
        (format_moment("2026-01-31T12:00:01.5Z"), "2026-01-31 12:00:01"), (format_moment(None), "–"),
        (format_ago("2026-01-31T12:00:00Z", NOON), "now"), (format_ago("2026-01-31T11:59:51Z", NOON), "9 s ago"),
        (format_ago("2026-01-31T11:57:00Z", NOON), "3 min ago"),
        (format_ago("2026-01-31T14:05:00Z", NOON), "in 2 h 5 min"),
        (format_ago(None, NOON), "–"), (format_after("2026-01-31T12:00:03.2Z", "2026-01-31T12:00:00Z"), "+3.2 s"),
        (format_after("2026-01-31T12:04:12.9Z", "2026-01-31T12:00:00Z"), "+4 min 12 s"),
        (format_after("2026-01-31T14:04:12Z", "2026-01-31T12:00:00Z"), "+2 h 4 min"),
        (strip_prefix("burst_buffer/native: slurm_bb_data_in: input /a does not exist"), "input /a does not exist"),
        (strip_prefix("burst_buffer/lua: Stage-out in progress"), "Stage-out in progress"),
        (strip_prefix("BurstBufferResources"), "BurstBufferResources"),
    ],
)  # fmt: skip
def test_figures_are_written_for_people(found: str, said: str) -> None:
    assert found == said


@pytest.mark.parametrize(("held_bytes", "is_behind"), [(4, False), (5, True)])
def test_the_chart_of_a_pool_ends_where_the_history_ends_that_was_read_so_far(held_bytes: int, is_behind: bool) -> None:
    step = PoolStepView(at="2026-01-31T11:00:00Z", held_bytes=4, served_bytes=8, quantity_bytes=8)
    pool = PoolUseView(name="fast", unit="bytes", steps=(step,))
    times = {"from_time": "2026-01-31T11:00:00Z", "to_time": "2026-01-31T11:30:00Z"}
    chart = pool_chart(pool, PoolUseAnswer(revision=1, **times, step_s=1, pools=(pool,)), NOON, held_bytes)
    assert ("500,50 500,100 1000,100" in chart) == is_behind == ("still reading" in chart)
    assert f"Pool fast: {held_bytes} B of 8 B used" in chart

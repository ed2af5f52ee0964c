"""Which pages there are, what each asks the core, and how an answer becomes HTML.

A page asks what the API is asked, as the same caller: it can show nothing that `--json` does not say to him, and a rule
of privacy stands in one place. Nothing that a page shows is computed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

import msgspec

from cluster.api.page.labels import environment, is_over, stage_bars
from cluster.api.web import Problem, Redirect, check_query
from cluster.schemas import Answer, ApiOperation, JobView, PoolUseAnswer
from cluster.schemas import operations as ops
from cluster.system import Clock, SystemClock, format_instant
from cluster.system.eventloop import SlicedWork
from replica.values import NEVER, Instant

PAGES_PATH: Final = "/page"

ROWS: Final = 50
"""Rows of a list on one page, count; the others are on the next ones."""

ROWS_EXPECTED: Final = 20
"""Rows of jobs that wait on one page, count: with a thousand nodes it takes 14 ms to say when one should start."""

ROWS_FIRST: Final = 10
"""Rows of a list on the first page, which shows some of everything, count."""

NODES_ROWS: Final = 200
"""Nodes on one page, count."""

HISTORY_ROWS: Final = 200
"""What happened to a job last, count: one that is tried again for ever has more."""

POOLS_WAIT_S: Final = 0.5
"""How long a page waits for how full pools were, seconds: it is shown without that then, and with it the next time."""

WAITING: Final = "PENDING"

NO_LEADER: Final = "no_leader"

HTML: Final = "text/html; charset=utf-8"

_STALE: Final = {"stale": "ok"}

Query = Mapping[str, str]
Ask = Callable[[ApiOperation[Any, Any], dict[str, str], dict[str, str]], Awaitable[Any]]
"""Asks the core an operation with the parameters of its path and its query, as the caller; Problem, Redirect."""


class PageQuery(NamedTuple):
    """What a page asks."""

    operation: ApiOperation[Any, Any]
    params: dict[str, str] = {}
    query: dict[str, str] = {}
    may_fail: bool = False
    """Whether the page is shown without it, with the reason."""
    wait_s: float | None = None
    """How long it is waited for, seconds; None: until it is answered."""


class QueryError(NamedTuple):
    """A question that was not answered."""

    sentence: str
    remedy: str = ""


class Page(NamedTuple):
    """One page: its template, its title, what may stand in its query, and what it asks."""

    template: str
    title: str
    query: Mapping[str, str]
    asks: Callable[[dict[str, str], Query], dict[str, PageQuery]]


class PageMatch(NamedTuple):
    """What a path leads to: a page, a file, or (`elsewhere`) another path."""

    page: Page | None = None
    params: dict[str, str] = {}
    file: str = ""
    elsewhere: str = ""


class RenderedPage(NamedTuple):
    """What is sent."""

    content: bytes
    content_type: str
    revision: int
    status: int = 200


def _first(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    rows = str(ROWS_FIRST)
    return {
        "overview": PageQuery(ops.SHOW_OVERVIEW),
        "pools": PageQuery(ops.LIST_POOLS),
        "use": PageQuery(ops.LIST_POOL_USE, may_fail=True, wait_s=POOLS_WAIT_S),
        "queue": PageQuery(ops.LIST_JOBS, {}, {"state": WAITING, "after": "0", "limit": rows, "expected": "yes"}),
        "transfers": PageQuery(ops.LIST_TRANSFERS, {}, {"limit": rows}),
    }


def _jobs(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    asked = {"state": query.get("state", WAITING), "after": query.get("after", "0"), "limit": str(ROWS)}
    asked |= {name: query[name] for name in ("user",) if name in query}
    if asked["state"] == WAITING:
        asked |= {"expected": "yes", "limit": str(ROWS_EXPECTED)}
    return {"overview": PageQuery(ops.SHOW_OVERVIEW), "queue": PageQuery(ops.LIST_JOBS, {}, asked)}


def _transfers(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    return {
        "overview": PageQuery(ops.SHOW_OVERVIEW),
        "transfers": PageQuery(ops.LIST_TRANSFERS, {}, {"after": query.get("after", "0"), "limit": str(ROWS)}),
    }


def _nodes(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    asked = {name: query[name] for name in ("state", "after") if name in query}
    return {
        "overview": PageQuery(ops.SHOW_OVERVIEW),
        "nodes": PageQuery(ops.LIST_NODES, {}, {**asked, "limit": str(NODES_ROWS)}),
    }


def _job(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    return {
        "job": PageQuery(ops.SHOW_JOB, params),
        "why": PageQuery(ops.EXPLAIN_JOB, params, may_fail=True),
        "history": PageQuery(ops.SHOW_JOB_HISTORY, params, {"last": str(HISTORY_ROWS)}, may_fail=True),
    }


_AFTER: Final = {"after": "where the page before this one ended"}

_PAGES: Final = {
    (): Page("overview.html", "Overview", {}, _first),
    ("jobs",): Page("jobs.html", "Jobs", {**_AFTER, "state": "job states", "user": "of one user"}, _jobs),
    ("transfers",): Page("transfers.html", "Transfers", _AFTER, _transfers),
    ("nodes",): Page("nodes.html", "Nodes", {**_AFTER, "state": "node states"}, _nodes),
    ("jobs", "{id}"): Page("job.html", "Job", {}, _job),
}
"""Pages by the parts of their path below PAGES_PATH."""

FILES: Final = {
    "page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml",
}  # fmt: skip
"""Files that pages load, all from their own origin."""


def is_page(path: str) -> bool:
    """Whether a path is of the page, whatever is there: what is wrong with it is told to a person."""
    return path in ("/", PAGES_PATH) or path.startswith(PAGES_PATH + "/")


def find_page(method: str, path: str) -> PageMatch:
    """Return what a path of the page leads to; Problem 404 or 405."""
    if method != "GET":
        words = f"{method} is not possible here: pages only show"
        raise Problem(405, "method_not_allowed", words, "use the command line", headers={"Allow": "GET"})
    parts = tuple(path.removeprefix(PAGES_PATH).strip("/").split("/")) if path.strip("/") else ()
    if path == "/":
        return PageMatch(elsewhere=PAGES_PATH)
    parts = () if parts == ("",) else parts
    if len(parts) == 1 and parts[0] in FILES:
        return PageMatch(file=parts[0])
    if len(parts) == 2 and parts[0] == "jobs" and parts[1].isascii() and parts[1].replace("_", "").isalnum():
        return PageMatch(_PAGES["jobs", "{id}"], {"id": parts[1]})
    page = _PAGES.get(parts)
    if page is None:
        raise Problem(404, "unknown_route", "there is no such page", f"begin at {PAGES_PATH}")
    return PageMatch(page)


class Pages:
    """Renders pages."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._files: dict[str, bytes] = {}

    def file(self, name: str) -> RenderedPage:
        """Return a file that pages load."""
        if name not in self._files:
            self._files[name] = (resources.files("cluster.api.page") / "static" / name).read_bytes()
        return RenderedPage(self._files[name], FILES[name], 0)

    async def page(
        self, found: PageMatch, query: dict[str, str], names: list[str], ask: Ask, work: SlicedWork
    ) -> RenderedPage:
        """Return a page; Problem, or Redirect to the leader. Without a leader it shows what this replica knows."""
        page = found.page
        assert page is not None
        allowed = msgspec.structs.replace(ops.SHOW_STATUS, query={**page.query, "stale": ""})
        check_query(allowed, query, names)
        questions = page.asks(found.params, query)
        note, stale = "", query.get("stale") == "ok"
        try:
            answers = await _answers(questions, ask, stale=stale)
        except Problem as problem:
            if problem.view.code != NO_LEADER or stale:
                raise
            note, stale = problem.view.sentence, True
            answers = await _answers(questions, ask, stale=True)
        status = await ask(ops.SHOW_STATUS, {}, {})
        revision = min(one.revision for one in answers.values() if isinstance(one, Answer | JobView))
        now = self._clock.now()
        context = {
            "title": page.title, "query": query, "note": note, "stale": stale, "status": status, "revision": revision,
            "now": now, "now_iso": format_instant(now), "until": NEVER if stale else now, **answers,
        }  # fmt: skip
        if isinstance(answers.get("use"), PoolUseAnswer):
            context["use_of"] = {pool.name: pool for pool in answers["use"].pools}
        if "history" in answers:
            history = answers["history"]
            context["is_over"] = is_over(answers["job"])
            context["bars"] = (
                [] if isinstance(history, QueryError) else stage_bars(history.rows, self._until(answers["job"]))
            )
        return RenderedPage(await self._render(page.template, context, work), HTML, revision)

    async def problem(self, problem: Problem, work: SlicedWork) -> bytes:
        """Return the page that says what is wrong."""
        return await self._render("problem.html", {"problem": problem.view, "status_code": problem.status}, work)

    def _until(self, job: JobView) -> Instant:
        """Return up to when the timeline of a job goes: now, unless nothing happens to it any more."""
        return NEVER if is_over(job) else self._clock.now()

    async def _render(self, template: str, context: Mapping[str, Any], work: SlicedWork) -> bytes:
        templates = await asyncio.to_thread(environment)
        parts: list[str] = []
        for part in templates.get_template(template).generate(context):
            parts.append(part)
            await work.take(0, parts=2)
        return "".join(parts).encode()


async def _answers(questions: Mapping[str, PageQuery], ask: Ask, *, stale: bool) -> dict[str, Any]:
    """Ask all questions of a page at once."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_answer(one, ask, stale=stale)) for name, one in questions.items()}
    found = {name: task.result() for name, task in tasks.items()}
    for one in found.values():
        if isinstance(one, Problem | Redirect):
            raise one
    return found


async def _answer(question: PageQuery, ask: Ask, *, stale: bool) -> Any:
    """Return the answer; Failed, or what is raised, which is not raised here so that others are waited for."""
    query = {**question.query, **_STALE} if stale else question.query
    try:
        async with asyncio.timeout(question.wait_s):
            return await ask(question.operation, question.params, query)
    except TimeoutError:
        return QueryError("it is not known yet")
    except Redirect as redirect:
        return redirect
    except Problem as problem:
        return QueryError(problem.view.sentence) if question.may_fail else problem

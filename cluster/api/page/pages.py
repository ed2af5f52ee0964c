"""Pages of the status page: their API queries, and the rendering of the responses.

A page queries the API as the caller. It therefore shows nothing beyond `--json`, and privacy rules exist only once.
Pages compute no figures of their own.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from importlib import resources
from typing import Any, Final, NamedTuple

import msgspec

from forebay.cluster.api.page.labels import environment, is_over, stage_bars
from forebay.cluster.api.web import Problem, Redirect, check_query
from forebay.cluster.schemas import NUMBER_MAX, Answer, ApiOperation, JobView, PoolUseAnswer
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Clock, SystemClock, format_instant
from forebay.cluster.system.eventloop import SlicedWork
from forebay.replica.model import ENDED, JobState
from forebay.replica.values import NEVER, Instant

PAGES_PATH: Final = "/page"

ROWS: Final = 50
"""Rows of a list per page, count."""

ROWS_JOBS: Final = 20
"""Rows of jobs per page, count: with a thousand nodes, one expected start takes 14 ms."""

ROWS_FIRST: Final = 10
"""Rows per list on the overview page, count."""

NODES_ROWS: Final = 200
"""Nodes per page, count."""

HISTORY_ROWS: Final = 200
"""Newest events of a job shown, count; a job that is retried forever has more."""

POOLS_WAIT_S: Final = 0.5
"""Time a page waits for pool use, seconds; otherwise it is shown without it."""

ANY_STATE: Final = "ALL"
UNFINISHED: Final = ",".join(state.name for state in JobState if state not in ENDED)
FINISHED_STATES: Final = tuple(state.name for state in JobState if state in ENDED)

NO_LEADER: Final = "no_leader"

_CONSTANTS: Final = {
    "ANY_STATE": ANY_STATE, "FINISHED_STATES": FINISHED_STATES, "STATE_CHOICES": (ANY_STATE, *JobState.__members__),
    "ROWS": ROWS, "ROWS_FIRST": ROWS_FIRST, "ROWS_JOBS": ROWS_JOBS, "NODES_ROWS": NODES_ROWS,
}  # fmt: skip
"""Names that templates use."""

HTML: Final = "text/html; charset=utf-8"

_ROUTES: Final = (
    (r"/v1/jobs/([^\s/]+)/history", r"`forebay job history \1`"),
    (r"/v1/jobs\b(?!/)", "the list of jobs"),
)
"""Routes in the API's remedies -> text for readers of a page."""

_STALE: Final = {"stale": "ok"}

Query = Mapping[str, str]
Ask = Callable[[ApiOperation[Any, Any], dict[str, str], dict[str, str]], Awaitable[Any]]
"""Performs an operation as the caller, with path and query parameters. May raise Problem or Redirect."""


class PageQuery(NamedTuple):
    """API query of a page."""

    operation: ApiOperation[Any, Any]
    params: dict[str, str] = {}
    query: dict[str, str] = {}
    may_fail: bool = False
    """True if the page can be shown with the error in its place."""
    wait_s: float | None = None
    """Longest wait, seconds; None: no limit."""


class QueryError(NamedTuple):
    """Error of a page's query."""

    sentence: str
    remedy: str = ""


class Page(NamedTuple):
    """Page: template, title, allowed query parameters, and API queries."""

    template: str
    title: str
    tab: str
    """Entry of the navigation that is marked."""
    query: Mapping[str, str]
    asks: Callable[[dict[str, str], Query], dict[str, PageQuery]]


class PageMatch(NamedTuple):
    """Target of a path: a page, a file, or a redirect to another path (`elsewhere`)."""

    page: Page | None = None
    params: dict[str, str] = {}
    file: str = ""
    elsewhere: str = ""


class RenderedPage(NamedTuple):
    """Rendered response."""

    content: bytes
    content_type: str
    revision: int
    status: int = 200


def _overview(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    rows = str(ROWS_FIRST)
    pending = {"state": JobState.PENDING.name, "after": "0", "limit": rows, "expected": "yes", "collapse": "yes"}
    return {
        "overview": PageQuery(ops.SHOW_OVERVIEW),
        "pools": PageQuery(ops.LIST_POOLS),
        "use": PageQuery(ops.LIST_POOL_USE, may_fail=True, wait_s=POOLS_WAIT_S),
        "running": PageQuery(
            ops.LIST_JOBS, {}, {"state": JobState.RUNNING.name, "before": str(NUMBER_MAX), "limit": rows}
        ),
        "queue": PageQuery(ops.LIST_JOBS, {}, pending),
        "transfers": PageQuery(ops.LIST_TRANSFERS, {}, {"limit": str(ROWS)}),
    }


def _jobs(params: dict[str, str], query: Query) -> dict[str, PageQuery]:
    """Return the queries of the jobs page: unfinished jobs oldest first, others newest first, arrays collapsed."""
    state = query.get("state") or UNFINISHED
    asked = {name: query[name] for name in ("user", "name", "job", "after", "before") if query.get(name)}
    if "after" not in asked and "before" not in asked:
        is_newest_first = state == ANY_STATE or state in FINISHED_STATES
        asked |= {"before": str(NUMBER_MAX)} if is_newest_first else {"after": "0"}
    if "job" not in asked:
        asked["collapse"] = "yes"
    if state != ANY_STATE:
        asked["state"] = state
    asked |= {"limit": str(ROWS_JOBS), "expected": "yes"}
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


_AFTER: Final = {"after": "last row of the previous page"}
_JOBS_QUERY: Final = {
    **_AFTER,
    "before": "last row of the previous page, newest first",
    "state": f"job states; {ANY_STATE}: also finished jobs",
    "user": "only jobs of this user",
    "name": "part of the job's name",
    "job": "only tasks of this array",
}

_PAGES: Final = {
    (): Page("overview.html", "Overview", "Overview", {}, _overview),
    ("jobs",): Page("jobs.html", "Jobs", "Jobs", _JOBS_QUERY, _jobs),
    ("transfers",): Page("transfers.html", "Transfers", "Transfers", _AFTER, _transfers),
    ("nodes",): Page("nodes.html", "Nodes", "Nodes", {**_AFTER, "state": "node states"}, _nodes),
    ("jobs", "{id}"): Page("job.html", "Job", "Jobs", {}, _job),
}
"""Pages by path below PAGES_PATH."""

FILES: Final = {
    "page.css": "text/css; charset=utf-8", "page.js": "text/javascript; charset=utf-8", "icon.svg": "image/svg+xml",
}  # fmt: skip
"""Static files of the pages, all from their own origin."""


def is_page(path: str) -> bool:
    """Return True for any path below the status page, so that errors are rendered as HTML."""
    return path in ("/", PAGES_PATH) or path.startswith(PAGES_PATH + "/")


def find_page(method: str, path: str) -> PageMatch:
    """Return the target of a path.

    Raises:
        Problem: 404 or 405.
    """
    if method != "GET":
        words = f"{method} is not possible here: pages are read-only"
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
        raise Problem(404, "unknown_route", "the page does not exist", f"start at {PAGES_PATH}")
    return PageMatch(page)


class Pages:
    """Renders pages."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._files: dict[str, bytes] = {}

    def file(self, name: str) -> RenderedPage:
        """Return a static file."""
        if name not in self._files:
            self._files[name] = (resources.files("forebay.cluster.api.page") / "static" / name).read_bytes()
        return RenderedPage(self._files[name], FILES[name], 0)

    async def page(
        self, found: PageMatch, query: dict[str, str], names: list[str], ask: Ask, work: SlicedWork
    ) -> RenderedPage:
        """Render a page. Without a leader it shows this replica's own state.

        Raises:
            Problem: A required query failed.
            Redirect: Another replica leads.
        """
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
            **_CONSTANTS, "title": page.title, "tab": page.tab, "query": query, "note": note, "stale": stale,
            "status": status, "revision": revision, "now": now, "now_iso": format_instant(now),
            "until": NEVER if stale else now, **answers,
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

    async def problem(self, problem: Problem, path: str, work: SlicedWork) -> bytes:
        """Render an error page for a path."""
        first = path.removeprefix(PAGES_PATH).strip("/").partition("/")[0]
        page = _PAGES.get((first,) if first else ())
        view = problem.view
        for route, words in _ROUTES:
            view = msgspec.structs.replace(view, remedy=re.sub(route, words, view.remedy))
        context = {"problem": view, "status_code": problem.status, "tab": page.tab if page else ""}
        return await self._render("problem.html", context, work)

    def _until(self, job: JobView) -> Instant:
        """Return the end of a job's timeline: its end, or now."""
        return NEVER if is_over(job) else self._clock.now()

    async def _render(self, template: str, context: Mapping[str, Any], work: SlicedWork) -> bytes:
        templates = await asyncio.to_thread(environment)
        parts: list[str] = []
        for part in templates.get_template(template).generate(context):
            parts.append(part)
            await work.take(0, parts=2)
        return "".join(parts).encode()


async def _answers(questions: Mapping[str, PageQuery], ask: Ask, *, stale: bool) -> dict[str, Any]:
    """Perform all queries of a page concurrently."""
    async with asyncio.TaskGroup() as group:
        tasks = {name: group.create_task(_answer(one, ask, stale=stale)) for name, one in questions.items()}
    found = {name: task.result() for name, task in tasks.items()}
    for one in found.values():
        if isinstance(one, Problem | Redirect):
            raise one
    return found


async def _answer(question: PageQuery, ask: Ask, *, stale: bool) -> Any:
    """Return the response, a QueryError, or the exception, which is not raised so that all queries complete."""
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

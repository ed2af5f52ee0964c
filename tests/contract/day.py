"""A recorded day: requests as they were sent, one a line, and what people saw of it, as text.

A line of `day/requests.jsonl` is what somebody did: `after_s` seconds later `who` asks `ask` with `body`, whose command
ids are made here, or `inside` is a command that the leader gives by itself. What is written down is free of what
only the representation knows: revisions, tags, digests of states and counts of events.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.api.web.problems import Problem
from forebay.cluster.api.web.routing import find_operation
from forebay.replica.grammar import ConfSetting
from forebay.replica.messages import commands as c
from forebay.replica.model.pools import Pool
from forebay.replica.state.digest import state_digest
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import Instant, seconds
from tests.contract.golden import HERE
from tests.contract.in_memory import Answer, InMemory
from tests.replica.world import OPERATOR, POLICY

REQUESTS = HERE / "day" / "requests.jsonl"
POOLS = {"fast": 100 << 30, "wide": 400 << 30}
GRANULARITY_BYTES = 1 << 30
NODES = ("n1", "n2", "n3")
WITHOUT_ID = ("/v1/configuration/diff", "/poll", "/v1/snapshots")
"""Ends of paths whose bodies carry no command id."""

_REVISION = re.compile(r"(revisions? )[0-9]+")
_MASKED = frozenset({"revision", "changed_revision", "last_contact_s", "applied_index", "first_index"})
"""Fields that are not written down: what may change with the format, and what only this process knows."""

NOTHING: tuple[Any, ...] = (None, "", 0, False, [], (), {})
"""Values of fields that are not written down."""

REPEATED = frozenset({"POST /v1/configuration", "GET /v1/configuration", "GET /v1/burst", "PUT /v1/licenses/matlab"})
"""Requests whose answers are written down as the difference from the last one."""

BURST_EVERY = 10
"""Requests between two looks at what `scontrol show burst` prints, count: it is long, and says much of the same."""

Line = dict[str, Any]
Objects = dict[str, dict[str, Any]]


class Day(NamedTuple):
    """What came of the requests."""

    transcript: list[str]
    histories: list[str]
    commands: Counter[str]
    """How often each command is in the ledger."""
    events: Counter[str]
    asked: Counter[str]
    """How often each route was asked, as `POST /v1/jobs/{id}/hold`, and each field of a body was said."""


class Repeated:
    """The replica of the day and what was seen of it last."""

    def __init__(self) -> None:
        self.replica = InMemory(pools=POOLS, granularity=GRANULARITY_BYTES, nodes=0)
        self.lines: list[str] = []
        self._objects: Objects = {}
        self._burst: list[str] = []
        self._ids: list[str] = []
        self._seen: object = None
        self._told: dict[str, list[str]] = {}
        self._number = 0

    async def do(self, line: Line) -> Answer:
        """Do what a line says, and write down what was answered and what changed in what people see."""
        self._number += 1
        self.replica.advance(line.get("after_s", 0))
        self.lines.append(f"== {self._number} {heading(line)}")
        answer = Answer(0, None)  # time passes, and nothing else
        if "inside" in line:
            answer = self._inside(line)
        elif "ask" in line:
            answer = await self._ask(line)
        changes: list[str] = []
        if self.replica.state is not self._seen:
            changes = await self._changes()
            self._seen = self.replica.state
        rows = [*answer_lines(self._news(answer))]
        if line.get("ask", "").partition("?")[0] in REPEATED:
            # They are long, and the same as the last time but for a line or two.
            told, self._told[line["ask"]] = self._told.get(line["ask"], []), rows
            rows = [*(f"-{row[1:]}" for row in _less(told, rows)), *_less(rows, told)]
        self.lines += [*rows, *changes]
        return answer

    def _news(self, answer: Answer) -> Answer:
        """Return an answer about a job without what its row in the list of jobs says, too."""
        body = answer.body
        if not isinstance(body, dict) or "submit_time" not in body:
            return answer
        known = self._objects.get(f"job {body['job_id']}", {})
        return Answer(answer.status, {key: item for key, item in body.items() if known.get(key, None) != item})

    async def _ask(self, line: Line) -> Answer:
        method, target = line["ask"].split(" ", 1)
        body = line.get("body")
        if method != "GET" and not target.endswith(WITHOUT_ID):
            if not line.get("same_id"):
                self._ids = []
            body = self._with_ids(dict(body or {}))
        return await self.replica.ask(line["who"], method, target, body)

    def _with_ids(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with an id for each of its commands: new ones, or those of the request before."""
        fresh, ids = not self._ids, iter([*self._ids])

        def given(one: dict[str, Any]) -> dict[str, Any]:
            if "command_id" in one:
                return one
            command_id = self.replica.new_id() if fresh else next(ids)
            if fresh:
                self._ids.append(command_id)
            return {"command_id": command_id, **one}

        for several in ("commands", "reports"):
            if several in body:
                return {**body, several: [given(one) for one in body[several]]}
        return given(body)

    def _inside(self, line: Line) -> Answer:
        actor, command = leaders_command(line, self.replica)
        outcome = self.replica.settle(command, actor)
        if not isinstance(outcome, Rejection):
            return Answer(200, None)
        error = {"code": outcome.code.name.lower(), "sentence": outcome.sentence, "remedy": outcome.remedy}
        # How many levels there are is not the day's to say.
        return Answer(409, {"error": {"code": error["code"]} if line["inside"] == "raise_feature_level" else error})

    async def _changes(self) -> list[str]:
        """Return what has changed since the last time in what people and agents are shown."""
        objects = await self.objects()
        rows = [*changed_rows(self._objects, objects)]
        if self._number % BURST_EVERY:
            self._objects = objects
            return rows
        burst = await self._text("/v1/burst?format=text")
        rows += [f"  burst - {one}" for one in _less(self._burst, burst)]
        rows += [f"  burst + {one}" for one in _less(burst, self._burst)]
        self._objects, self._burst = objects, burst
        return rows

    async def objects(self) -> Objects:
        """Return everything that is listed, by kind and name."""
        found: Objects = {}
        for job in (await self.get("/v1/jobs?limit=10000"))["jobs"]:
            found[f"job {job['job_id']}"] = seen(job, "job_id")
        for pool in (await self.get("/v1/pools"))["pools"]:
            found[f"pool {pool['name']}"] = seen(pool, "name")
        for buffer in (await self.get("/v1/buffers"))["buffers"]:
            name = f"buffer of {buffer['job_id']}" if buffer["job_id"] else f"persistent {buffer['name']}"
            found[name] = seen(buffer, "job_id", "request")
        for node in (await self.get("/v1/nodes"))["nodes"]:
            found[f"node {node['name']}"] = seen(node, "name")
            body = {"instance": node["instance"], "wait_s": 0}
            polled = await self.replica.ask(f"agent {node['name']}", "POST", f"/v1/agents/{node['name']}/poll", body)
            for order in polled.body["orders"]:
                name = f"order {node['name']} {order['job']}/{order['attempt']} {order['stage']}"
                found[name] = seen(order, "job", "attempt", "stage")
        return found

    async def get(self, target: str) -> Any:
        """Return what an operator is answered."""
        answer = await self.replica.ask("operator", "GET", target)
        assert answer.status == 200, (target, answer)
        return answer.body

    async def _text(self, target: str) -> list[str]:
        return str(await self.get(target)).splitlines()


def leaders_command(line: Line, replica: InMemory) -> tuple[c.Actor, c.Command]:
    """Return who gives a command that has no request of its own, and the command."""
    match line["inside"]:
        case "found_cluster":
            return c.CONTROLLER, c.FoundCluster("other", "other", POLICY, (Pool("p", 1, 1),))
        case "mark_node_down":
            return c.CONTROLLER, c.MarkNodeDown(line["node"], line["reason"])
        case "mark_node_back":
            return c.CONTROLLER, c.MarkNodeBack(line["node"])
        case "restart_operations":
            return c.CONTROLLER, c.RestartOperations(tuple(line["jobs"]))
        case "settle_mails":
            return c.CONTROLLER, c.SettleMails(
                tuple(line["sent"]), tuple((key, "no such user") for key in line["dropped"])
            )
        case "advance_sinks":
            revision = replica.state.revision
            marks = tuple((name, revision + ahead) for name, ahead in line["marks"].items())
            return c.CONTROLLER, c.AdvanceSinks(marks, tuple(line.get("removed", ())))
        case "set_clock":
            return OPERATOR, c.SetClock(Instant(replica.at - seconds(line["back_s"])))
        case "expire_cached_replies":
            return c.CONTROLLER, c.ExpireCachedReplies()
        case "record_state_digest":
            state = replica.state
            return c.CONTROLLER, c.RecordStateDigest(state.revision + line["ahead"], state_digest(state))
        case "recover_cluster":
            return OPERATOR, c.RecoverCluster(line["mark"], "r1", ("r1", "r2", "r3"), 42, 40)
        case "record_histories":
            state = replica.state
            return c.CONTROLLER, c.RecordHistories(int(state.revision), state.next_job - 1 + line["ahead"], bytes(32))
        case "raise_feature_level":
            return OPERATOR, c.RaiseFeatureLevel(99, (("r1", 99),))
        case "configure_site":
            settings = tuple(ConfSetting(key, value) for key, value in line["settings"].items())
            return OPERATOR, c.ConfigureSite(settings, partial=True)
    raise AssertionError(line)


# As text


def heading(line: Line) -> str:
    """Return who asks what, in one line."""
    after = f"+{line['after_s']:g}s " if line.get("after_s") else ""
    if "who" not in line and "inside" not in line:
        return after
    if "inside" in line:
        said = {key: value for key, value in line.items() if key not in ("inside", "after_s")}
        return f"{after}the leader: {line['inside']} {compact(said)}"
    again = " again" if line.get("same_id") else ""
    body = f" {compact(line['body'])}" if line.get("body") else ""
    return f"{after}{line['who']}: {line['ask']}{again}{body}"


def answer_lines(answer: Answer) -> Iterator[str]:
    """Yield an answer, one thing a line."""
    body = answer.body
    if isinstance(body, str):
        yield f"{answer.status}"
        yield from (f"  | {row}" for row in masked_text(body).splitlines())
    elif answer.status >= 400:
        error = body["error"]
        yield f"{answer.status} {error['code']}"
        if error.get("place"):
            yield f"  place: {masked_text(error['place'])}"
        if error.get("outcome", "rejected") != "rejected":
            yield f"  outcome: {error['outcome']}"
    elif answer.status:
        yield f"{answer.status}"
        for key, value in masked(body or {}).items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                yield from (f"  {key}: {compact(row)}" for row in value)
            elif isinstance(value, str) and "\n" in value:
                yield from (f"  {key}: {row}" for row in value.splitlines())
            else:
                yield f"  {key}: {compact(value)}"


def changed_rows(before: Objects, after: Objects) -> Iterator[str]:
    """Yield what is new, what is gone, and of everything else the fields that have changed."""
    for name in sorted({*before, *after}, key=natural):
        if name not in after:
            yield f"  - {name}"
        elif name not in before:
            yield f"  + {name} {compact(masked(after[name]))}"
        elif before[name] != after[name]:
            old, new = before[name], after[name]
            fields = [field for field in {**old, **new} if old.get(field) != new.get(field)]
            yield f"  ~ {name} " + "; ".join(
                f"{field} {plain(old.get(field))} -> {plain(new.get(field))}" for field in fields
            )


def natural(name: str) -> list[tuple[int, str]]:
    """Return what to sort names by, numbers in them by their value."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"([0-9]+)", name)]


def shown(value: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
    """Return the fields that say something and are for people."""
    return {
        key: masked(item)
        for key, item in value.items()
        if key not in left_out and key not in _MASKED and item not in NOTHING
    }


def seen(value: dict[str, Any], *left_out: str) -> dict[str, Any]:
    """Return the fields of a listed thing that are compared: only those that say something are written down."""
    return {key: item for key, item in value.items() if key not in left_out and key not in _MASKED}


def masked(value: Any) -> Any:
    """Return a value without what may change with the format, and without fields that say nothing."""
    if isinstance(value, dict):
        return shown(value, set())
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return masked_text(value) if isinstance(value, str) else value


def masked_text(text: str) -> str:
    """Return a sentence without the numbers of revisions."""
    return _REVISION.sub(r"\1#", text)


def plain(value: Any) -> str:
    """Return a field's value in one line, whatever says nothing as `-`."""
    return "-" if value in NOTHING else compact(masked(value))


def compact(value: Any) -> str:
    """Return JSON in one line."""
    return msgspec.json.encode(value).decode()


def _less(rows: list[str], others: list[str]) -> list[str]:
    left = Counter(others)
    found = []
    for row in rows:
        if left[row]:
            left[row] -= 1
        else:
            found.append(row)
    return found


# The whole day


def requests() -> list[Line]:
    """Return the requests of the day."""
    return [msgspec.json.decode(row) for row in REQUESTS.read_text(encoding="utf-8").splitlines()]


def repeat(lines: list[Line]) -> Day:
    """Send the requests to a new replica, and return what came of them."""
    return asyncio.run(_repeat(lines))


async def _repeat(lines: list[Line]) -> Day:
    day = Repeated()
    asked: Counter[str] = Counter()
    for line in lines:
        await day.do(line)
        asked.update(said(line))
    transcript = [*day.lines, *[row async for row in _evening(day)]]
    histories = [row async for row in _histories(day)]
    commands, events = await counted(day)
    return Day(transcript, histories, commands, events, asked)


def said(line: Line) -> Iterator[str]:
    """Yield the route that a line asks, and what its body says: names of records and fields, tags, kinds of results."""
    if "ask" not in line:
        return
    method, target = line["ask"].split(" ", 1)
    try:
        operation, _ = find_operation(method, target.partition("?")[0])
    except Problem:
        return
    yield f"{operation.method} {operation.path}"
    body = line.get("body") or {}
    yield from (f"{operation.request.__name__}.{field}" for field in body if operation.has_body)
    yield from (f"in bulk {one['type']}" for one in body.get("commands", ()))
    yield from (f"{one['stage']} {one['result']['type']}" for one in body.get("reports", ()))


async def counted(day: Repeated) -> tuple[Counter[str], Counter[str]]:
    """Return how often each command and each event is in the ledger, as operators read it."""
    commands: Counter[str] = Counter()
    events: Counter[str] = Counter()
    first = 1
    while entries := (await day.get(f"/v1/ledger?from={first}&limit=1000"))["entries"]:
        for record in (record for entry in entries for record in entry["records"]):
            commands[record["command"]] += 1
            events.update(event["event"] for event in record["events"])
        first = entries[-1]["index"] + 1
    return commands, events


LISTS = ("usage", "accounts", "qos", "licenses", "reservations", "partitions", "scheduling", "transfers", "burst")


async def _evening(day: Repeated) -> AsyncIterator[str]:
    """Yield what is asked when the day is over: every list, and of each job that waits why it does."""
    for what in LISTS:
        yield f"== at the end: {what}"
        for row in answer_lines(Answer(200, await day.get(f"/v1/{what}"))):
            yield row
    for name, job in sorted((await day.objects()).items(), key=lambda item: natural(item[0])):
        if name.startswith("job ") and job["state"] == "PENDING":
            yield f"== at the end: why {name}"
            why = await day.get(f"/v1/jobs/{name.removeprefix('job ')}/why")
            yield f"  {why['reason']} {compact(why['blocking'])}"
            estimate = await day.get(f"/v1/jobs/{name.removeprefix('job ')}/estimate")
            yield f"  {estimate.get('start') or 'nobody knows when'}: {compact(masked(estimate['steps']))}"


async def _histories(day: Repeated) -> AsyncIterator[str]:
    """Yield what happened to each job, an event a line."""
    state = day.replica.state
    skipped = [range(one.last_job + 1, one.first_job) for one in state.recoveries.values()]
    first = min((one.start for one in skipped), default=state.next_job)
    last = max((one.stop for one in skipped), default=state.next_job)
    for job in (*range(1, first), *range(last, state.next_job)):
        history = await day.get(f"/v1/jobs/{job}/history")
        yield f"== job {job}{'' if history['complete'] else ' (without its beginning)'}"
        for row in history["rows"]:
            yield f"{row['at'][11:23]} {row['actor']}: {row['command']} {row['event']}"
            stands = [row["state"], row["reason"], row["burst_buffer_state"] or "-", str(row["attempt"])]
            detail = f" {compact(masked(row['detail']))}" if row["detail"] else ""
            yield f"    {' '.join(stands)}{detail}"

"""Negative controls of the history checks: the checker compared with brute force, and broken promises."""

import asyncio
import itertools
import time
from collections.abc import Hashable, Sequence
from math import inf
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.client import Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import BulkAnswer, CommandResult, ErrorView, JobsAnswer, JobView, PoolsAnswer
from forebay.cluster.schemas.operations import ApiOperation as Asked
from forebay.cluster.schemas.requests import HoldCommand, SubmitCommand
from tests.faults import histories
from tests.faults.bare import BareCluster
from tests.faults.histories import Clients
from tests.faults.linearizability import Found, HeldJob, Model, Operation, Register, Verdict, check, goes_back
from tests.faults.local_cluster import RunFailed
from tests.faults.promises import Expected, Promises

OPERATIONS_MAX = 6
"""Number of operations of a random history: brute force tries every order of every subset."""


def explained(history: Sequence[Operation], model: Model) -> bool:
    """Return by brute force whether some order of all known and some unknown operations explains the answers."""
    known = [operation for operation in history if operation.answer is not None]
    unknown = [operation for operation in history if operation.answer is None]
    for count in range(len(unknown) + 1):
        for taken in itertools.combinations(unknown, count):
            if any(works(order, model) for order in itertools.permutations([*known, *taken])):
                return True
    return False


def works(order: Sequence[Operation], model: Model) -> bool:
    """Return whether an order respects real time and the model."""
    state: Hashable = model.initial
    latest_call_s = -inf
    for operation in order:
        if operation.returned_s < latest_call_s:
            return False
        latest_call_s = max(latest_call_s, operation.called_s)
        allowed, state = model.step(state, operation)
        if not allowed:
            return False
    return True


@st.composite
def register_operations(draw: st.DrawFn) -> Operation:
    called_s, length_s = draw(st.integers(0, 8)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        action, value, answer = "write", draw(st.integers(1, 3)), draw(st.sampled_from(["done", None]))
    else:
        action, value, answer = "read", None, draw(st.integers(0, 3))
    # Half steps avoid a call at the exact time of an answer, where both orders are possible.
    return Operation("x", action, value, answer, called_s, inf if answer is None else called_s + length_s - 0.5)


@st.composite
def job_operations(draw: st.DrawFn) -> Operation:
    called_s, length_s = draw(st.integers(0, 8)), draw(st.integers(1, 5))
    action = draw(st.sampled_from(["submit", "hold", "release", "show"]))
    answers = {
        "submit": ["done", None], "hold": ["done", "absent", None], "release": ["done", "rejected", "absent", None],
        "show": ["absent", "held", "free"],
    }  # fmt: skip
    answer = draw(st.sampled_from(answers[action]))
    return Operation("x", action, None, answer, called_s, inf if answer is None else called_s + length_s - 0.5)


@st.composite
def unknown_or_shown(draw: st.DrawFn) -> Operation:
    """An unanswered change of a job, or an answer that shows it; two thirds are of unknown outcome."""
    called_s = draw(st.integers(1, 8))
    action = draw(st.sampled_from(["hold", "release", "show"]))
    if action != "show":
        return Operation("x", action, None, None, called_s)
    answer = draw(st.sampled_from(["held", "free"]))
    return Operation("x", action, None, answer, called_s, called_s + draw(st.integers(1, 3)) - 0.5)


@given(st.lists(register_operations(), max_size=OPERATIONS_MAX))
def test_the_checker_matches_brute_force_for_registers(history: list[Operation]) -> None:
    found = check(history, Register(0))
    assert (found.verdict is Verdict.LINEARIZABLE) == explained(history, Register(0))


@given(st.lists(job_operations(), max_size=OPERATIONS_MAX))
def test_the_checker_matches_brute_force_for_jobs(history: list[Operation]) -> None:
    found = check(history, HeldJob())
    assert (found.verdict is Verdict.LINEARIZABLE) == explained(history, HeldJob())


@given(st.lists(unknown_or_shown(), min_size=4, max_size=OPERATIONS_MAX))
def test_the_checker_matches_brute_force_with_many_unknown_outcomes(history: list[Operation]) -> None:
    history = [Operation("a", "submit", None, "done", 0.0, 0.5), *history]
    assert (check(history, HeldJob()).verdict is Verdict.LINEARIZABLE) == explained(history, HeldJob())


@pytest.mark.parametrize("last", ["held", "free", "absent"])
def test_a_check_ends_with_many_unknown_outcomes(last: str) -> None:
    """On a slow machine, clients learn few outcomes: in one run, 174 were unknown."""
    history = [Operation("a", "submit", None, "done", 0.0, 0.5)]
    for place in range(100):
        history.append(Operation("b", "hold" if place % 2 else "release", None, None, 1.0 + place))
        history.append(Operation("c", "release" if place % 3 else "hold", None, None, 1.1 + place))
        shown = ("held", "free")[place // 2 % 2]
        history.append(Operation("d", "show", None, shown, 1.2 + place, 1.9 + place))
        history.append(Operation("e", "show", None, shown, 1.3 + place, 2.5 + place))
    history.append(Operation("end", "show", None, last, 200.0, 201.0))
    found = check(history, HeldJob())
    assert found.verdict is (Verdict.NOT_LINEARIZABLE if last == "absent" else Verdict.LINEARIZABLE)


@pytest.mark.parametrize(("last", "verdict"), [(60, Verdict.LINEARIZABLE), (1, Verdict.NOT_LINEARIZABLE)])
def test_a_check_ends_with_many_possible_writes(last: int, verdict: Verdict) -> None:
    history = [Operation("a", "write", place, None, float(place)) for place in range(1, 61)]
    values = (1, *range(2, 61, 7), last)
    history += [Operation("b", "read", None, value, 200.0 + at, 200.5 + at) for at, value in enumerate(values)]
    assert check(history, Register()).verdict is verdict


def test_a_read_that_misses_an_answered_write_is_not_linearizable() -> None:
    history = [
        Operation("a", "write", 1, "done", 0.0, 1.0),
        Operation("b", "write", 2, "done", 2.0, 3.0),
        Operation("a", "read", None, 1, 4.0, 5.0),
    ]
    found = check(history, Register())
    assert (found.verdict, found.stuck_at) == (Verdict.NOT_LINEARIZABLE, history[2])
    assert check([*history[:2], history[2]._replace(called_s=2.5)], Register()).verdict is Verdict.LINEARIZABLE


def test_a_write_of_unknown_outcome_may_appear_late_but_not_vanish() -> None:
    written = Operation("a", "write", 1, None, 0.0)
    reads = [
        Operation("b", "read", None, value, 2.0 * place + 1, 2.0 * place + 2) for place, value in enumerate([0, 1, 0])
    ]
    assert check([written, *reads[:2]], Register(0)).verdict is Verdict.LINEARIZABLE
    assert check([written, reads[0]], Register(0)).verdict is Verdict.LINEARIZABLE
    assert check([written, *reads], Register(0)).verdict is Verdict.NOT_LINEARIZABLE


def test_a_check_that_exceeds_its_limit_is_reported_as_unfinished() -> None:
    history = [Operation(str(place), "write", place, "done", 0.0, 1.0) for place in range(12)]
    history.append(Operation("r", "read", None, 99, 2.0, 3.0))
    assert check(history, Register(), configurations_max=100).verdict is Verdict.UNFINISHED
    assert check(history[:-1], Register(), configurations_max=100).verdict is Verdict.LINEARIZABLE


def test_a_later_answer_with_an_older_revision_is_detected() -> None:
    assert goes_back([(0.0, 1.0, 5), (2.0, 3.0, 4)]) == (5, 4)
    assert goes_back([(0.0, 1.0, 5), (0.5, 3.0, 4), (4.0, 5.0, 5)]) is None


SUBMITTED = Operation("a", "submit", None, "done", 0.0, 1.0)
RELEASED = Operation("b", "release", None, "done", 2.0, 3.0)


def clients(*history: Operation) -> Clients:
    """Return clients with this history of one job."""
    made = Clients(seed=7)
    made.histories["job-0"], made.models["job-0"] = list(history), HeldJob()
    made.submitted.add("job-0")
    made.acknowledged["job-0"] = 1
    return made


def test_histories_are_checked_per_object_and_counted() -> None:
    made = clients(SUBMITTED, RELEASED, Operation("a", "show", None, "free", 4.0, 5.0))
    made.check()
    assert made.figures["operations"] == 3
    assert made.figures["objects_checked"] == 1
    assert made.figures["configurations"] >= 3


@pytest.mark.parametrize(
    "last",
    [
        Operation("a", "show", None, "held", 4.0, 5.0),
        Operation("a", "show", None, "absent", 4.0, 5.0),
        Operation("a", "release", None, "done", 4.0, 5.0),
        Operation("a", "hold", None, "absent", 4.0, 5.0),
    ],
)
def test_a_stale_read_or_a_lost_write_fails_a_run(last: Operation) -> None:
    made = clients(SUBMITTED, RELEASED, last)
    with pytest.raises(RunFailed, match="history of job-0 is not linearizable"):
        made.check()
    assert made.figures["objects_checked"] == 0


def test_an_unfinished_check_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "check", lambda history, model: Found(Verdict.UNFINISHED, 9))
    with pytest.raises(RunFailed, match="history of job-0 is unfinished"):
        clients(SUBMITTED).check()


def test_unanswered_reads_do_not_delay_a_check() -> None:
    silent = [Operation("b", "show", None, None, 0.5 + place / 100) for place in range(30)]
    with pytest.raises(RunFailed, match="is not linearizable"):
        clients(SUBMITTED, *silent, Operation("a", "show", None, "free", 4.0, 5.0)).check()


def test_a_missing_promised_job_fails_a_run() -> None:
    with pytest.raises(RunFailed, match=r"history of job-0 is not linearizable"):
        asyncio.run(clients(SUBMITTED).look_at_everything(cast(Client, Told(job("else", 2))), beside={"else"}))
    with pytest.raises(RunFailed, match=r"lost: \['job-0'\]"):
        asyncio.run(clients(SUBMITTED).look_at_everything(cast(Client, Told(job("job-0", 2)))))
    with pytest.raises(RunFailed, match=r"made up: \['else'\]"):
        asyncio.run(clients(SUBMITTED).look_at_everything(cast(Client, Told(job("job-0", 1), job("else", 2)))))


class Broken:
    """Cluster whose clients fail at their first request."""

    def client(self, identity: str, *, deadline_s: float) -> "Broken":
        return self

    async def __aenter__(self) -> "Broken":
        return self

    async def __aexit__(self, *_: object) -> None: ...

    def new_command_id(self) -> str:
        return "0" * 32

    async def call(self, operation: Asked[Any, Any], *_: object, **__: object) -> JobView:
        raise RunFailed("the answer is wrong")


def test_an_error_in_a_client_fails_the_run() -> None:
    async def work(made: Clients, *, wait: bool) -> None:
        async with made.at_work(cast(BareCluster, Broken())):
            await asyncio.sleep(0)
            if wait:
                await made.commits_after(time.monotonic())

    for wait in (False, True):
        made = Clients(seed=7)
        with pytest.raises(RunFailed, match="the answer is wrong"):
            asyncio.run(work(made, wait=wait))
        assert made.unknown == made.operations > 0


class Told:
    """A client that lists the jobs it was given."""

    def __init__(self, *jobs: JobView) -> None:
        self.answer = JobsAnswer(revision=9, jobs=jobs)

    async def call(self, operation: Asked[Any, Any], **_: object) -> JobsAnswer | PoolsAnswer:
        return self.answer if operation is ops.LIST_JOBS else PoolsAnswer(revision=9, pools=())


def job(name: str, number: int, *, held: bool = True, cancelled: bool = False) -> JobView:
    words = {field.name: None for field in msgspec.structs.fields(JobView) if field.required}
    given: dict[str, Any] = {**words, "name": name, "job_id": number, "hold": "user" if held else None}
    return JobView(**{**given, "cancelled": cancelled})


def promises(**jobs: Expected) -> Promises:
    made = Promises()
    made.jobs.update(jobs)
    return made


REQUEST = SubmitRequest(command_id="0" * 32, script="", time_limit_s=1, workdir="/")
KEPT = Expected(REQUEST, job_id=1)


@pytest.mark.parametrize(
    ("told", "complaint"),
    [
        ((), "1 acknowledged submits are lost"),
        ((job("a", 1), job("a", 2)), "more than once"),
        ((job("a", 1), job("b", 2)), "nobody submitted"),
        ((job("a", 2),), "acknowledged as job 1 and is job 2"),
        ((job("a", 1, held=False),), "(held, cancelled) = (False, False)"),
        ((job("a", 1, cancelled=True),), "(held, cancelled) = (True, True)"),
    ],
)
def test_a_broken_promise_is_reported(told: tuple[JobView, ...], complaint: str) -> None:
    with pytest.raises(RunFailed) as failed:
        asyncio.run(promises(a=KEPT).compare(cast(Client, Told(*told))))
    assert complaint in str(failed.value)


class Refusing:
    """A client whose bulk requests are answered command by command, with this status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def new_command_id(self) -> str:
        return "0" * 32

    async def commands(self, commands: Sequence[SubmitCommand]) -> BulkAnswer:
        error = ErrorView(code="why", sentence="it says why")
        results = [CommandResult(command_id=one.command_id, status=self.status, error=error) for one in commands]
        return BulkAnswer(revision=9, results=tuple(results))


@pytest.mark.parametrize(("status", "ends"), [(503, False), (429, False), (400, True), (409, True)])
def test_an_unexecuted_bulk_command_promises_nothing(status: int, ends: bool) -> None:
    made = Promises()
    sent = made._submit_many(cast(Client, Refusing(status)), ["a", "b"])
    if ends:
        with pytest.raises(RunFailed, match="submit of a was refused"):
            asyncio.run(sent)
        return
    asyncio.run(sent)
    assert made.acknowledged == 0
    asyncio.run(made.compare(cast(Client, Told())))


def test_jobs_of_other_clients_are_ignored() -> None:
    made = Promises(beside={"b"})
    made.jobs["a"] = KEPT
    asyncio.run(made.compare(cast(Client, Told(job("a", 1), job("b", 2)))))


def test_an_unknown_outcome_allows_exactly_two_states() -> None:
    hold = HoldCommand(command_id="0" * 32, job_id=1)
    made = promises(a=Expected(REQUEST, job_id=1, shape=(False, False), pending=hold), b=Expected(REQUEST))
    for held in (False, True):
        asyncio.run(made.compare(cast(Client, Told(job("a", 1, held=held)))))
        asyncio.run(made.compare(cast(Client, Told(job("a", 1, held=held), job("b", 2)))))
    with pytest.raises(RunFailed, match="under way"):
        asyncio.run(made.compare(cast(Client, Told(job("a", 1, cancelled=True)))))

"""A recorded day is answered as it was: same codes and fields, same jobs, buffers and orders after each.

Sentences are not recorded, and a field that was added is no difference.

The requests are in day/requests.jsonl, made once by `tests.contract.make_day`; what came of them is in
day/transcript.txt, and what `job history` says afterwards in day/histories.txt. With FOREBAY_REWRITE_GOLDEN=1 both are
written again: look at the difference before it is committed. The two last tests say that the day has everything in it.
"""

from __future__ import annotations

import msgspec
import pytest

from forebay.cluster.schemas.operations import OPERATIONS
from tests.contract.day import Day, repeat, requests
from tests.contract.golden import HERE, compare_kept

COMMANDS_LEAST = 600
"""Commands of the day, count, without scheduling passes."""

ONCE = frozenset({"found_cluster", "raise_feature_level"})
"""Commands that a ledger has once, and refused ones beside; with one feature level there is none to raise."""

NEVER_WRITTEN = frozenset({"feature_level_raised"})
"""Events that a cluster of the first feature level does not have."""

OTHER_ROUTES = frozenset(
    f"{method} {path}"
    for method, path in (
        ("GET", "/v1/bbstat"), ("GET", "/v1/members"), ("POST", "/v1/members"), ("POST", "/v1/members/transfer"),
        ("POST", "/v1/members/{name}/remove"), ("POST", "/v1/members/{name}/replace"),
        ("POST", "/v1/members/{name}/update"), ("GET", "/v1/status"),
        ("GET", "/v1/ledger"), ("GET", "/v1/ledger/history"), ("GET", "/v1/digests"), ("GET", "/v1/history"),
        ("GET", "/v1/state-digest"),
        ("GET", "/v1/history/leaders"), ("GET", "/v1/diff"), ("GET", "/v1/feature-level"),
        ("GET", "/v1/history/pools"), ("GET", "/v1/overview"), ("GET", "/v1/sinks"),
        ("POST", "/v1/feature-level"), ("POST", "/v1/snapshots"), ("GET", "/v1/snapshots"),
        ("GET", "/v1/snapshots/{name}"), ("GET", "/v1/events"), ("GET", "/v1/openapi.json"),
        ("GET", "/v1/tlog/checkpoint"), ("GET", "/v1/tlog/tile/{tile}"), ("GET", "/v1/tlog/keys"),
        ("POST", "/v1/tlog/sign"), ("POST", "/v1/tlog/checkpoint"), ("GET", "/v1/jobs/{id}/proof"),
        ("GET", "/v1/clock"), ("POST", "/v1/clock"), ("GET", "/healthz"), ("GET", "/readyz"), ("GET", "/metrics"),
    )
)  # fmt: skip
"""Routes about replicas, their storage, what follows it and the provider's programs, none of which the day has."""


@pytest.fixture(scope="module")
def day() -> Day:
    """The day, repeated once for all tests."""
    return repeat(requests())


def test_every_request_is_answered_as_it_was_and_changes_what_it_changed(day: Day) -> None:
    compare_kept("day/transcript.txt", day.transcript)


def test_every_history_tells_what_it_told(day: Day) -> None:
    compare_kept("day/histories.txt", day.histories)


def test_the_day_has_each_command_twice_and_each_event(day: Day) -> None:
    lines = (HERE / "names" / "commands.txt").read_text(encoding="utf-8").splitlines()
    names = {line.partition(":")[0] for line in lines}
    assert sum(count for name, count in day.commands.items() if name != "run_scheduling_cycle") >= COMMANDS_LEAST
    assert sorted(name for name in names if day.commands[name] < 2 - (name in ONCE)) == []
    events = (HERE / "names" / "events.txt").read_text(encoding="utf-8").split()
    assert sorted({*events} - {*day.events}) == sorted(NEVER_WRITTEN)


def test_the_day_asks_every_route_and_says_every_field_of_every_body(day: Day) -> None:
    routes = [route for route in OPERATIONS.values() if f"{route.method} {route.path}" not in OTHER_ROUTES]
    assert [route.path for route in routes if not day.asked[f"{route.method} {route.path}"]] == []
    bodies = {route.request for route in routes if route.has_body}
    fields = {f"{body.__name__}.{field.name}" for body in bodies for field in msgspec.structs.fields(body)}
    assert sorted(field for field in fields if not field.endswith(".command_id") and not day.asked[field]) == []

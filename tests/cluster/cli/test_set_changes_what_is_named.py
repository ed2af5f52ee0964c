"""`set` changes only the named fields of a record: accounts, QOS, reservations."""

from itertools import combinations
from typing import Any

import msgspec
import pytest

from forebay.cluster.cli.commands.options import CHANGE_TRIES
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas import accounts as v
from tests.cluster.cli.double import Double, forebay

ACCOUNT = v.AccountView(
    name="physics",
    parent="science",
    users=("alan", "ada"),
    limits={"GrpBB:bb/fast": "10GiB", "MaxJobsPerUser": "4"},
    user_limits={"ada": {"MaxJobsPerUser": "9"}},
    etag="a1",
)
QOS = v.QosView(
    name="high",
    priority=7,
    limits={"MaxBBPerUser:bb/native": "1GiB"},
    users=("alan",),
    accounts=(),
    deny_on_limit=True,
    etag="b2",
)
RESERVATION = v.ReservationView(
    name="night",
    state="INACTIVE",
    start="2030-01-30T22:00:00.000000Z",
    end="2030-01-31T06:00:00.000000Z",
    users=("alan",),
    accounts=("physics",),
    burst_buffer="fast:256MiB",
    held_bytes=0,
    etag="c3",
)
KINDS = {
    "account": ("/v1/accounts", v.AccountsAnswer(revision=1, accounts=(ACCOUNT,)), ACCOUNT),
    "qos": ("/v1/qos", v.QosAnswer(revision=1, qos=(QOS,)), QOS),
    "reservation": ("/v1/reservations", v.ReservationsAnswer(revision=1, reservations=(RESERVATION,)), RESERVATION),
}
ASKED = {"account": v.AccountRequest, "qos": v.QosRequest, "reservation": v.ReservationRequest}
NAMED: dict[str, tuple[tuple[tuple[str, ...], dict[str, Any]], ...]] = {
    "account": (
        (("--parent", ""), {"parent": ""}),
        (("--users", "alan,ada,ben"), {"users": ["alan", "ada", "ben"]}),
        (("--limit", "grpbb:BB/fast=1GiB"), {"limits": {"MaxJobsPerUser": "4", "grpbb:BB/fast": "1GiB"}}),
        (("--user-limit", "alan:MaxJobsPerUser=1"), {"user_limits": {
            "ada": {"MaxJobsPerUser": "9"}, "alan": {"MaxJobsPerUser": "1"}}}),
    ),
    "qos": (
        (("--priority", "9"), {"priority": 9}),
        (("--users", ""), {"users": []}),
        (("--accounts", "physics"), {"accounts": ["physics"]}),
        (("--no-deny-on-limit",), {"deny_on_limit": False}),
        (("--limit", "MaxBBPerUser:bb/native=-1"), {"limits": {}}),
    ),
    "reservation": (
        (("--start", "2030-01-30T23:00:00Z"), {"start": "2030-01-30T23:00:00Z"}),
        (("--end", "2030-02-01T00:00:00Z"), {"end": "2030-02-01T00:00:00Z"}),
        (("--users", "ben"), {"users": ["ben"]}),
        (("--accounts", ""), {"accounts": []}),
        (("--burst-buffer", "fast:1GiB"), {"burst_buffer": "fast:1GiB"}),
    ),
}  # fmt: skip


def sent(double: Double, kind: str, *words: str) -> dict[str, Any]:
    path, answer, record = KINDS[kind]
    double.answer("GET", path, answer)
    double.answer("PUT", f"{path}/{record.name}", answer)
    result = forebay(double.config, "policy", kind, "set", record.name, *words)
    assert result.exit_code == 0, result.stderr
    assert double.asked[-1].body["if_match"] == record.etag
    return fields_of(kind, msgspec.convert(double.asked[-1].body, ASKED[kind]))


def fields_of(kind: str, record: msgspec.Struct) -> dict[str, Any]:
    """Return all fields of a request, or of a record by the request's names, including defaults."""
    names = [name for name in ASKED[kind].__struct_fields__ if name not in ("command_id", "if_match")]
    values = ((name, getattr(record, name)) for name in names)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values}


@pytest.mark.parametrize("kind", KINDS)
def test_setting_one_field_resends_the_others_unchanged(double: Double, kind: str) -> None:
    for count in range(len(NAMED[kind]) + 1):
        for chosen in combinations(NAMED[kind], count):
            words = [word for some, _ in chosen for word in some]
            expected = fields_of(kind, KINDS[kind][2])
            for _, changes in chosen:
                expected |= changes
            assert sent(double, kind, *words) == expected, words


def test_removing_a_user_from_an_account_removes_the_users_limits(double: Double) -> None:
    body = sent(double, "account", "--users", "alan")
    assert (body["users"], body["user_limits"]) == (["alan"], {})


def test_a_limit_of_minus_one_is_removed(double: Double) -> None:
    words = ("--limit", "MaxJobsPerUser=-1", "--user-limit", "ada:maxjobsperuser=-1")
    body = sent(double, "account", *words)
    assert (body["limits"], body["user_limits"]) == ({"GrpBB:bb/fast": "10GiB"}, {})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--limit", "MaxJobsPerUser"),
        ("--limit", "=1"),
        ("--limit", "MaxJobsPerUser="),
        ("--user-limit", "MaxJobsPerUser=1"),
        ("--user-limit", "ada:MaxJobsPerUser"),
    ],
)
def test_a_malformed_limit_is_bad_input(double: Double, option: str, value: str) -> None:
    path, answer, record = KINDS["account"]
    double.answer("GET", path, answer)
    result = forebay(double.config, "policy", "account", "set", record.name, option, value)
    assert (result.exit_code, option in result.stderr, value.split(":")[-1] in result.stderr) == (2, True, True)
    assert not double.asked


def test_pool_limits_distinguish_case_in_pool_names(double: Double) -> None:
    body = sent(double, "account", "--limit", "GrpBB:bb/Fast=1GiB")
    assert body["limits"] == {**ACCOUNT.limits, "GrpBB:bb/Fast": "1GiB"}


def test_a_new_record_has_only_the_given_fields(double: Double) -> None:
    double.answer("GET", "/v1/qos", v.QosAnswer(revision=1, qos=()))
    double.answer("PUT", "/v1/qos/new", v.QosAnswer(revision=2, qos=()))
    forebay(double.config, "policy", "qos", "set", "new", "--users", "ada", "--limit", "MaxJobsPerUser=1")
    body = double.asked[-1].body
    assert body["if_match"] == "", "it must not exist"
    assert (body["users"], body["limits"], body.get("priority", 0)) == (["ada"], {"MaxJobsPerUser": "1"}, 0)


@pytest.mark.parametrize("words", [(), ("--end", "2030-02-01T00:00:00Z"), ("--burst-buffer", "fast:1GiB")])
def test_a_new_reservation_needs_its_end_and_space(double: Double, words: tuple[str, ...]) -> None:
    double.answer("GET", "/v1/reservations", v.ReservationsAnswer(revision=1, reservations=()))
    result = forebay(double.config, "policy", "reservation", "set", "new", *words)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert "reservation 'new' does not exist yet" in result.stderr and [one.method for one in double.asked] == ["GET"]


@pytest.mark.parametrize(("place", "tries"), [("if_match", CHANGE_TRIES), ("limits", 1)])
def test_a_concurrently_changed_record_is_reread_a_few_times(double: Double, place: str, tries: int) -> None:
    double.answer("GET", "/v1/qos", KINDS["qos"][1])
    double.refuse("PUT", "/v1/qos/high", 409, "wrong_state", "QOS high was changed", place=place)
    result = forebay(double.config, "policy", "qos", "set", "high", "--priority", "9")
    assert result.exit_code == ExitCode.REFUSED and "QOS high was changed" in result.stderr
    assert [one.method for one in double.asked] == ["GET", "PUT"] * tries

"""`forebay pool …` for pools in use: requests, formatted quantities, and warnings."""

import json

import msgspec
import pytest

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas.configuration import PoolRemovedAnswer
from forebay.cluster.schemas.jobs import PoolsAnswer, PoolView
from tests.cluster.cli.double import Double, forebay

GIB = 2**30
FAST = PoolView(
    name="fast", quantity_bytes=96 * GIB, granularity_bytes=GIB, held_bytes=32 * GIB, free_bytes=64 * GIB,
    is_default=True, buffers=2, revision=9,
)  # fmt: skip
NODES = PoolView(
    name="nodes", quantity_bytes=40, granularity_bytes=1, held_bytes=0, free_bytes=40, unit="nodes", revision=9
)


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        (("set", "fast", "--quantity", "96GiB"), {"quantity": "96GiB"}),
        (("drain", "fast"), {"out_of_service": "all"}),
        (("drain", "fast", "8GiB"), {"out_of_service": "8GiB"}),
        (("resume", "fast"), {"out_of_service": "0"}),
        (("set", "fast", "--granularity", "1GiB"), {"granularity": "1GiB"}),
        (("set", "fast", "--default"), {"default": True}),
        (("set", "fast", "--no-default"), {"default": False}),
        (("set", "fast", "--unit", "nodes"), {"unit": "nodes"}),
    ],
)
def test_each_pool_command_changes_only_what_it_names(
    double: Double, words: tuple[str, ...], sent: dict[str, object]
) -> None:
    double.answer("POST", "/v1/pools/fast/change", FAST)
    result = forebay(double.config, "pool", *words)
    assert result.exit_code == ExitCode.OK, result.stderr
    (asked,) = double.asked
    del asked.body["command_id"]
    assert {key: value for key, value in asked.body.items() if value is not None} == sent
    assert result.stdout == (
        "Pool fast: total 96GiB, free 64GiB, held 32GiB by 2 buffers, out of service 0, granularity 1GiB, default\n"
    )


def test_a_pool_of_nodes_is_printed_in_nodes(double: Double) -> None:
    double.answer("POST", "/v1/pools/nodes/add", NODES)
    result = forebay(double.config, "pool", "create", "nodes", "--quantity", "40N", "--unit", "nodes")
    assert result.stdout == "Pool nodes: total 40N, free 40N, held 0N by 0 buffers, out of service 0N, granularity 1N\n"
    assert double.asked[0].body["unit"] == "nodes" and "granularity" not in double.asked[0].body
    result = forebay(double.config, "pool", "create", "nodes", "--quantity", "40GiB", "--unit", "nodes")
    assert result.exit_code == ExitCode.BAD_INPUT and "--quantity, character 1" in result.stderr
    assert len(double.asked) == 1


def test_overcommitted_pools_cause_a_warning(double: Double) -> None:
    shrunk = msgspec.structs.replace(FAST, quantity_bytes=20 * GIB + 5, free_bytes=0, overcommitted_bytes=12 * GIB)
    double.answer("POST", "/v1/pools/fast/change", shrunk)
    result = forebay(double.config, "pool", "set", "fast", "--quantity", "20GiB")
    assert "12GiB more is in use than in service" in result.stderr
    assert "the last 5 cannot be used" in result.stderr
    result = forebay(double.config, "pool", "set", "fast", "--quantity", "20GiB", "--json")
    assert json.loads(result.stdout)["overcommitted_bytes"] == 12 * GIB


def test_a_missing_pool_is_not_found(double: Double) -> None:
    double.answer("GET", "/v1/pools", PoolsAnswer(revision=9, pools=(FAST, NODES)))
    assert forebay(double.config, "pool", "show", "nodes").stdout.startswith("Pool nodes: total 40N")
    assert forebay(double.config, "pool", "show", "none").exit_code == ExitCode.NOT_FOUND
    assert "40N" in forebay(double.config, "pool", "list").stdout


def test_deleting_a_used_pool_names_its_users(double: Double) -> None:
    double.answer("POST", "/v1/pools/nodes/remove", PoolRemovedAnswer(revision=9, removed="nodes", pools=(FAST,)))
    result = forebay(double.config, "pool", "delete", "nodes", "--yes")
    assert result.exit_code == ExitCode.OK and "fast" in result.stdout and "96GiB" in result.stdout
    assert json.loads(forebay(double.config, "pool", "delete", "nodes", "--yes", "--json").stdout)["removed"] == "nodes"
    double.refuse(
        "POST", "/v1/pools/fast/remove", 409, "wrong_state", "pool 'fast' is in use: job 1 of alan holds 1GiB"
    )
    result = forebay(double.config, "pool", "delete", "fast", "--yes")
    assert result.exit_code == ExitCode.REFUSED and "job 1 of alan" in result.stderr

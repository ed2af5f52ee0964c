"""`forebay status`: ten lines, and an exit code that shows whether anything needs attention."""

from __future__ import annotations

import msgspec

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.schemas import PoolsAnswer
from tests.cluster.cli.double import Double, forebay
from tests.cluster.cli.test_top import seen


def test_a_healthy_cluster_status_has_ten_lines_and_exit_code_0(double: Double) -> None:
    state = seen(pools=4)
    double.answer("GET", "/v1/overview", state.overview)
    double.answer("GET", "/v1/pools", state.pools)
    result = forebay(double.config, "status", columns=80)
    lines = result.stdout.splitlines()
    assert result.exit_code == ExitCode.OK and len(lines) == 10
    assert [line.split()[0] for line in lines[:5]] == ["Cluster", "Replicas", "Nodes", "Jobs", "Transfers"]
    assert lines[-1] == "Attention  no action needed" and all("%" in line for line in lines[5:9])
    assert max(map(len, lines)) <= 80


def test_each_item_that_needs_attention_is_shown_with_its_remedy_and_exit_code_1(double: Double) -> None:
    state = seen(needs=2, needs_count=3)
    double.answer("GET", "/v1/overview", state.overview)
    double.answer("GET", "/v1/pools", msgspec.structs.replace(state.pools, pools=()))
    result = forebay(double.config, "status")
    lines = result.stdout.splitlines()
    assert result.exit_code == ExitCode.REFUSED and "Attention  3 items" in lines and lines[-1] == "  and 1 more"
    for need in state.overview.needs:
        [line] = [line for line in lines if line.startswith(f"  {need.subject}: {need.sentence}")]
        assert need.remedy in line
    assert forebay(double.config, "status", "--json").exit_code == ExitCode.REFUSED


def test_only_the_fullest_pools_are_shown_in_the_status(double: Double) -> None:
    state = seen(pools=9)
    emptiest = msgspec.structs.replace(state.pools.pools[0], held_bytes=0, name="empty")
    double.answer("GET", "/v1/overview", state.overview)
    double.answer("GET", "/v1/pools", PoolsAnswer(revision=1, pools=(emptiest, *state.pools.pools[1:])))
    shown = forebay(double.config, "status").stdout
    assert "empty" not in shown and "5 more pools: forebay pool list" in shown

"""The alert rules and the dashboard: about metrics that there are; each alert fires when it should, and only then."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "packaging/monitoring/forebay.rules.yml"
DASHBOARD = ROOT / "packaging/monitoring/forebay-dashboard.json"
METRICS = ROOT / "tests/contract/names/metrics.txt"

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="no promtool: scripts/install-backends --prometheus")

_KINDS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_OF_PROMETHEUS = {"up", "ALERTS"}


class Case(NamedTuple):
    """Series in which one alert fires at the end of `minutes`, and series in which it does not."""

    fires: dict[str, str]
    silent: dict[str, str]
    minutes: int = 30


ON = 'job="forebay",instance="r1"'
"""Labels of a replica."""

SLOW = {f'forebay_journal_sync_seconds_bucket{{{ON},le="{le}"}}': f"0+{step}x60" for le, step in
        (("0.03", 0), ("0.1", 10), ("1.0", 100), ("+Inf", 100))}  # fmt: skip
QUICK = {f'forebay_journal_sync_seconds_bucket{{{ON},le="{le}"}}': "0+100x60" for le in ("0.03", "0.1", "1.0", "+Inf")}


def steady(name: str, value: float, more: str = "") -> dict[str, str]:
    return {f"{name}{{{ON}{',' if more else ''}{more}}}": f"{value}x120"}


LED = {'forebay_role{job="forebay",instance="r2",role="leader"}': "1x120"}

CASES = {
    "ForebayReplicaDown": Case(steady("up", 0) | LED, steady("up", 1) | LED),
    "ForebayNoLeader": Case(
        steady("up", 1) | steady("forebay_role", 0, 'role="leader"'),
        steady("up", 1) | steady("forebay_role", 1, 'role="leader"'),
    ),
    "ForebayLeaderChanges": Case({f"forebay_term{{{ON}}}": "1+1x60"}, {f"forebay_term{{{ON}}}": "1x26 2x30"}),
    "ForebayReplicaBehind": Case(steady("forebay_ready", 0), steady("forebay_ready", 1)),
    "ForebayReplicaLostData": Case(
        steady("forebay_peer_rejected", 1, 'peer="r2"'), steady("forebay_peer_rejected", 0, 'peer="r2"')
    ),
    "ForebaySlowDisk": Case(SLOW, QUICK),
    "ForebayJournalFull": Case(steady("forebay_journal_fill_ratio", 0.81), steady("forebay_journal_fill_ratio", 0.79)),
    "ForebayClockOff": Case(
        steady("forebay_clock_skewed", 0) | steady("forebay_clock_ahead_seconds", -31),
        steady("forebay_clock_skewed", 0) | steady("forebay_clock_ahead_seconds", 29),
    ),
    "ForebayLedgerDamaged": Case(
        steady("forebay_ledger_damaged_entries", 1), {f"forebay_ledger_damaged_entries{{{ON}}}": "1x5 0x60"}
    ),
    "ForebaySnapshotsFail": Case(
        {f"forebay_snapshots_failed_total{{{ON}}}": "0x20 1x60"}, {f"forebay_snapshots_failed_total{{{ON}}}": "1x60"}
    ),
    "ForebayNotCheckpointed": Case(
        steady("forebay_checkpoint_age_seconds", 3601)
        | steady("forebay_applied_index", 8)
        | steady("forebay_checkpoint_entry", 7),
        # Nothing has happened since.
        steady("forebay_checkpoint_age_seconds", 3601)
        | steady("forebay_applied_index", 7)
        | steady("forebay_checkpoint_entry", 7),
    ),
    "ForebayWitnessDisputes": Case(
        steady("forebay_witness_disputes", 1, 'witness="w"'), steady("forebay_witness_disputes", 0, 'witness="w"')
    ),
    "ForebayCertificateExpires": Case(
        steady("forebay_certificate_expiry_timestamp_seconds", 14 * 86400, 'kind="replica",name="r1"'),
        steady("forebay_certificate_expiry_timestamp_seconds", 15 * 86400, 'kind="replica",name="r1"'),
        90,
    ),
    "ForebayMemoryGrows": Case(
        steady("process_resident_memory_bytes", 4.1e9), steady("process_resident_memory_bytes", 3.9e9), 60
    ),
    "ForebayQueueFull": Case(
        {f"forebay_queue_full_total{{{ON}}}": "0x27 9x60"} | steady("forebay_journal_full_total", 0),
        steady("forebay_queue_full_total", 9) | steady("forebay_journal_full_total", 9),
    ),
    "ForebayNodeDown": Case(
        steady("forebay_node_up", 0, 'node="n1"'), {f'forebay_node_up{{{ON},node="n1"}}': "0x5 1x60"}
    ),
    "ForebayJobsStuck": Case(
        steady("forebay_jobs_stuck", 2, 'stage="teardown"'), steady("forebay_jobs_stuck", 0, 'stage="teardown"')
    ),
    "ForebayStagesFail": Case(
        {f'forebay_stage_failures_total{{{ON},stage="stage_in",node="n1"}}': "0+1x60"},
        {f'forebay_stage_failures_total{{{ON},stage="stage_in",node="n1"}}': "0x25 1x30"},
    ),
    "ForebayPoolFull": Case(
        steady("forebay_pool_free_bytes", 0, 'pool="p"') | steady("forebay_pool_jobs_waiting", 1, 'pool="p"'),
        steady("forebay_pool_free_bytes", 0, 'pool="p"') | steady("forebay_pool_jobs_waiting", 0, 'pool="p"'),
        90,
    ),
    "ForebayPoolShrunk": Case(
        steady("forebay_pool_out_of_service_bytes", 26, 'pool="p"') | steady("forebay_pool_bytes", 100, 'pool="p"'),
        steady("forebay_pool_out_of_service_bytes", 25, 'pool="p"') | steady("forebay_pool_bytes", 100, 'pool="p"'),
    ),
}


def alerts() -> dict[str, str]:
    """Return the expression of each alert by name; each stands on one line."""
    return dict(re.findall(r"- alert: (\w+)\n +expr: (.+)\n", RULES.read_text()))


def panels() -> Iterator[dict[str, Any]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield panel
        yield from panel.get("panels", ())


def queries() -> Iterator[tuple[str, str]]:
    """Yield the title and expression of all that the dashboard asks."""
    for panel in panels():
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def samples() -> set[str]:
    """Return the names of the samples that a replica gives."""
    found = set()
    for line in METRICS.read_text().splitlines():
        family, kind = line.split(":")[0].split()
        found.update(family + ending for ending in _KINDS[kind])
    return found


def asked(expression: str) -> set[str]:
    """Return the names of metrics in an expression: the words that no operator, function or label is."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\"[^\"]*\"", " ", expression)
    bare = re.sub(r"\b(by|on|without|group_left|ignoring)\s*\([^)]*\)", " ", bare)
    words = set(re.findall(r"\b[a-z][a-z0-9_:]*\b(?!\s*\()", bare))
    return words - {"or", "and", "unless", "by", "bool", "offset"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    assert PROMTOOL is not None
    return subprocess.run([PROMTOOL, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    there = samples() | _OF_PROMETHEUS
    named = [*alerts().items(), *queries()]
    assert len(named) > 50
    unknown = {(where, name) for where, expression in named for name in asked(expression) - there}
    assert unknown == set()
    assert all(asked(expression) for _, expression in named)


def test_every_alert_is_tried_and_says_what_to_do() -> None:
    assert list(alerts()) == list(CASES)
    text = RULES.read_text()
    for word in ("- alert:", "expr:", "for:", "severity: ", "summary:", "action:"):
        assert text.count(word) == len(CASES), word


@needs_promtool
def test_the_rules_are_what_prometheus_reads() -> None:
    found = promtool("check", "rules", RULES)
    assert found.returncode == 0 and f"{len(CASES)} rules found" in found.stdout, found


@needs_promtool
def test_each_alert_fires_when_it_should_and_only_then(tmp_path: Path) -> None:
    tests = []
    for name, case in CASES.items():
        for series, expected in ((case.fires, True), (case.silent, False)):
            tests.append(
                {
                    "interval": "1m",
                    "name": f"{name} {'fires' if expected else 'is silent'}",
                    "input_series": [{"series": key, "values": values} for key, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                            "eval_time": f"{case.minutes}m",
                            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": 1}] if expected else [],
                        }
                    ],
                }
            )
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": tests}))
    found = promtool("test", "rules", file)
    assert found.returncode == 0, found.stdout + found.stderr


@needs_promtool
def test_prometheus_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    rules = [
        {"record": "dashboard:x", "expr": expression.replace("$__rate_interval", "5m").replace("$job", ".+"),
         "labels": {"panel": f"{number}"}}
        for number, (_, expression) in enumerate(queries())
    ]  # fmt: skip
    file = tmp_path / "dashboard.yml"
    file.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    found = promtool("check", "rules", file)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_dashboard_has_what_grafana_needs_of_one() -> None:
    board = json.loads(DASHBOARD.read_text())
    assert board["schemaVersion"] >= 36 and board["uid"] and board["title"]
    variables = {one["name"]: one["type"] for one in board["templating"]["list"]}
    assert variables == {"datasource": "datasource", "job": "query"}
    everything = list(panels())
    assert len({panel["id"] for panel in everything}) == len(everything)
    taken: set[tuple[int, int]] = set()
    for panel in everything:
        place = panel["gridPos"]
        cells = {
            (column, line)
            for column in range(place["x"], place["x"] + place["w"])
            for line in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] == "row":
            continue
        assert panel["type"] in ("timeseries", "stat") and panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)
        for one in (panel, *panel["targets"]):
            assert one["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count('job=~"$job"') == target["expr"].count("forebay_") + target["expr"].count(
                "process_"
            ), panel["title"]
            assert target["legendFormat"]

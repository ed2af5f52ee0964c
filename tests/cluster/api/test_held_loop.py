"""Nothing that anybody asks holds a replica's loop: counted at every operation, over many jobs and a long history."""

from __future__ import annotations

import asyncio
import functools
import http.client
import json
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.operations import OPERATIONS
from forebay.cluster.security.tls import client_context
from forebay.cluster.serve import Replica
from forebay.cluster.system import SystemClock
from forebay.replica.model.jobs import Hold
from forebay.replica.values import ARRAY_SIZE_MAX, MICROSECONDS_PER_SECOND, Instant
from tests.cluster.harness import PATIENCE_S, PLAIN, SCRIPT, Harness, make_cluster, placed, until
from tests.cluster.loop_watch import LoopWatch
from tests.cluster.server.test_proposer import submit

JOBS = 1_000
"""Jobs of the state, count: what indexes or renders all of them in one go runs a hundred lines for each, and fails."""

BATCH = 500

LINES_MAX = 50_000
"""Lines of Python in one callback, count: some five milliseconds."""

BYTES_MAX = 8 * 1024 * 1024
"""What one callback takes, bytes: parts of an answer are put together in a few milliseconds."""


class Case(NamedTuple):
    """One request: `who` asks for `target`, the method being that of the operation."""

    who: str
    target: str
    body: dict[str, Any] | None = None
    status: int = 200
    or_status: int = 0
    """Status where the machine is so slow that the cluster is not as it was made."""


def cases(harness: Harness) -> dict[str, list[Case]]:
    """Return what is asked of each operation, so that it does as much as it can."""
    new = harness.new_id
    last = harness.controller.state.next_job - 1

    def command(**fields: Any) -> dict[str, Any]:
        return {"command_id": new(), **fields}

    stage = "".join(
        f"#DW stage_in type=file source={harness.config.file.parent}/in/{n} destination=$DW_JOB_STRIPED/{n}\n"
        for n in range(300)
    )
    much = harness.job(script="#!/bin/sh\n#DW jobdw capacity=8MiB access_mode=striped type=scratch\n" + stage)
    return {
        "submit_job": [Case("alice", "/v1/jobs", much, 201)],
        "list_jobs": [
            Case("alice", "/v1/jobs?limit=10000"),
            Case("alice", "/v1/jobs?limit=10000&after=0"),
            Case("alice", "/v1/jobs?user=nobody"),
            Case("alice", "/v1/jobs?limit=1&state=RUNNING"),
            Case("alice", "/v1/jobs?limit=10000&before=9999999&name=JOB&collapse=yes"),
            Case("alice", "/v1/jobs?state=PENDING&after=0&expected=yes"),
        ],
        "send_commands": [
            Case("alice", "/v1/commands", {"commands": [
                {"type": "hold_job", "job_id": 1 + n, **command()} for n in range(300)
            ] + [{"type": "submit_job", **harness.job(hold=True)} for _ in range(200)]}),
        ],
        "show_job": [Case("alice", f"/v1/jobs/{job}") for job in (1, 5, last)],
        "show_job_history": [Case("alice", f"/v1/jobs/{job}/history") for job in (1, 5, last)],
        "explain_job": [Case("alice", f"/v1/jobs/{last}/why"), Case("alice", "/v1/jobs/3/why?at=700")],
        "estimate_job": [Case("alice", f"/v1/jobs/{last}/estimate")],
        "update_job": [Case("alice", "/v1/jobs/151/update", command(nice=5))],
        "cancel_job": [Case("alice", "/v1/jobs/151/cancel", command())],
        "hold_job": [Case("alice", "/v1/jobs/154/hold", command())],
        "release_job": [Case("alice", "/v1/jobs/154/release", command())],
        "suspend_job": [Case("alice", "/v1/jobs/154/suspend", command(), 409)],
        "resume_job": [Case("alice", "/v1/jobs/154/resume", command(), 409)],
        "requeue_job": [Case("alice", "/v1/jobs/154/requeue", command(), 409)],
        "clear_buffer": [Case("operator", "/v1/jobs/154/clear", command(), 409)],
        "export_buffer": [Case("operator", "/v1/jobs/1/export", command(), 409)],
        "list_accounts": [Case("alice", "/v1/accounts")],
        "set_account": [Case("operator", f"/v1/accounts/a{n}", command(users=["alice"])) for n in range(3)],
        "delete_account": [Case("operator", "/v1/accounts/a1/delete", command())],
        "list_qos": [Case("alice", "/v1/qos")],
        "set_qos": [Case("operator", "/v1/qos/q", command())],
        "delete_qos": [Case("operator", "/v1/qos/q/delete", command())],
        "list_licenses": [Case("alice", "/v1/licenses")],
        "set_license": [Case("operator", "/v1/licenses/l", command(total=3))],
        "delete_license": [Case("operator", "/v1/licenses/l/delete", command())],
        "list_revocations": [Case("operator", "/v1/revocations")],
        "revoke_certificate": [Case("operator", "/v1/revocations/user:nobody", command(reason="test"))],
        "unrevoke_certificate": [Case("operator", "/v1/revocations/user:nobody/delete", command())],
        "list_reservations": [Case("alice", "/v1/reservations")],
        "set_reservation": [Case("operator", "/v1/reservations/r", command(
            start="2100-01-01T00:00:00Z", end="2100-01-02T00:00:00Z", users=["alice"], burst_buffer="fast:8MiB",
        ))],
        "delete_reservation": [Case("operator", "/v1/reservations/r/delete", command())],
        "show_scheduling_rules": [Case("alice", "/v1/scheduling")],
        "list_partitions": [Case("alice", "/v1/partitions")],
        "set_partition": [Case("operator", "/v1/partitions/p", command(nodes="ALL"))],
        "delete_partition": [Case("operator", "/v1/partitions/p/delete", command())],
        "list_usage": [Case("alice", "/v1/usage")],
        "reset_usage": [Case("operator", "/v1/usage/reset", command(account="a2"))],
        "list_pools": [Case("alice", "/v1/pools")],
        "set_pool": [Case("operator", "/v1/pools/more", command(quantity="96MiB", granularity="8MiB"))],
        "add_pool": [Case("operator", "/v1/pools/extra/add", command(quantity="96MiB", granularity="8MiB"))],
        "change_pool": [Case("operator", "/v1/pools/extra/change", command(quantity="104MiB"))],
        "remove_pool": [Case("operator", "/v1/pools/extra/remove", command())],
        "list_filesystems": [Case("alice", "/v1/filesystems")],
        "add_filesystem": [Case("operator", "/v1/filesystems/fast/add", command(path="/bb/fast"))],
        "remove_filesystem": [Case("operator", "/v1/filesystems/fast/remove", command())],
        "list_buffers": [Case("alice", "/v1/buffers"), Case("alice", "/v1/buffers?live=yes")],
        "clear_persistent_buffer": [Case("operator", "/v1/persistent/none/clear", command(), 409)],
        "show_burst": [Case("alice", "/v1/burst"), Case("alice", "/v1/burst?format=text")],
        "show_provider_status": [Case("alice", "/v1/bbstat", None, 409)],
        "show_configuration": [Case("operator", "/v1/configuration")],
        "configure_site": [Case("operator", "/v1/configuration", command(
            settings=[{"key": "StageInTimeout", "value": "600"}], partial=True,
        ))],
        "compare_configuration": [Case("operator", "/v1/configuration/diff", {"settings": [], "partial": True})],
        "list_nodes": [Case("alice", "/v1/nodes")],
        "admit_node": [Case("operator", "/v1/nodes/n9/admit", command())],
        "drain_node": [Case("operator", "/v1/nodes/n1/drain", command(reason="test"))],
        "resume_node": [Case("operator", "/v1/nodes/n1/resume", command())],
        "lose_node": [Case("operator", "/v1/nodes/n1/lost", command(dry_run=True), 409, or_status=200)],
        "register_node": [Case("n1", "/v1/agents/n1/register", command(instance="i", storage_id="s", cpus=64))],
        "poll_orders": [Case("n1", "/v1/agents/n1/poll", {"instance": "i", "wait_s": 0})],
        "report_operations": [Case("n1", "/v1/agents/n1/reports", {"reports": []})],
        "list_transfers": [Case("alice", "/v1/transfers")],
        "show_job_transfers": [Case("alice", "/v1/transfers/1")],
        "list_receipts": [Case("alice", "/v1/transfers/1/receipts")],
        "register_scheduler": [Case("slurm", "/v1/scheduler/register", command(cluster="6f1c", address="head1"))],
        "show_scheduler_site": [Case("slurm", "/v1/scheduler/site")],
        "list_schedulers": [Case("alice", "/v1/schedulers")],
        "release_scheduler": [Case("operator", "/v1/schedulers/none/release", command(), 400)],
        "list_external_jobs": [Case("slurm", "/v1/external-jobs")],
        "show_external_job": [Case("slurm", "/v1/external-jobs/42")],
        "set_up_external_job": [Case("slurm", "/v1/external-jobs/42/setup", command(
            cluster="6f1c", user="alice", uid=1000, gid=1000, script=much["script"],
        ), 400)],
        "stage_in_external_job": [Case("slurm", "/v1/external-jobs/42/stage-in", command(cluster="6f1c"), 404)],
        "begin_external_job_run": [Case("slurm", "/v1/external-jobs/42/begin-run", command(cluster="6f1c"), 404)],
        "end_external_job_run": [Case("slurm", "/v1/external-jobs/42/end-run", command(cluster="6f1c"))],
        "stage_out_external_job": [Case("slurm", "/v1/external-jobs/42/stage-out", command(cluster="6f1c"))],
        "tear_down_external_job": [Case("slurm", "/v1/external-jobs/42/teardown", command(cluster="6f1c", hurry=True))],
        "miss_external_job": [Case("slurm", "/v1/external-jobs/42/miss", command(cluster="6f1c", state="staged-in"))],
        "list_persistent": [Case("slurm", "/v1/persistent")],
        "make_persistent": [
            Case("slurm", "/v1/persistent/pond/make",
                 command(cluster="6f1c", user="alice", uid=1000, gid=1000, pool="fast", size=1), 400)
        ],
        "remove_persistent": [
            Case("slurm", "/v1/persistent/pond/remove", command(cluster="6f1c", user="alice", uid=1000, gid=1000))
        ],
        "list_members": [Case("alice", "/v1/members")],
        "add_member": [Case("operator", "/v1/members", command(name="r9", peer="10.0.0.1:1", api="10.0.0.1:2"), 409)],
        "remove_member": [Case("operator", "/v1/members/r9/remove", command(), 409)],
        "replace_member": [Case("operator", "/v1/members/r9/replace", command(), 409)],
        "update_member": [Case("operator", "/v1/members/r9/update", command(peer="10.0.0.1:1"), 409)],
        "transfer_leadership": [Case("operator", "/v1/members/transfer", command(), 409)],
        "list_drills": [Case("alice", "/v1/drills")],
        "show_drill": [Case("alice", "/v1/drills/1", None, 404)],
        "start_drill": [
            Case("operator", "/v1/drills",
                 command(scenario="switchover", target="r2", lasts_s=60, forced=["lag"] * 64), 201)
        ],
        "confirm_drill": [Case("operator", "/v1/drills/1/confirm", command(), 403)],
        "abort_drill": [Case("operator", "/v1/drills/1/abort", command(reason="x" * 900))],
        "end_drill": [Case("operator", "/v1/drills/2/end", command(verdict="passed", sentence="x"), 400)],
        "probe_drill": [Case("operator", "/v1/drills/1/probe", command())],
        "lock_drills": [Case("operator", "/v1/drill-locks", command(reason="x"))],
        "unlock_drills": [Case("operator", "/v1/drill-locks/operator/remove", command())],
        "show_feature_level": [Case("operator", "/v1/feature-level")],
        "raise_feature_level": [Case("operator", "/v1/feature-level", command(level=2), 409)],
        "list_sessions": [Case("operator", "/v1/sessions")],
        "open_session": [Case("alice", "/v1/sessions", command())],
        "close_session": [Case("alice", "/v1/sessions/1/close", command(), 404)],
        "show_clock": [Case("alice", "/v1/clock")],
        "set_clock": [Case("operator", "/v1/clock", command(at="2001-01-01T00:00:00Z"), 409)],
        "show_overview": [Case("alice", "/v1/overview")],
        "list_sinks": [Case("operator", "/v1/sinks")],
        "show_status": [Case("alice", "/v1/status"), Case("alice", "/v1/status?digest=yes")],
        "list_digests": [Case("operator", "/v1/digests")],
        "show_state_digest": [
            Case("operator", "/v1/state-digest"),
            Case("operator", "/v1/state-digest?at=1"),
        ],
        "show_history": [
            Case("operator", "/v1/history?limit=10000"), Case("alice", "/v1/history?user=alice&limit=10000"),
            Case("alice", "/v1/history?job=5"), Case("operator", "/v1/history?kind=rejected&limit=10000"),
        ],
        "list_leaders": [Case("alice", "/v1/history/leaders?limit=1000")],
        "list_pool_use": [Case("alice", "/v1/history/pools")],
        "show_diff": [Case("operator", "/v1/diff?from=1&limit=10000"), Case("alice", "/v1/diff?from=700&job=3")],
        "read_ledger": [Case("operator", "/v1/ledger?limit=1000")],
        "read_stored_entries": [Case("r1", "/v1/ledger/history?last=8")],
        "read_checkpoint": [Case("auditor", "/v1/tlog/checkpoint")],
        "read_tile": [Case("auditor", "/v1/tlog/tile/0/000.p/1"), Case("auditor", "/v1/tlog/tile/entries/000.p/7")],
        "list_log_keys": [Case("auditor", "/v1/tlog/keys")],
        "sign_checkpoint": [Case("r1", "/v1/tlog/sign", {"size": 3, "root": "0" * 64})],
        "take_checkpoint": [Case("r1", "/v1/tlog/checkpoint", {"note": "none"}, 409)],
        "prove_job": [Case("operator", f"/v1/jobs/{last}/proof")],
        "save_snapshot": [Case("operator", "/v1/snapshots")],
        "list_snapshots": [Case("operator", "/v1/snapshots")],
        "fetch_snapshot": [Case("operator", f"/v1/snapshots/snapshot-{'0' * 19}1-1.fbs", None, 404)],
        "stream_events": [Case("alice", "/v1/events?from=0")],
        "show_openapi": [Case("alice", "/v1/openapi.json")],
        "show_health": [Case("alice", "/healthz")],
        "show_readiness": [Case("alice", "/readyz")],
        "show_metrics": [Case("alice", "/metrics")],
    }  # fmt: skip


PAGES = tuple(Case("alice", f"/page{path}") for path in ("", "/jobs", "/jobs/1", "/transfers", "/nodes"))


def ask(config: Config, method: str, case: Case, events: int, replica: str = "r1") -> tuple[int, bytes]:
    """Ask as a client of another process does: in a thread, which is not watched. Of a stream so many events."""
    address = config.replica(replica).api
    connection = http.client.HTTPSConnection(
        "127.0.0.1", address.port, timeout=PATIENCE_S, context=client_context(config.tls_files(case.who))
    )
    try:
        body = None if case.body is None else json.dumps(case.body)
        connection.request(method, case.target, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        if not case.target.startswith("/v1/events"):
            return response.status, response.read()
        read = b""
        while read.count(b"\ndata: ") < events:
            read += response.read1(65536)
        return response.status, b""
    finally:
        connection.close()


def watched(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test on asyncio's own loop, whose turns can be watched."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        asyncio.run(test(*arguments, **fixtures))

    return run


async def populate(harness: Harness, jobs: int = JOBS) -> int:
    """Fill the state and the ledger; return how many events there are."""
    register = {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 64}
    await harness.ask("POST", "/v1/agents/n1/register", register, who="n1")
    for task in ("0-99", "1-50"):
        assert (await harness.submit(array=task, script=PLAIN, nice=3)).status == 201
    for _ in range(jobs // BATCH):
        answers = [
            submit(harness, script=SCRIPT if n % 2 else PLAIN, hold=Hold.NONE if n % 3 else Hold.USER)
            for n in range(BATCH)
        ]
        await asyncio.gather(*answers)
    return sum(
        len(entry.events) for one in await harness.applied() if one.batch is not None for entry in one.batch.entries
    )


def test_every_operation_has_a_case(config: Config) -> None:
    @watched
    async def run() -> None:
        async with Harness(config) as harness:
            assert list(cases(harness)) == list(OPERATIONS)

    run()


@pytest.mark.campaign(3)
@watched
async def test_no_operation_holds_the_loop(config: Config) -> None:
    watch, held, wrong = LoopWatch(), {}, {}
    async with Harness(config) as harness:
        events = await populate(harness)
        # Everything is read from the ledger, as after a start, and every index is made anew.
        await harness.restart()
        with watch.watching():
            assert await harness.service.publisher.publish()
            most = watch.callback
            if most.lines > LINES_MAX or most.size_bytes > BYTES_MAX:
                held["a checkpoint"] = most
            for name, asked in {**cases(harness), "page": PAGES}.items():
                for case in asked:
                    watch.reset()
                    method = "GET" if name == "page" else OPERATIONS[name].method
                    status, body = await asyncio.to_thread(ask, config, method, case, events)
                    if status not in (case.status, case.or_status):
                        wrong[name] = (case.target, status, body[:200])
                    most = watch.callback
                    if most.lines > LINES_MAX or most.size_bytes > BYTES_MAX:
                        held[f"{name} {case.target}"] = most
    assert not wrong
    assert not held


@watched
async def test_many_who_read_all_of_history_at_once_do_no_more_in_a_turn_than_one(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.cluster.api.history_service.service.ANSWER_S", 60.0)  # it is niced, and just starting
    watch = LoopWatch()
    stream = Case("alice", "/v1/events?from=0")
    history, jobs = Case("bob", "/v1/jobs/1/history"), Case("alice", "/v1/jobs?limit=10000")
    async with Harness(config) as harness:
        events = await populate(harness, JOBS // 3)
        await harness.restart()
        with watch.watching():
            asked = [
                asyncio.to_thread(ask, config, "GET", case, events) for case in [stream] * 6 + [history] * 2 + [jobs]
            ]
            answers = await asyncio.gather(*asked)
    assert {status for status, _ in answers} == {200}
    assert watch.turn.lines <= LINES_MAX


ARRAY = f"0-{ARRAY_SIZE_MAX - 1}"

PATHS = """#!/bin/sh
#DW jobdw capacity=8MiB access_mode=striped type=scratch
#DW stage_in type=file source={directory}/in/%a destination=$DW_JOB_STRIPED/in
#DW stage_out type=file source=$DW_JOB_STRIPED/out destination={directory}/out/%a
"""


def of_arrays(directory: Path, new: Callable[[], str]) -> dict[str, Case]:
    """Return what can be asked about the largest array, in order: four of them are made first."""
    job = {"name": "job", "time_limit_s": 60, "workdir": str(directory / "out")}

    def submitted(script: str, **fields: Any) -> dict[str, Any]:
        return {"command_id": new(), "script": script, "array": ARRAY, **job, **fields}

    def asked(**fields: Any) -> dict[str, Any]:
        return {"command_id": new(), **fields}

    paths, third = PATHS.format(directory=directory), 2 * ARRAY_SIZE_MAX + 1
    many = paths.replace("%a", "x") + "".join(
        line.replace("%a", str(n)) + "\n" for n in range(250) for line in paths.splitlines()[2:3]
    )
    node = {"instance": "i", "storage_id": "s", "cpus": 2 * ARRAY_SIZE_MAX}
    return {
        "submit": Case("alice", "/v1/jobs", submitted(PLAIN, nice=3), 201),
        "submit with buffers": Case("alice", "/v1/jobs", submitted(SCRIPT, name="other"), 201),
        "submit with paths of each task": Case("alice", "/v1/jobs", submitted(paths), 201),
        "submit with a throttle": Case("alice", "/v1/jobs", submitted(PLAIN, array=f"{ARRAY}%500", hold=True), 201),
        "submit that waits for whole arrays": Case("alice", "/v1/jobs", submitted(
            PLAIN, name="waits", dependencies=["afterany:1", f"afterany:{ARRAY_SIZE_MAX + 1}"]
        ), 201),
        "update": Case("alice", f"/v1/jobs/{third}/update", asked(nice=7, comment="x")),
        "hold": Case("alice", f"/v1/jobs/{third}/hold", asked()),
        "release": Case("alice", f"/v1/jobs/{third}/release", asked()),
        "requeue": Case("alice", "/v1/jobs/1/requeue", asked(), 409),
        "suspend": Case("alice", f"/v1/jobs/{third}/suspend", asked(), 409),
        "hold some": Case("alice", "/v1/jobs/1_%5B500-899%5D/hold", asked()),
        "cancel": Case("alice", f"/v1/jobs/{third}/cancel", asked()),
        "cancel those with buffers": Case("alice", f"/v1/jobs/{ARRAY_SIZE_MAX + 1}/cancel", asked()),
        "room for all": Case("n1", "/v1/agents/n1/register", asked(**node)),
        "release what runs at once": Case("alice", f"/v1/jobs/{third + ARRAY_SIZE_MAX}/release", asked()),
        "many directives in bulk": Case("alice", "/v1/commands", {"commands": [
            {"type": "submit_job", "command_id": new(), "script": many, **job} for _ in range(10)
        ]}, 200),
        "in bulk": Case("alice", "/v1/commands", {"commands": [
            {"type": "submit_job", **submitted(SCRIPT)} for _ in range(3)
        ] + [{"type": "hold_job", "job_id": 1, **asked()}, {"type": "cancel_job", "job_id": 1, **asked()}]}),
    }  # fmt: skip


class Slowed(SystemClock):
    """A clock whose seconds become longer: what is counted is slow, and nobody is to stand for election for it."""

    def __init__(self) -> None:
        self._since_s = math.inf
        self._began = super().now(), super().monotonic_s()

    def slow_down(self) -> None:
        self._since_s = super().monotonic_s()

    def now(self) -> Instant:
        began, began_s = self._began
        return Instant(began + int((self.monotonic_s() - began_s) * MICROSECONDS_PER_SECOND))

    def monotonic_s(self) -> float:
        now_s = super().monotonic_s()
        return min(now_s, self._since_s) + max(0.0, now_s - self._since_s) / 100


@pytest.mark.campaign(3)
@watched
async def test_no_command_about_the_largest_array_holds_the_loop_of_the_leader_or_of_a_follower(tmp_path: Path) -> None:
    config = placed(make_cluster(tmp_path, replicas=3), tmp_path / "storage")
    failures: list[BaseException] = []

    def fail(error: BaseException) -> NoReturn:
        failures.append(error)
        raise error

    watch, held, wrong, clock = LoopWatch(), {}, {}, Slowed()
    # Of one loop, so that each callback of either is watched; the third is away.
    replicas = {name: Replica(config, name, clock=clock, fail=fail, found_without=("r3",)) for name in ("r1", "r2")}
    for replica in replicas.values():
        await replica.start()
    try:
        await until(lambda: any(replica.controller.leads for replica in replicas.values()))
        leader = next(name for name, replica in replicas.items() if replica.controller.leads)
        leads = replicas[leader].controller
        (follower,) = (replica.controller for name, replica in replicas.items() if name != leader)
        await until(lambda: leads.state.feature_level > 0 and follower.state.revision == leads.state.revision)
        clock.slow_down()
        with watch.watching():
            for name, case in of_arrays(tmp_path, lambda: new_command_id(clock)).items():
                watch.reset()
                status, body = 503, b""
                while status == 503:  # nobody waits for ever, and what is counted is slow: the same id is sent again
                    status, body = await asyncio.to_thread(ask, config, "POST", case, 0, leader)
                await until(lambda: follower.state.revision == leads.state.revision)
                if status not in (case.status, case.or_status):
                    wrong[name] = (status, body[:200])
                if watch.callback.lines > LINES_MAX or watch.callback.size_bytes > BYTES_MAX:
                    held[name] = watch.callback
        assert follower.state == leads.state
    finally:
        for replica in replicas.values():
            await replica.stop()
    assert not wrong
    assert not held
    assert not failures

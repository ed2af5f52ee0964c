"""Who may ask what: the whole product of roles and routes, written down once more, by hand."""

from collections.abc import Iterator
from typing import Any

import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas.operations import OPERATIONS, ApiOperation
from forebay.cluster.security.identity import Role
from tests.cluster.harness import Harness, story

O, U, A, R, S = Role.OPERATOR, Role.USER, Role.AGENT, Role.REPLICA, Role.SCHEDULER  # noqa: E741
WHO = {
    O: "operator",
    U: "alice",
    A: "n1",
    R: "r1",
    S: "slurm",
    Role.AUDITOR: "auditor",
    Role.MONITOR: "prometheus",
    Role.DRILL: "dora",
    Role.HELPER: "h1",
    Role.GATEWAY: "local",
}

ALLOWED: dict[tuple[str, str], str] = {
    ("POST", "/v1/jobs"): "operator user",
    ("GET", "/v1/jobs"): "operator user",
    ("POST", "/v1/commands"): "operator user",
    ("GET", "/v1/jobs/{id}"): "operator user",
    ("GET", "/v1/jobs/{id}/history"): "operator user scheduler",
    ("GET", "/v1/jobs/{id}/why"): "operator user scheduler",
    ("POST", "/v1/jobs/{id}/cancel"): "operator user",
    ("POST", "/v1/jobs/{id}/hold"): "operator user",
    ("POST", "/v1/jobs/{id}/release"): "operator user",
    ("POST", "/v1/jobs/{id}/suspend"): "operator user",
    ("POST", "/v1/jobs/{id}/resume"): "operator user",
    ("POST", "/v1/jobs/{id}/requeue"): "operator user",
    ("POST", "/v1/jobs/{id}/clear"): "operator",
    ("POST", "/v1/jobs/{id}/export"): "operator user",
    ("POST", "/v1/scheduler/register"): "scheduler",
    ("GET", "/v1/scheduler/site"): "scheduler",
    ("GET", "/v1/schedulers"): "operator user",
    ("POST", "/v1/schedulers/{name}/release"): "operator",
    ("GET", "/v1/external-jobs"): "scheduler",
    ("GET", "/v1/external-jobs/{job}"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/setup"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/stage-in"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/begin-run"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/end-run"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/stage-out"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/teardown"): "scheduler",
    ("POST", "/v1/external-jobs/{job}/miss"): "scheduler",
    ("GET", "/v1/persistent"): "scheduler",
    ("POST", "/v1/persistent/{name}/make"): "scheduler",
    ("POST", "/v1/persistent/{name}/remove"): "scheduler",
    ("POST", "/v1/persistent/{name}/clear"): "operator",
    ("GET", "/v1/pools"): "operator user",
    ("PUT", "/v1/pools/{name}"): "operator",
    ("GET", "/v1/buffers"): "operator user",
    ("GET", "/v1/burst"): "operator user",
    ("GET", "/v1/nodes"): "operator user drill",
    ("POST", "/v1/nodes/{name}/admit"): "operator",
    ("POST", "/v1/nodes/{name}/drain"): "operator",
    ("POST", "/v1/nodes/{name}/lost"): "operator",
    ("POST", "/v1/nodes/{name}/resume"): "operator",
    ("GET", "/v1/transfers"): "operator user drill",
    ("GET", "/v1/transfers/{id}"): "operator user scheduler",
    ("GET", "/v1/transfers/{id}/receipts"): "operator user",
    ("GET", "/v1/members"): "operator user agent replica scheduler drill helper",
    ("POST", "/v1/members"): "operator",
    ("POST", "/v1/members/{name}/update"): "operator",
    ("POST", "/v1/members/transfer"): "operator drill",
    ("POST", "/v1/members/{name}/remove"): "operator",
    ("POST", "/v1/members/{name}/replace"): "operator",
    ("GET", "/v1/drills"): "operator user drill",
    ("GET", "/v1/drills/{drill}"): "operator user drill helper",
    ("POST", "/v1/drills"): "operator drill",
    ("POST", "/v1/drills/{drill}/confirm"): "operator",
    ("POST", "/v1/drills/{drill}/abort"): "operator drill",
    ("POST", "/v1/drills/{drill}/end"): "operator drill",
    ("POST", "/v1/drills/{drill}/probe"): "operator drill",
    ("POST", "/v1/drill-locks"): "operator",
    ("POST", "/v1/drill-locks/{name}/remove"): "operator",
    ("GET", "/v1/status"): "operator user agent replica scheduler drill helper",
    ("GET", "/v1/ledger"): "operator replica",
    ("GET", "/v1/ledger/history"): "replica",
    ("GET", "/v1/digests"): "operator replica drill",
    ("GET", "/v1/state-digest"): "operator replica drill",
    ("GET", "/v1/history"): "operator user drill",
    ("GET", "/v1/history/leaders"): "operator user drill",
    ("GET", "/v1/history/pools"): "operator user",
    ("GET", "/v1/overview"): "operator user",
    ("GET", "/v1/sinks"): "operator",
    ("GET", "/v1/diff"): "operator user",
    ("GET", "/v1/tlog/checkpoint"): "operator replica auditor",
    ("GET", "/v1/tlog/tile/{tile}"): "operator replica auditor",
    ("GET", "/v1/tlog/keys"): "operator replica auditor",
    ("POST", "/v1/tlog/sign"): "replica",
    ("POST", "/v1/tlog/checkpoint"): "replica",
    ("GET", "/v1/jobs/{id}/proof"): "operator",
    ("GET", "/v1/feature-level"): "operator",
    ("POST", "/v1/feature-level"): "operator",
    ("GET", "/v1/clock"): "operator user",
    ("GET", "/v1/sessions"): "operator user",
    ("POST", "/v1/sessions"): "operator user",
    ("POST", "/v1/sessions/{session}/close"): "operator user",
    ("POST", "/v1/clock"): "operator",
    ("POST", "/v1/snapshots"): "operator",
    ("GET", "/v1/snapshots"): "operator",
    ("GET", "/v1/snapshots/{name}"): "operator",
    ("GET", "/v1/events"): "operator user",
    ("POST", "/v1/agents/{node}/register"): "agent",
    ("POST", "/v1/agents/{node}/poll"): "agent",
    ("POST", "/v1/agents/{node}/reports"): "agent",
    ("GET", "/v1/openapi.json"): "operator user agent replica scheduler drill helper",
    ("GET", "/healthz"): "operator user agent replica scheduler drill helper monitor",
    ("GET", "/readyz"): "operator user agent replica scheduler drill helper monitor",
    ("GET", "/metrics"): "operator user agent replica scheduler drill helper monitor",
    ("POST", "/v1/pools/{name}/add"): "operator",
    ("POST", "/v1/pools/{name}/change"): "operator",
    ("POST", "/v1/pools/{name}/remove"): "operator",
    ("GET", "/v1/filesystems"): "operator user agent",
    ("POST", "/v1/filesystems/{name}/add"): "operator",
    ("POST", "/v1/filesystems/{name}/remove"): "operator",
    ("GET", "/v1/configuration"): "operator",
    ("POST", "/v1/configuration"): "operator",
    ("POST", "/v1/configuration/diff"): "operator",
    ("GET", "/v1/bbstat"): "operator user",
    ("GET", "/v1/jobs/{id}/estimate"): "operator user",
    ("GET", "/v1/accounts"): "operator user",
    ("PUT", "/v1/accounts/{name}"): "operator",
    ("POST", "/v1/accounts/{name}/delete"): "operator",
    ("GET", "/v1/qos"): "operator user",
    ("PUT", "/v1/qos/{name}"): "operator",
    ("POST", "/v1/qos/{name}/delete"): "operator",
    ("GET", "/v1/licenses"): "operator user",
    ("PUT", "/v1/licenses/{name}"): "operator",
    ("POST", "/v1/licenses/{name}/delete"): "operator",
    ("GET", "/v1/revocations"): "operator",
    ("PUT", "/v1/revocations/{certificate}"): "operator",
    ("POST", "/v1/revocations/{certificate}/delete"): "operator",
    ("GET", "/v1/reservations"): "operator user",
    ("PUT", "/v1/reservations/{name}"): "operator",
    ("POST", "/v1/reservations/{name}/delete"): "operator",
    ("GET", "/v1/partitions"): "operator user",
    ("PUT", "/v1/partitions/{name}"): "operator",
    ("POST", "/v1/partitions/{name}/delete"): "operator",
    ("GET", "/v1/usage"): "operator user",
    ("POST", "/v1/usage/reset"): "operator",
    ("POST", "/v1/jobs/{id}/update"): "operator user",
    ("GET", "/v1/scheduling"): "operator user",
}


def test_every_route_is_in_the_table_of_permissions() -> None:
    assert {(route.method, route.path) for route in OPERATIONS.values()} == set(ALLOWED)


def test_an_auditor_reads_what_is_proven_of_the_ledger_and_nothing_else() -> None:
    mine = {route.path for route in OPERATIONS.values() if Role.AUDITOR in route.roles}
    assert mine == {"/v1/tlog/checkpoint", "/v1/tlog/tile/{tile}", "/v1/tlog/keys"}
    assert {route.method for route in OPERATIONS.values() if Role.AUDITOR in route.roles} == {"GET"}


def test_a_monitor_reads_metrics_and_health_and_nothing_else() -> None:
    mine = {(route.method, route.path) for route in OPERATIONS.values() if Role.MONITOR in route.roles}
    assert mine == {("GET", path) for path in ("/healthz", "/readyz", "/metrics")}


def test_a_helper_reads_whether_a_drill_is_under_way_and_what_everybody_may() -> None:
    everybody = {
        route.name for route in OPERATIONS.values() if Role.SCHEDULER in route.roles and Role.AGENT in route.roles
    }
    assert {route.name for route in OPERATIONS.values() if Role.HELPER in route.roles} == {*everybody, "show_drill"}


def product() -> Iterator[tuple[ApiOperation[Any, Any], Role, bool]]:
    for route in OPERATIONS.values():
        for role in Role:
            yield route, role, role.value in ALLOWED[route.method, route.path].split()


def target(route: ApiOperation[Any, Any]) -> str:
    path = route.path.replace("{id}", "1").replace("{name}", "n1").replace("{node}", "n1").replace("{job}", "42")
    return path.replace("{tile}", "0/000.p/1").replace("{drill}", "1")


@story
async def test_each_role_may_ask_exactly_what_the_table_says(config: Config) -> None:
    async with Harness(config) as harness:
        await harness.submit(hold=True)
        assert await harness.service.publisher.publish()
        for route, role, allowed in product():
            if route.path == "/v1/events" and allowed:
                continue
            revision = harness.controller.state.revision
            body: dict[str, Any] | None = {} if route.has_body else None
            own = role is Role.SCHEDULER and "/v1/external-jobs" not in route.path and "{id}" in route.path
            answer = await harness.ask(route.method, target(route), body, who=WHO[role])
            asked = f"{role} {route.method} {route.path}: {answer}"
            if allowed and own:
                # It came past the permission, to a job that is none of its external jobs.
                assert answer.status == 403, asked
                assert answer.sentence == "scheduler slurm may read only its own external jobs", asked
            elif allowed:
                # The empty body of a write is refused as such: the request came past the permission.
                assert answer.status != 403, asked
                # Here no provider can be asked for bbstat, which the handler says.
                more = {"/v1/bbstat": "wrong_state", "/v1/drills/{drill}": "unknown_drill"}
                refusals = ("invalid_field", more.get(route.path))
                assert answer.status < 300 or answer.code in refusals, asked
            elif role is Role.GATEWAY:
                # It asks nothing for itself.
                assert (answer.status, answer.code) == (401, "not_identified"), asked
            else:
                assert (answer.status, answer.code) == (403, "permission_denied"), asked
                assert answer.sentence.startswith(str(role)), asked
                assert harness.controller.state.revision == revision, asked


def test_who_carries_out_drills_hands_the_leadership_over_in_a_switchover_of_its_own_only(config: Config) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness:

            async def transfer(who: str) -> Any:
                body = {"command_id": harness.new_id(), "name": "r2"}
                return await harness.ask("POST", "/v1/members/transfer", body, who=who)

            async def drill(who: str, scenario: str, target: str) -> None:
                body = {"command_id": harness.new_id(), "scenario": scenario, "target": target, "lasts_s": 60}
                assert (await harness.ask("POST", "/v1/drills", body, who=who)).status == 201

            async def end(number: int) -> None:
                body = {"command_id": harness.new_id(), "verdict": "passed", "sentence": "so"}
                assert (await harness.ask("POST", f"/v1/drills/{number}/end", body)).status == 200

            assert (await transfer("dora")).status == 403
            others = [("operator", "switchover", "r2"), ("dora", "leader-hang", "r2"), ("dora", "switchover", "r3")]
            for number, other in enumerate(others, 1):
                await drill(*other)
                assert (await transfer("dora")).status == 403, other
                await end(number)
            await drill("dora", "switchover", "r2")
            assert (await transfer("dora")).status != 403

    run()


def test_who_carries_out_drills_reads_of_the_past_what_a_drill_should_not_lead_to_and_nobodys_job(
    config: Config,
) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness:
            job = {"command_id": harness.new_id(), "script": "#!/bin/sh\n", "time_limit_s": 60, "workdir": "/tmp"}
            assert (await harness.ask("POST", "/v1/jobs", job)).status == 201
            for who in ("operator", "dora"):
                await end_of(harness, who)
            told = (await harness.ask("GET", "/v1/history", who="dora")).body
            assert {row["event"] for row in told["rows"]} == {"drill_started", "drill_ended"}
            everything = (await harness.ask("GET", "/v1/history")).body
            assert "job_submitted" in {row["event"] for row in everything["rows"]}
            for kind in ("job_submitted", "rejected", "drill_started,job_submitted"):
                refused = await harness.ask("GET", f"/v1/history?kind={kind}", who="dora")
                assert refused.status == 403 and "stage_retried" in str(refused.body)

    async def end_of(harness: Harness, who: str) -> None:
        body = {"command_id": harness.new_id(), "scenario": "leader-hang", "target": "r1", "lasts_s": 60}
        number = (await harness.ask("POST", "/v1/drills", body, who=who)).body["drill"]
        body = {"command_id": harness.new_id(), "verdict": "passed", "sentence": "so"}
        assert (await harness.ask("POST", f"/v1/drills/{number}/end", body, who=who)).status == 200

    run()


@pytest.mark.parametrize("what", ["register", "poll", "reports"])
def test_an_agent_may_touch_its_own_node_only(config: Config, what: str) -> None:
    @story
    async def run() -> None:
        async with Harness(config) as harness:
            bodies: dict[str, dict[str, Any]] = {
                "register": {"command_id": harness.new_id(), "instance": "i", "storage_id": "s", "cpus": 1},
                "poll": {"instance": "i", "wait_s": 0},
                "reports": {"reports": []},
            }
            revision = harness.controller.state.revision
            answer = await harness.ask("POST", f"/v1/agents/n2/{what}", bodies[what], who="n1")
            assert (answer.status, answer.code) == (403, "permission_denied")
            assert answer.sentence == "agent n1 may not act for node 'n2'"
            assert harness.controller.state.revision == revision

    run()


@story
async def test_who_has_no_certificate_of_the_cluster_is_not_even_heard(config: Config, tmp_path_factory: Any) -> None:
    import ssl

    import aiohttp

    from tests.cluster.harness import make_cluster

    foreign = make_cluster(tmp_path_factory.mktemp("foreign"))
    async with Harness(config) as harness:
        for files in (None, foreign.tls_files("operator")):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_verify_locations(config.tls.authority)
            if files is not None:
                context.load_cert_chain(files.certificate, files.key)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as session:
                with pytest.raises(aiohttp.ClientError):
                    async with session.get(harness.url + "/healthz") as response:
                        await response.read()

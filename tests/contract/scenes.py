"""Scenes of a day, written for what chance would hardly bring about: each command and event, each rejection."""

from __future__ import annotations

from typing import Any

from forebay.replica.model.job_states import JobState
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import LeftOut
from forebay.replica.values.command_ids import encode_session_command_id
from tests.contract.day import NODES
from tests.contract.maker import DW, SCRIPT, STAGED, Maker, asks, ended, failed, reached, receipt

STAGE, INTO = "#DW stage_in type=file", "destination=$DW_JOB_STRIPED/one"
FORMS = asks(
    "#DW jobdw name=a capacity=1GiB",
    "#DW jobdw name=b-c capacity=2GiB",
    f"{STAGE} source=/in/$USER/*_%j.h5 destination=$DW_JOB_STRIPED_a",
    "#DW copy_in source=/in/tree destination=$DW_JOB_b_c/tree profile=fast",
    "#DW stage_out type=directory source=$DW_JOB_b_c/run-? destination=results/%j",
)
"""Paths with variables, patterns, names, and in the working directory."""


async def opening(m: Maker) -> None:
    """Agents come; who may ask what; what is wrong in itself."""
    await m.submit("ada", script=DW)
    for node in NODES:
        await m.register(node)
    await m.register("n1")
    await m.register("n2", storage_id="another disk")
    await m.ask("agent n1", "POST /v1/agents/n2/register", instance="x", storage_id="x", cpus=1)
    await m.register("n3", cpus=0)
    await m.ask("agent n9", "POST /v1/agents/n9/register", instance="x", storage_id="x", cpus=1)
    for node in ("n9", "n9", "n10", "n 1"):
        await m.operator(f"POST /v1/nodes/{node.replace(' ', '%20')}/admit")
    await m.ask("user ada", "POST /v1/nodes/n1/admit")
    await m.register("n3", buffers="agent/buffers")
    await m.ask("user ada", "POST /v1/nodes/n1/drain", reason="mine")
    await m.ask("agent n1", "GET /v1/jobs")
    await m.operator("GET /v1/nothing")
    await m.operator("DELETE /v1/jobs")
    await m.operator("GET /v1/jobs?colour=red")
    await m.operator("GET /v1/jobs?state=SLEEPING")
    await m.operator("GET /v1/jobs?limit=0")
    await m.ask("user ada", "POST /v1/jobs", nonsense=1, script="#!/bin/sh\n", time_limit_s=1, workdir="/out")
    await m.ask("user ada", "POST /v1/jobs", script="#!/bin/sh\n", time_limit_s="long", workdir="/out")
    await m.ask("user ada", "POST /v1/jobs", script="#!/bin/sh\n", time_limit_s=60)
    for name in ("found_cluster", "raise_feature_level"):
        await m.inside(name)
    await m.inside("configure_site", settings={"MaxPasses": "4"})
    await m.inside("configure_site", settings={"StageRetries": "9999"})
    await m.inside("mark_node_down", node="n9", reason="nobody knows it")
    await m.inside("mark_node_back", node="n9")
    for wrong in ("capacity=10GiB access_mode=shared", "capacity=-5", "capacity=9XB", "capacity=900GiB", "size=4"):
        await m.submit("ada", script=asks(f"#DW jobdw {wrong} type=scratch"))
    for wrong in (
        "#DW jobdw",
        "#DW stage_in type=file source=x",
        "#DW nothing",
        "#DW swap 4GiB",
        "#BB create_persistent",
    ):
        await m.submit("ada", script=asks(wrong))
    await m.submit(
        "ada",
        script=asks(
            "#DW jobdw capacity=1GiB access_mode=striped type=scratch", "#BB destroy_persistent name=a hurry=yes"
        ),
    )
    await m.submit("ada", bb="capacity=10GiB pool=nowhere")
    await m.submit("ada", bb="capacity=10GiB access=striped swap=1")
    await m.submit("ada", bb=" ")
    await m.submit("ada", bbf="no directive\n")
    await m.submit("ada", script=asks("#DW jobdw capacity=1GiB", f"{STAGE} source=$NOSUCH/a {INTO}"))
    await m.submit("ada", script=asks("#DW jobdw capacity=1GiB", f"{STAGE} source=$HOME/a {INTO}"))
    await m.submit("ada", script=asks("#DW jobdw name=a capacity=1GiB", "#DW jobdw capacity=1GiB"))
    await m.submit("ada", script="true\n")
    await m.submit("root", script=DW)
    await m.submit("ada", user="ben")
    await m.submit("ada", workdir="/elsewhere/../ada")
    await m.submit("ada", cpus=9)
    await m.submit("ada", time_limit_s=0)
    await m.submit("ada", priority=-1)
    for more in ({"priority": 2}, {"nice": -1}):
        await m.ask("user ada", "POST /v1/jobs", script=SCRIPT.format(""), time_limit_s=600, workdir="/out", **more)
    await m.submit("ada", name="a\tb")
    await m.submit("ada", output="/etc/../%j")
    shadow = "#DW stage_in type=file source=/etc/shadow destination=$DW_JOB_STRIPED/s"
    await m.submit("ada", script=asks("#DW jobdw capacity=1GiB access_mode=striped type=scratch", shadow))
    await m.submit("ada", output="%q")
    await m.submit("ada", environment={"A=B": "1"})
    await m.submit("ada", begin_at="tomorrow")
    await m.submit("ada", deadline="1969-01-01T00:00:00Z")
    await m.submit("ada", dependencies=["afterok:999"])
    await m.submit("ada", dependencies=["sometime:1"])
    await m.submit("ada", licenses=["matlab:0"])
    await m.submit("ada", licenses=["nosuch:1"])
    await m.submit("ada", account="nosuch")
    await m.submit("ada", qos="nosuch")
    await m.submit("ada", reservation="nosuch")
    await m.submit("ada", partition="nosuch")
    await m.submit("ada", mail_types=["sometimes"])
    await m.submit("ada", mail_user="-x")
    await m.submit("ada", nodes=2)
    await m.submit("ada", nodes=0)
    await m.submit("ada", nice=10**12)
    await m.submit("ada", array="5-1")
    await m.submit("ada", array="1-3", script=asks("#BB create_persistent name=p%a capacity=1GiB"))
    for verb in ("cancel", "hold", "release", "suspend", "resume", "requeue", "clear", "update"):
        await m.ask("operator", f"POST /v1/jobs/999/{verb}")
    for verb in ("why", "history", "estimate"):
        await m.operator(f"GET /v1/jobs/999/{verb}")
    await m.operator("GET /v1/jobs/none")
    await m.operator("POST /v1/persistent/nosuch/clear")


async def lua_site(m: Maker) -> None:
    """A site with a script of its own, and one with programs; then the native provider for the rest of the day."""
    await m.configure(BurstBufferType="burst_buffer/lua", LuaScript="/etc/slurm/burst_buffer.lua", ValidateTimeout="9")
    first = await m.submit("ada", script=asks("#BB_LUA pool=fast capacity=3GiB", "#BB_LUA colour=blue", "#DW jobdw"))
    second = await m.submit("ben", script=asks("#BB_LUA capacity=4GiB pool=fast"), hold=True)
    await m.submit("ben", script=asks("#BB_LUA capacity=4GiB pool=fast", "#BB_LUA capacity=4GiB pool=wide"))
    await m.submit("ben", bb="capacity=4GiB")
    await m.finish(first)
    await m.ask("user ben", f"POST /v1/jobs/{second}/release")
    await m.report(second, failed("slurm_bb_setup: no", operation="setup"))
    await m.wait(3)
    await m.report(second, failed("slurm_bb_data_in: gone", final=True, operation="data_in"))
    await m.configure(Flags="TeardownFailure")
    third = await m.submit("cyd", script=asks("#BB_LUA capacity=4GiB pool=wide"))
    await m.report(third, failed("slurm_bb_setup: never", final=True, operation="setup"))
    await m.finish(third)
    await m.ask("user cyd", f"POST /v1/jobs/{third}/cancel")
    await m.ask("user ben", f"POST /v1/jobs/{second}/cancel", hurry=True)
    await m.finish(second)
    await m.configure(Directive="XY")
    await m.finish(await m.submit("ada", script=asks("#XY capacity=1GiB pool=wide")))
    await m.configure(BurstBufferType="burst_buffer/datawarp", Flags="EmulateCray", GetSysState="/opt/dw_wlm_cli")
    fourth = await m.submit(
        "ada", script=asks("#DW jobdw capacity=2GiB type=cache", "#DW stage_in what=ever", "#DW swap 1")
    )
    await m.finish(fourth)
    await m.configure(BurstBufferType="burst_buffer/generic", StartStageIn="/opt/in", StartStageOut="/opt/out")
    await m.finish(await m.submit("ada", script=asks("#BB capacity=2GiB", "#DW stage_in from=here")))
    await m.configure(BurstBufferType="burst_buffer/native", Flags="EnablePersistent", GetSysState="/opt/none")


async def configuration(m: Maker) -> None:
    """Every key, and what is refused of them."""
    for key, value in (
        ("StageRetries", "2"), ("RetryBackoff", "2"), ("RetryBackoffMax", "10"), ("FinishedJobsKept", "12"),
        ("StagedHoldTime", "400"), ("MaxPasses", "3"), ("ArrayStageCount", "2"), ("HoldOversized", "yes"),
        ("PreRunRequeues", "1"), ("RequeueOnNodeFail", "yes"), ("OtherTimeout", "90"), ("StageInTimeout", "900"),
        ("StageOutTimeout", "901"), ("AllowRoot", "yes"), ("PollInterval", "7"), ("Granularity", "2GiB"),
        ("TransferRate", "50MiB"), ("TransferRatePerUser", "70MiB"), ("TransferRatePerNode", "90MiB"),
        ("TransferRateOfCluster", "200MiB"), ("TransferVerify", "read_back"), ("TransferAlgorithm", "blake3"),
        ("TransferBackends", "native,rsync,command"), ("TransferStallTime", "77"), ("TransferTimeMax", "7777"),
        ("TransferTimeouts", "fixed"), ("TransferReplace", "no"), ("TransfersPerUser", "4"), ("TransfersPerNode", "5"),
        ("TransfersAtOnce", "9"), ("DenyUsers", "mallory:eve"), ("Sources", "/in,/data/%u"), ("Pools", "kept"),
    ):  # fmt: skip
        await m.configure(**{key: value})
    for key, value in (
        ("StageRetries", "many"), ("RetryBackoff", "01"), ("Flags", "Nothing"), ("Nothing", "1"), ("AltPool", "x"),
        ("TransferVerify", "twice"), ("LuaScript", "relative"), ("AllowUsers", "ada,b:c"), ("Granularity", "x"),
        ("DefaultPool", "nowhere"), ("StageInTimeout", "0"),
    ):  # fmt: skip
        await m.configure(**{key: value})
    listed = [{"key": "AllowUsers", "value": "b:c", "file": "bb.conf", "line": 3, "column": 1}]
    await m.operator("POST /v1/configuration", settings=listed, partial=True)
    await m.operator("POST /v1/configuration", settings=[], expect_revision=1)
    await m.operator(
        "POST /v1/configuration/diff", settings=[{"key": "MaxPasses", "value": "5"}], partial=True, expect_revision=1
    )
    await m.operator("POST /v1/configuration/diff", settings=[{"key": "MaxPasses", "value": "5"}], partial=True)
    await m.operator("POST /v1/configuration/diff", settings=[{"key": "MaxPasses", "value": "x"}])
    await m.ask("user ada", "GET /v1/configuration")
    await m.operator("GET /v1/burst?format=json")
    await m.ask("user ada", "GET /v1/burst?format=text")


async def records(m: Maker) -> None:
    """Accounts, QOS, licences, partitions, the rules of scheduling: made, changed, taken away, refused."""
    limits = {"MaxJobsPerUser": "6", "GrpBB:bb/fast": "90GiB", "MaxBBPerJob:bb/fast": "80GiB"}
    await m.operator(
        "PUT /v1/accounts/physics",
        users=["ada", "ben"],
        limits=limits,
        user_limits={"ben": {"MaxBBPerJob:bb/fast": "60GiB"}},
    )
    await m.operator(
        "PUT /v1/accounts/optics", parent="physics", users=["ada"], limits={"GrpBBRunMinutes:bb/wide": "90TiB"}
    )
    await m.operator(
        "PUT /v1/accounts/biology",
        users=["cyd", "ben"],
        limits={"GrpBBMinutes:bb/fast": "4TiB", "MaxBBMinutesPerJob:bb/fast": "20TiB"},
    )
    await m.operator("PUT /v1/accounts/gone", if_match="", users=["ada", "cyd"])
    await m.operator("PUT /v1/accounts/optics", parent="optics")
    await m.operator("PUT /v1/accounts/bad", user_limits={"eve": {"GrpBB": "1"}})
    await m.operator("PUT /v1/accounts/bad", limits={"MaxNothing": "1"})
    await m.operator("PUT /v1/accounts/bad", limits={"GrpBB:bb/fast": "much"})
    await m.operator("POST /v1/accounts/physics/delete")
    await m.operator("POST /v1/accounts/nosuch/delete")
    await m.operator(
        "PUT /v1/qos/high",
        priority=1000,
        limits={"GrpCPUs": "12", "GrpNodes": "2", "MaxBBPerAccount:bb/fast": "95GiB", "MaxSubmitJobsPerUser": "40"},
    )
    await m.operator(
        "PUT /v1/qos/strict",
        limits={"MaxBBPerJob:bb/fast": "5GiB", "MinBB:bb/fast": "2GiB"},
        deny_on_limit=True,
        users=["ada", "ben"],
    )
    await m.operator("PUT /v1/qos/few", limits={"MaxJobsPerUser": "1"}, accounts=["physics", "biology"])
    await m.operator("PUT /v1/qos/gone", if_match="", priority=1)
    await m.operator("POST /v1/qos/nosuch/delete")
    await m.operator("PUT /v1/licenses/matlab", total=2)
    await m.operator("PUT /v1/licenses/ansys", total=1)
    await m.operator("PUT /v1/licenses/gone", if_match="", total=3)
    await m.operator("PUT /v1/licenses/bad", total=-1)
    await m.operator("POST /v1/licenses/nosuch/delete")
    await m.operator("PUT /v1/partitions/every", default=True)
    await m.operator("PUT /v1/partitions/small", nodes="n[2-3]", max_time_s=3600, max_nodes=1, min_nodes=0)
    await m.operator("PUT /v1/partitions/private", nodes="n1", users=["ada"], accounts=["physics"])
    await m.operator("PUT /v1/partitions/closed", nodes="", state="INACTIVE")
    await m.operator("PUT /v1/partitions/gone", if_match="")
    await m.operator("PUT /v1/partitions/bad", nodes="n[3-1]")
    await m.operator("PUT /v1/partitions/bad", state="ASLEEP")
    await m.operator("POST /v1/partitions/nosuch/delete")
    await m.configure(SizePointsPerGiB="2", DefaultQOS="nosuch", RevocationsMax="2", RevokeAfter="20")
    await m.configure(SizePointsPerGiB="2", RevocationsMax="2", RevokeAfter="20")
    await m.operator("POST /v1/usage/reset")
    await m.operator("POST /v1/usage/reset", account="nosuch")
    await m.operator("POST /v1/usage/reset", qos="high")
    await m.configure(AccountsRequired="yes", DefaultAccount="physics", DefaultQOS="few")
    await m.submit("cyd")
    await m.submit("ada", bb="capacity=1GiB")
    await m.configure(SizePointsPerGiB="1", AccountsRequired="no", DefaultAccount="", DefaultQOS="")
    await m.operator("PUT /v1/reservations/bad", end=m.instant(-5), burst_buffer="fast:1GiB")
    await m.operator("PUT /v1/reservations/bad", end=m.instant(5), burst_buffer="nowhere:1GiB", users=["ada"])
    await m.operator("POST /v1/reservations/nosuch/delete")
    await m.operator("PUT /v1/revocations/user:eve", reason="left")
    await m.operator("PUT /v1/revocations/serial:1f2e", valid_until=m.instant(900))
    await m.operator("PUT /v1/revocations/serial:2f2e", valid_until=m.instant(-5))
    await m.operator("PUT /v1/revocations/eve")
    await m.operator("POST /v1/revocations/user:eve/delete")
    await m.operator("POST /v1/revocations/user:eve/delete")
    await m.operator("GET /v1/revocations")
    for kind in ("accounts", "qos", "licenses", "partitions", "scheduling", "reservations", "usage", "revocations"):
        await m.ask("user ada", f"GET /v1/{kind}")


async def taken_away(m: Maker) -> None:
    """Jobs whose account, QOS, licence, partition and reservation are taken away while they wait."""
    await m.operator(
        "PUT /v1/reservations/gone",
        if_match="",
        start=m.instant(500),
        end=m.instant(900),
        burst_buffer="fast:5GiB",
        users=["cyd"],
    )
    waits = [
        await m.submit("cyd", account="gone", hold=True), await m.submit("cyd", qos="gone", hold=True),
        await m.submit("cyd", licenses=["gone:2"], hold=True), await m.submit("cyd", partition="gone", hold=True),
        await m.submit("cyd", reservation="gone", hold=True, bb="capacity=2GiB"),
    ]  # fmt: skip
    for kind in ("accounts", "qos", "licenses", "partitions", "reservations"):
        await m.operator(f"POST /v1/{kind}/gone/delete")
    for job in waits:
        await m.ask("operator", f"POST /v1/jobs/{job}/release", 1)
        await m.ask("user cyd", f"GET /v1/jobs/{job}/why")
        await m.ask("user cyd", f"POST /v1/jobs/{job}/cancel")


async def whole_lives(m: Maker) -> None:
    """Jobs from submit to the end, with receipts, checkpoints, failures of every stage, and mail."""
    everything: dict[str, Any] = {
        "name": "whole", "bbf": f"{STAGE} source=$HOME/one {INTO}\n", "variables": {"HOME": "/in"}, "cpus": 2,
        "priority": 50, "begin_at": m.instant(10), "deadline": m.instant(9000), "output": "%x.%j", "qos": "high",
        "environment": {"B": "2", "A": "1"}, "account": "physics", "licenses": ["matlab:2", "ansys"], "nice": -3,
        "partition": "every", "requeue": False, "mail_types": ["all"], "mail_user": "ada@example.org", "comment": "all",
    }  # fmt: skip
    whole = await m.submit("ada", script=STAGED, **everything)
    await m.ask("user ada", f"GET /v1/jobs/{whole}")
    await m.ask("user ada", f"GET /v1/jobs/{whole}/estimate")
    forms = await m.submit("ada", script=FORMS)
    await m.ask("user ada", f"GET /v1/jobs/{forms}")
    await m.ask("user ada", f"POST /v1/jobs/{forms}/cancel")
    await m.wait(11)
    found = await m.order(whole)
    assert found is not None
    node, order = found
    row = {
        "job": whole,
        "attempt": order["attempt"],
        "stage": "stage_in",
        "files_done": 1,
        "files_total": 3,
        "bytes_done": 1 << 20,
    }
    row |= {"bytes_total": 5 << 20, "rate_bytes_s": 2e6, "phase": "copying", "file": "/in/one", "resumed_files": 1}
    await m.ask(
        f"agent {node}", f"POST /v1/agents/{node}/poll", instance="i1", seen_revision=1, wait_s=0, progress=[row]
    )
    await m.ask("user ada", "GET /v1/transfers")
    await m.ask("user ben", "GET /v1/transfers")
    await m.ask("user ada", f"GET /v1/transfers/{whole}")
    await m.ask(f"agent {node}", f"POST /v1/agents/{node}/poll", instance="other", wait_s=0)
    for files in (1, 3):
        await m.report(whole, reached(Stage.STAGE_IN, order["attempt"], files), 60)
    await m.report(whole, failed("no space left", receipt=receipt(Stage.STAGE_IN, 1, complete=False, retries=2)))
    await m.operator(f"GET /v1/transfers/{whole}", 1)
    await m.wait(2)
    left = (LeftOut("/in/fifo", "a FIFO holds no data"), LeftOut("/in/sock", "a socket holds no data"))
    more = receipt(
        Stage.STAGE_IN, 2, resumed_files=1, resumed_bytes=1 << 20, left_out=2, left_out_first=left, digest="blake3:ab"
    )
    await m.report(whole, {"type": "done", "files": 3, "size_bytes": 5 << 20, "digest": "blake3:ab", "receipt": more})
    await m.report(whole, {"type": "done"})
    await m.report(whole, {"type": "started"})
    await m.report(whole, {"type": "started"})
    await m.report(whole, ended(), stage="stage_in")
    await m.report(whole, ended(), attempt=99)
    await m.report(whole, ended(JobState.FAILED, exit_code=3, message="exit 3"), 120)
    await m.report(whole, failed("umount: busy"))
    await m.wait(3)
    await m.done(whole)
    await m.report(whole, failed("/out is read-only", final=True))
    await m.ask("user ada", f"GET /v1/jobs/{whole}")
    await m.operator("GET /v1/transfers")
    await m.operator(f"POST /v1/jobs/{whole}/clear")
    await m.ask("user ada", f"POST /v1/jobs/{whole}/release")
    await m.report(whole, {"type": "done", "receipt": receipt(Stage.STAGE_OUT, 6, removed_files=1, digest="blake3:cd")})
    for _ in range(3):
        await m.report(whole, failed("rm: busy", operation="teardown"), 11)
    await m.operator(f"POST /v1/jobs/{whole}/clear", 1, discard=True)
    await m.ask("user ada", f"GET /v1/transfers/{whole}/receipts")
    await m.ask("user ada", f"GET /v1/transfers/{whole}/receipts?stage=stage_in&attempt=2")
    await m.ask("user ben", f"GET /v1/transfers/{whole}/receipts")
    await m.inside("settle_mails", 1, sent=sorted(m.state.mails)[:2], dropped=sorted(m.state.mails)[2:])
    await m.inside("settle_mails", sent=["nothing"], dropped=[])
    await m.inside("advance_sinks", marks={"audit": 0, "monitor": -5})
    await m.inside("advance_sinks", 1, marks={"audit": 0}, removed=["monitor", "nothing"])
    await m.inside("advance_sinks", marks={"audit": 9})
    await m.inside("advance_sinks", marks={"audit": -1})
    lost = await m.submit("ben", script=STAGED, mail_types=["begin", "stage_out"], account="biology")
    await m.until(lost, "stage_out")
    for _ in range(3):
        await m.report(lost, failed("disk full"), 11)
    await m.operator(f"POST /v1/jobs/{lost}/clear")
    await m.operator(f"POST /v1/jobs/{lost}/clear", discard=True)
    await m.finish(lost)
    await m.inside("settle_mails", sent=[], dropped=sorted(m.state.mails))


async def runs(m: Maker) -> None:
    """Suspended, resumed, requeued, failed before the run, hurried, cancelled at every stage."""
    one = await m.submit("ada", script=DW)
    await m.until(one, "run")
    await m.ask("user ada", f"POST /v1/jobs/{one}/suspend")
    await m.report(one, {"type": "started"})
    for verb in ("resume", "suspend", "suspend", "resume", "hold"):
        await m.ask("user ada", f"POST /v1/jobs/{one}/{verb}", 5)
    await m.ask("user ben", f"POST /v1/jobs/{one}/suspend")
    await m.ask("user ada", f"POST /v1/jobs/{one}/requeue")
    await m.ask("user ada", f"POST /v1/jobs/{one}/suspend")
    await m.report(one, ended(JobState.CANCELLED, signal=15))
    for _ in range(4):
        await m.done(one)
    await m.ask("user ada", f"POST /v1/jobs/{one}/requeue")
    await m.ask("user ada", f"POST /v1/jobs/{one}/cancel")
    await m.finish(one)
    files: dict[str, Any] = {"error": "err-%j", "open_mode": "append", "arguments": ["a b", ""]}
    files |= {"name": "nf-foo_(1)", "output": "%x-%N-%4J.out", "input": "%x.in", "signal": "B:USR1@120"}
    files |= {"tasks": 2, "exclusive": True, "ignored_options": ["--mem"], "qos": "undefined", "if_defined": ["qos"]}
    two = await m.submit("ben", script=DW, comment="fails before it runs", **files)
    for _ in range(2):
        await m.until(two, "run")
        await m.report(two, failed("mount failed"))
        await m.finish(two) if two not in m.state.unfinished else await m.done(two)
    await m.ask("user ben", f"GET /v1/jobs/{two}/why")
    await m.ask("user ben", f"POST /v1/jobs/{two}/release")
    await m.finish(two)
    part = await m.submit("ben", script=DW, comment="does not make all that it stages out")
    await m.until(part, "stage_out")
    await m.report(part, {**failed("$DW_JOB_STRIPED/gone does not exist"), "final": True})
    await m.ask("user ben", f"POST /v1/jobs/{part}/release", partial=True)
    await m.finish(part)
    three = await m.submit("ada", requeue=False)
    await m.ask("user ada", f"POST /v1/jobs/{three}/requeue")
    await m.done(three)
    await m.ask("user ada", f"POST /v1/jobs/{three}/cancel", hurry=True)
    await m.report(three, ended(JobState.TIMEOUT))
    for stage in ("stage_in", "run", "post_run", "stage_out", "teardown"):
        job = await m.submit("cyd", script=STAGED)
        await m.until(job, stage)
        await m.ask("user cyd", f"POST /v1/jobs/{job}/cancel")
        await m.ask("user cyd", f"POST /v1/jobs/{job}/cancel", hurry=True)
        await m.finish(job)
        await m.ask("user cyd", f"POST /v1/jobs/{job}/cancel")
    four = await m.submit("ben", script=STAGED)
    await m.until(four, "run")
    await m.done(four)
    await m.report(four, ended(JobState.NODE_FAIL, message="the node was lost"))
    for _ in range(5):
        await m.done(four)
    await m.ask("user ben", f"POST /v1/jobs/{four}/requeue")
    await m.finish(four)


async def persistent(m: Maker) -> None:
    """Persistent buffers: made, used, wanted twice, removed by whom they are not, cleared."""
    create = "#BB create_persistent name={} capacity=8GiB access=striped type=scratch"
    first = await m.submit("ada", script=asks(create.format("shared")), nodes=0)
    await m.submit("ben", script=asks("#DW persistentdw name=later"))
    second = await m.submit("ben", script=asks(create.format("broken")))
    await m.report(first, failed("mkdir failed"))
    await m.wait(3)
    await m.finish(first)
    await m.report(second, failed("mkdir failed", final=True))
    await m.ask("user ben", f"POST /v1/jobs/{second}/cancel")
    await m.finish(second)
    await m.submit("cyd", script=asks(create.format("shared")))
    uses = await m.submit("cyd", script=asks("#DW persistentdw name=shared"))
    await m.submit("ben", script=asks("#BB destroy_persistent name=shared"))
    await m.operator("POST /v1/persistent/shared/clear")
    await m.finish(uses)
    await m.operator("POST /v1/persistent/shared/clear")
    gone = await m.submit("ada", script=asks("#BB destroy_persistent name=shared hurry"), nodes=0)
    await m.finish(gone)
    third = await m.submit("ada", script=asks(create.format("forgotten")))
    await m.finish(third)
    await m.operator("GET /v1/buffers?live=yes")
    await m.operator("POST /v1/persistent/forgotten/clear", discard=True)
    await m.finish(await m.submit("ada", script=asks(create.format("later"))))
    on_it = asks(
        "#DW persistentdw name=later",
        "#DW stage_in type=list source=/in/list destination=$DW_PERSISTENT_STRIPED_later/d",
    )
    await m.finish(await m.submit("ada", script=on_it))
    await m.submit("ada", bb="capacity=2GiB;stage_in:tar xf /in/a.tar;stage_out:cp -r . /out")


async def arrays(m: Maker) -> None:
    """Job arrays: throttled, by task, with dependencies between them."""
    array = await m.submit("ada", script=DW, array="1-4%2", name="sweep", output="%A_%a")
    await m.submit("ben", array="0,2,7", dependencies=[f"afterok:{array}"], bb="capacity=1GiB")
    one = await m.submit("ben", dependencies=[f"afterany:{array}_2", f"afternotok:{array}_3"], dependency_any=True)
    await m.ask("user ada", f"POST /v1/jobs/{array}_[3-4]/hold")
    await m.ask("user ada", f"GET /v1/jobs/{array}_3")
    await m.ask("user ada", f"GET /v1/jobs?job={array}_[1-2]")
    await m.ask("user ada", f"GET /v1/jobs/{array}_9")
    await m.ask("user ada", f"GET /v1/jobs/{array}_[1-2]")
    await m.ask("user ada", f"POST /v1/jobs/{array}_4/release")
    await m.finish(array + 1)
    await m.finish(array + 2)
    await m.ask("user ada", f"POST /v1/jobs/{array}/update", name="swept", comment="all that wait")
    await m.ask("user ada", f"POST /v1/jobs/{array}_3/update", priority=90)
    await m.ask("user ada", f"POST /v1/jobs/{array}/cancel")
    for task in (3, 4):
        await m.finish(array + task)
    await m.ask("user ben", f"GET /v1/jobs/{one}/why")


async def waiting(m: Maker) -> None:
    """What is due by time, what waits for another, what is changed while it waits."""
    first = await m.submit("ada", time_limit_s=100, name="line")
    await m.submit("ada", dependencies=["singleton"], name="line")
    held = await m.submit("ada", hold=True, script=DW, name="line")
    after = [
        await m.submit("ada", dependencies=[f"{kind}:{first}"])
        for kind in ("after", "afterok", "afternotok", "afterany")
    ]
    await m.submit("ada", dependencies=[f"afterburstbuffer:{held}"])
    late = await m.submit("cyd", deadline=m.instant(700), time_limit_s=650, hold=True)
    later = await m.submit("cyd", begin_at=m.instant(60), mail_types=["begin"])
    await m.ask("user cyd", f"GET /v1/jobs/{later}/why")
    await m.ask("user cyd", f"GET /v1/jobs/{late}", 70)
    await m.operator(f"POST /v1/jobs/{held}/hold")
    await m.ask("user ada", f"POST /v1/jobs/{held}/release")
    changes: list[dict[str, Any]] = [
        {"name": "renamed"}, {"time_limit_s": 300}, {"priority": 7}, {"nice": 5}, {"begin_at": m.instant(900)},
        {"begin_at": ""}, {"deadline": m.instant(5000)}, {"deadline": ""},
        {"dependencies": [f"afterany:{first}", "singleton"]},
        {"dependencies": [f"after:{first}", f"afterok:{later}"], "dependency_any": True}, {"dependencies": []},
        {"dependency_any": True}, {"account": "physics"}, {"account": ""}, {"account": "nosuch"}, {"qos": "high"},
        {"qos": ""}, {"reservation": "nosuch"}, {"partition": "small"}, {"partition": "private"},
        {"partition": "every"},
        {"licenses": ["matlab"]}, {"licenses": []}, {"licenses": ["nosuch"]}, {"comment": "changed"},
        {"requeue": False},
        {"mail_types": ["end", "fail"], "mail_user": "ben"}, {"mail_types": []},
        {"bb": "capacity=30GiB pool=wide", "variables": {"HOME": "/in"}},
        {"bbf": "#DW jobdw capacity=5GiB access_mode=private type=scratch\n"}, {"bb": "capacity=900GiB"}, {"bb": ""},
        {"time_limit_s": 0}, {"reservation": ""}, {"priority": 10**9},
    ]  # fmt: skip
    for change in changes:
        await m.ask("user ada", f"POST /v1/jobs/{held}/update", 1, **change)
    await m.operator(f"POST /v1/jobs/{held}/update", priority=10**6, nice=-50)
    await m.ask("user ben", f"POST /v1/jobs/{held}/update", name="mine")
    await m.finish(first)
    for job in after:
        await m.ask("user ada", f"GET /v1/jobs/{job}/why")
        await m.finish(job)
    await m.ask("operator", f"POST /v1/jobs/{held}/release")
    await m.finish(held)
    await m.finish(later)
    await m.ask("user ada", f"POST /v1/jobs/{first}/update", name="over")


async def capacity(m: Maker) -> None:
    """Pools made, resized, drained, counted otherwise and removed; reservations; somebody who gives way."""
    await m.operator("PUT /v1/pools/disk", quantity="50GiB", granularity="5GiB", out_of_service="5GiB", default=False)
    await m.operator("PUT /v1/pools/disk", quantity="60GiB", granularity="70GiB")
    await m.operator("PUT /v1/pools/disk", quantity="x", granularity="1")
    await m.operator("POST /v1/pools/spare/add", quantity="40GiB")
    await m.operator("POST /v1/pools/spare/add", quantity="40GiB", granularity="4GiB", default=False)
    await m.operator("POST /v1/pools/tapes/add", quantity="4", granularity="1", unit="count")
    await m.operator("POST /v1/pools/racks/add", quantity="6", unit="nodes")
    job = await m.submit("ben", bb="capacity=2 pool=tapes")
    other = await m.submit("ben", bb="capacity=2N pool=racks")
    await m.operator("POST /v1/pools/tapes/remove")
    await m.operator("POST /v1/pools/spare/change", quantity="30GiB", granularity="2GiB")
    await m.operator("POST /v1/pools/spare/change", out_of_service="all")
    await m.operator("POST /v1/pools/spare/change", unit="count")
    await m.operator("POST /v1/pools/spare/change", out_of_service="0", default=True)
    await m.operator("POST /v1/pools/fast/change", default=True)
    await m.operator("POST /v1/pools/nosuch/change", quantity="1")
    await m.operator("POST /v1/pools/spare/remove")
    await m.operator("POST /v1/pools/nosuch/remove")
    await m.finish(job)
    await m.finish(other)
    start, end = m.instant(30), m.instant(200)
    await m.operator(
        "PUT /v1/reservations/night",
        start=start,
        end=end,
        burst_buffer="fast:30GiB,wide:10GiB",
        users=["ada"],
        accounts=["physics"],
    )
    inside = await m.submit("ada", reservation="night", account="physics", bb="capacity=20GiB")
    await m.submit("ben", reservation="night")
    await m.operator("PUT /v1/reservations/now", end=m.instant(40), burst_buffer="wide:4GiB", users=["cyd"])
    await m.operator("GET /v1/reservations", 31)
    await m.done(inside)
    await m.ask("user ada", "GET /v1/pools", 200)
    await m.finish(inside)
    blockers = [
        await m.submit("ben", bb="capacity=95GiB", cpus=8, time_limit_s=5000),
        await m.submit("cyd", cpus=4, time_limit_s=4000),
    ]
    for job in blockers:
        await m.until(job, "run")
    await m.submit("cyd", cpus=2, time_limit_s=3000)
    await m.ask("user ben", f"POST /v1/jobs/{blockers[0]}/cancel")
    await m.finish(blockers[0])
    await m.finish(blockers[1])


async def giving_way(m: Maker) -> None:
    """A staged job that cannot start gives its buffer to one with more priority; turns; a new leader."""
    wide = await m.submit("ben", cpus=8, time_limit_s=2000)
    await m.until(wide, "run")
    await m.done(wide)
    staged = await m.submit("ada", bb="capacity=90GiB", cpus=8, time_limit_s=1500)
    await m.done(staged)
    await m.wait(30)
    taker = await m.submit("cyd", bb="capacity=60GiB", cpus=1, priority=900, time_limit_s=60)
    await m.ask("user cyd", f"GET /v1/jobs/{taker}/why")
    await m.done(staged)
    await m.ask("user ada", f"GET /v1/jobs/{staged}/why", 1)
    await m.finish(taker)
    await m.finish(wide)
    await m.finish(staged)


async def turns(m: Maker) -> None:
    """One operation of a stage at a time; and a new leader where it starts operations again."""
    several = [await m.submit("ada", bb="capacity=5GiB", time_limit_s=300) for _ in range(4)]
    for job in several[:3]:
        await m.until(job, "post_run")
    await m.configure(OperationsPerStage="1", RestartPolicy="slurm")
    for job in several[:3]:
        await m.done(job)
    await m.submit("ben", bb="capacity=5GiB")
    await m.operator("GET /v1/transfers")
    await m.ask("user ada", f"GET /v1/jobs/{several[1]}")
    await m.inside("restart_operations", 1, jobs=several)
    await m.inside("restart_operations", jobs=[999])
    for job in several:
        await m.done(job)
        await m.done(job)
    await m.configure(OperationsPerStage="128", RestartPolicy="forebay")
    await m.inside("restart_operations", jobs=several)
    for job in several:
        await m.finish(job)


async def nodes(m: Maker) -> None:
    """Nodes drained, resumed, silent, back, started anew."""
    job = await m.submit("ada", script=STAGED)
    found = await m.order(job)
    assert found is not None
    node = found[0]
    await m.operator(f"POST /v1/nodes/{node}/drain", reason="memory")
    await m.operator(f"POST /v1/nodes/{node}/drain", reason="more memory")
    await m.operator("POST /v1/nodes/n9/drain", reason="x")
    await m.operator("POST /v1/nodes/n9/resume")
    await m.operator("GET /v1/nodes")
    await m.inside("mark_node_down", 40, node=node, reason="its agent has not been heard of for 40 s")
    await m.inside("mark_node_down", node=node, reason="again")
    await m.inside("mark_node_back", 20, node=node)
    m.instances[node] += 1
    await m.register(node)
    await m.operator(f"POST /v1/nodes/{node}/resume")
    await m.operator(f"POST /v1/nodes/{node}/resume")
    await m.register(node, instance="other", storage_id="another disk")
    await m.finish(job)
    lost = await m.submit("ada", script=STAGED)
    found = await m.order(lost)
    assert found is not None
    node = found[0]
    await m.operator(f"POST /v1/nodes/{node}/lost", reason="it burnt")
    await m.inside("mark_node_down", 40, node=node, reason="its agent has not been heard of for 40 s")
    await m.ask("user ada", f"POST /v1/nodes/{node}/lost", reason="it is slow")
    await m.operator(f"POST /v1/nodes/{node}/lost", dry_run=True)
    for reason in ("it burnt", "again"):
        await m.operator(f"POST /v1/nodes/{node}/lost", reason=reason)
    await m.inside("mark_node_back", 20, node=node)
    await m.operator("GET /v1/nodes")
    removal = next(order for order in await m.orders(node) if order["job"] == lost)
    row = {"job": lost, "attempt": removal["attempt"], "stage": "teardown", "result": {"type": "done"}}
    for _ in range(2):
        await m.ask(f"agent {node}", f"POST /v1/agents/{node}/reports", 1, reports=[row])
    await m.finish(lost)
    await m.ask("user ada", f"POST /v1/jobs/{lost}/requeue")
    await m.finish(lost)


async def filesystems(m: Maker) -> None:
    """A file system that all nodes mount: its pool, its movers, one that takes over from the other."""
    await m.operator("POST /v1/filesystems/bb/add", path="/bb/fast")
    await m.operator("POST /v1/filesystems/inner/add", path="/bb/fast/inner")
    await m.ask("user ada", "POST /v1/filesystems/mine/add", path="/mine")
    stripes = {"adapter": "lustre", "stripe_count": 4, "stripe_bytes": 1 << 20, "pool": "flash"}
    await m.operator("POST /v1/filesystems/spare/add", path="/bb/spare", quota="lustre", layout=stripes)
    await m.operator("POST /v1/filesystems/spare/add", path="/bb/spare", quota="zfs")
    await m.operator("POST /v1/pools/shared/add", quantity="64GiB", granularity="1GiB", filesystem="nowhere")
    await m.operator("POST /v1/pools/shared/add", quantity="64GiB", granularity="1GiB", filesystem="spare")
    await m.operator("POST /v1/pools/shared/change", filesystem="bb")
    for mover in ("m1", "m2"):
        about = {"instance": "i1", "storage_id": f"disk of {mover}", "cpus": 0}
        await m.operator(f"POST /v1/nodes/{mover}/admit")
        for seen in ({"bb": "another"} if mover == "m2" else {"nowhere": "x"}, {"bb": "the-one"}):
            await m.ask(f"agent {mover}", f"POST /v1/agents/{mover}/register", **about, filesystems=seen)
    await m.ask("user ada", "GET /v1/filesystems")
    first = await m.submit("ada", bb="capacity=4GiB pool=shared")
    other = await m.submit("ben", bb="capacity=4GiB pool=shared")
    await m.inside("mark_node_down", 40, node="m1", reason="its agent has not been heard of for 40 s")
    await m.operator("POST /v1/pools/shared/change", filesystem="")
    await m.until(first, "run")
    await m.inside("mark_node_back", 20, node="m1")
    await m.operator("POST /v1/nodes/m2/drain", reason="looked at")
    await m.finish(first)
    await m.finish(other)
    await m.operator("POST /v1/filesystems/bb/remove")
    await m.operator("POST /v1/pools/shared/remove")
    await m.operator("POST /v1/filesystems/spare/remove")
    await m.operator("POST /v1/filesystems/bb/remove")
    await m.operator("GET /v1/pools")


async def in_bulk(m: Maker) -> None:
    """Many commands in one request, and requests that are sent again."""
    work: dict[str, Any] = {"script": DW, "time_limit_s": 60, "workdir": "/out"}
    rows: list[dict[str, Any]] = [{"type": "submit_job", **work, "name": f"b{one}"} for one in range(3)]
    rows += [
        {"type": "submit_job", **work, "user": "ben"},
        {"type": "set_pool", "name": "disk", "quantity": "70GiB", "granularity": "5GiB"},
    ]
    first = int(m.state.next_job)
    await m.operator("POST /v1/commands", commands=[{**row, "user": "ada"} if "script" in row else row for row in rows])
    await m.ask(
        "user ada",
        "POST /v1/commands",
        same_id=True,
        commands=[{**row, "user": "ada"} if "script" in row else row for row in rows],
    )
    verbs = ("hold_job", "release_job", "suspend_job", "resume_job", "requeue_job", "cancel_job")
    for verb in verbs:
        await m.ask(
            "user ada",
            "POST /v1/commands",
            commands=[{"type": verb, "job_id": first}, {"type": verb, "job_id": f"{first + 1}"}],
        )
    rows = [{"type": "update_job", "job_id": first + 2, "nice": 1}, {"type": "clear_buffer", "job_id": first + 2}]
    rows += [{"type": "drain_node", "node": "n3", "reason": "bulk"}, {"type": "resume_node", "node": "n3"}]
    rows += [{"type": "clear_buffer", "name": "nosuch", "discard": True}, {"type": "clear_buffer"}]
    await m.operator("POST /v1/commands", commands=rows)
    await m.ask("user ada", "POST /v1/commands", commands=rows)
    once = await m.submit("ada", name="once")
    last = dict(m.lines[-1]["body"])
    await m.ask("user ada", "POST /v1/jobs", 1, same_id=True, **last)
    await m.ask("user ada", "POST /v1/jobs", same_id=True, **{**last, "name": "twice"})
    await m.ask("user ada", f"POST /v1/jobs/{once}/cancel", command_id="0" * 32)
    await m.ask("user ada", f"POST /v1/jobs/{once}/cancel", command_id="018bcfe5680070008000000000000000")
    await m.configure(Flags="PrivateData,EnablePersistent")
    await m.ask("user ben", f"GET /v1/jobs/{first + 2}")
    await m.ask("user ben", "GET /v1/buffers")
    await m.ask("user ben", f"GET /v1/jobs/{first + 2}/history")
    await m.configure(Flags="EnablePersistent", DenyUsers="cyd")
    await m.submit("cyd", script=DW)
    await m.configure(DenyUsers="eve", AllowRoot="no")


async def sessions(m: Maker) -> None:
    """Programs that number their commands, over hours."""
    opened = await m.ask("user ada", "POST /v1/sessions")
    session = int(opened.body["session"])
    await m.ask("user ben", "POST /v1/sessions")
    job = await m.submit("ada", command_id=encode_session_command_id(session, 1, 0).hex())
    for sequence, acknowledged in ((2, 0), (2, 0), (4, 2), (3, 2), (3, 0), (2, 0)):
        made = encode_session_command_id(session, sequence, acknowledged).hex()
        await m.ask("user ada", f"POST /v1/jobs/{job}/hold", 3, command_id=made)
    await m.ask("user ben", f"POST /v1/jobs/{job}/hold", command_id=encode_session_command_id(session, 5, 4).hex())
    await m.operator("GET /v1/sessions")
    await m.ask("user ben", "GET /v1/sessions")
    await m.ask("user ben", f"POST /v1/sessions/{session}/close")
    itself = encode_session_command_id(session, 6, 4).hex()
    await m.ask("user ada", f"POST /v1/sessions/{session}/close", command_id=itself)
    await m.ask("user ada", "POST /v1/commands", commands=[{"type": "open_session"}, {"type": "open_session"}])
    await m.operator(f"POST /v1/sessions/{session}/close")
    await m.ask("user ada", "POST /v1/sessions/one/close")
    for after_s in (700, 3_700, 1):
        await m.inside("expire_cached_replies", after_s)
    await m.operator("GET /v1/sessions")
    await m.finish(job)


class Bridge:
    """What stands between another scheduler and the cluster."""

    def __init__(self, m: Maker) -> None:
        self.m = m

    async def tell(self, what: str, job: int = 7, after_s: float = 1, **more: Any) -> int:
        """Ask something for an external job; return the number of its record here."""
        path = f"POST /v1/external-jobs/{job}/{what}"
        answer = await self.m.ask("scheduler slurm", path, after_s, **{"cluster": "6f1c", **more})
        return int(answer.body.get("job_id") or 0) if answer.status == 200 else 0

    async def setup(self, job: int = 7, after_s: float = 1, **more: Any) -> int:
        body = {"user": "ada", "uid": 1000, "gid": 100, "script": SHARED, **more}
        return await self.tell("setup", job, after_s, **body)

    async def life(self, job: int, until: str) -> int:
        """Have an external job come as far as the step `until`."""
        number = await self.setup(job)
        for what in ("stage-in", "begin-run", "end-run", "stage-out"):
            await self.tell(what, job)
            if what == until:
                break
            if what == "stage-in":
                await self.m.done(number)
        return number


SHARED = asks(
    "#DW jobdw capacity=2GiB access_mode=striped type=scratch pool=shared",
    "#DW stage_in type=directory source=/in/%u destination=$DW_JOB_STRIPED/data",
    "#DW stage_out type=file source=$DW_JOB_STRIPED/result destination=/out/result.%j",
)


async def external_jobs(m: Maker) -> None:
    """Buffers whose jobs another scheduler has: whole lives, restarts, what lingers and what is retained."""
    await m.clear_away()
    slurm = Bridge(m)
    await slurm.setup()
    for cluster, address in (("6f1c", "head1"), ("6f1c", "head2"), ("another", "head7")):
        await m.ask("scheduler slurm", "POST /v1/scheduler/register", cluster=cluster, address=address)
    await slurm.setup()
    await m.operator("POST /v1/pools/shared/add", quantity="10GiB", granularity="1GiB")
    await slurm.setup()
    await m.operator("POST /v1/pools/shared/remove")
    await m.operator("POST /v1/filesystems/bb/add", path="/bb/fast")
    await m.operator("POST /v1/pools/shared/add", quantity="10GiB", granularity="1GiB", filesystem="bb")
    about = {"instance": "i1", "storage_id": "disk of m1", "cpus": 0}
    await slurm.setup(6)
    await slurm.tell("stage-in", 6)
    await slurm.tell("teardown", 6)
    await m.ask("agent m1", "POST /v1/agents/m1/register", **about, filesystems={"bb": "the-one"})
    for wrong in ({"uid": 0}, {"user": "root"}, {"script": asks("#DW jobdw")}, {"script": SCRIPT.format("")}):
        await slurm.setup(**wrong)
    first = await slurm.life(7, "stage-out")
    await m.ask("scheduler slurm", "GET /v1/external-jobs/7?while=waiting,set-up")
    for who in ("user ada", "operator"):
        await m.ask(who, "GET /v1/jobs/slurm:7")
    await m.ask("user ada", "GET /v1/jobs/slurm:7/why")
    await m.ask("user ada", "POST /v1/jobs/slurm:7/cancel")
    await m.done(first)
    for what in ("end-run", "stage-out", "teardown"):
        await slurm.tell(what)
    await m.done(first)
    again = await slurm.setup(epoch=2, pool="shared", size=3 << 30, groups=[100, 7], name="again", workdir="/out")
    await slurm.tell("stage-in", epoch=1)
    await slurm.tell("stage-in", epoch=2)
    await m.done(again)
    await slurm.tell("teardown", hurry=True)
    await m.ask("scheduler slurm", "GET /v1/scheduler/site")
    await slurm.setup(pool="shared", size=3 << 30, groups=[100, 7], name="again", workdir="/out")
    await slurm.tell("stage-in")
    await m.report(again, failed("no space left on the device", final=True))
    await slurm.tell("teardown", hurry=True)
    waits = await m.submit("ben", script=asks("#DW jobdw capacity=9GiB access_mode=striped pool=shared"))
    await m.done(again)
    for job in (8, 9):
        await slurm.setup(job, script=asks("#DW jobdw capacity=1GiB access_mode=striped type=scratch pool=shared"))
    await slurm.setup(10, 21, script=asks("#DW jobdw capacity=9GiB access_mode=striped type=scratch pool=shared"))
    await m.wait(30)
    await m.finish(waits)
    for job in (8, 9, 10, 11):
        await slurm.tell("teardown", job)
    passed = await m.submit("ben", script=asks("#DW jobdw capacity=6GiB access_mode=striped pool=shared"))
    await m.submit("ben", script=asks("#DW jobdw capacity=6GiB access_mode=striped pool=shared"))
    await slurm.life(12, "stage-out")
    retained = int(m.state.external_jobs["slurm:12"].job)
    await m.report(retained, failed("the disk quota is used up", final=True))
    await slurm.tell("teardown", 12)
    await m.operator("GET /v1/buffers?retained=yes")
    await m.operator("GET /v1/jobs?external_jobs=yes")
    await m.ask("user ben", "POST /v1/jobs/slurm:12/export")
    await m.ask("user ada", "POST /v1/jobs/slurm:12/export", partial=True)
    await m.finish(retained)
    await m.finish(passed)
    gone = await slurm.life(13, "begin-run")
    await slurm.tell("teardown", 13)
    await m.ask("user ada", "POST /v1/jobs/slurm:13/export")
    await m.operator("POST /v1/jobs/slurm:13/clear", discard=True)
    await m.finish(gone)
    kept = await slurm.life(14, "stage-in")
    await m.done(kept)
    await slurm.tell("teardown", 14, epoch=1)
    await m.wait(301)
    await m.finish(kept)
    for job, state in ((15, "staged-in"), (14, "running"), (15, "wrong\n")):
        await slurm.tell("miss", job, state=state)
    for job, until in ((16, "stage-in"), (17, "begin-run")):
        forgotten = await slurm.life(job, until)
        await m.done(forgotten)
        await slurm.tell("teardown", job, reason="Slurm does not know the job any more")
        await m.operator("GET /v1/jobs/slurm:17/history")
        await m.operator(f"POST /v1/jobs/slurm:{job}/clear", discard=True)
        await m.finish(forgotten)
    await _persistent_of_external_jobs(m, slurm)
    await m.ask("scheduler slurm", "GET /v1/external-jobs")
    await m.ask("scheduler slurm", "GET /v1/external-jobs?live=yes")
    await m.ask("scheduler slurm", "GET /v1/jobs")
    await m.ask("scheduler slurm", f"GET /v1/transfers/{first}")
    await m.ask("scheduler slurm", f"GET /v1/jobs/{waits}/why")
    await m.operator("GET /v1/schedulers")
    for name in ("slurm", "slurm"):
        await m.operator(f"POST /v1/schedulers/{name}/release")
    await m.ask("scheduler slurm", "POST /v1/scheduler/register", cluster="another", address="head7")
    await m.operator("POST /v1/schedulers/slurm/release")
    await m.clear_away()


async def drills(m: Maker) -> None:
    """Drills: one at a time, measured, ended, aborted, lost, and none while somebody wants none."""
    switchover = {"scenario": "switchover", "target": "r2", "lasts_s": 60, "plan": "f003ad4d"}
    for more in ({}, {}, {"scenario": "flood"}, {"lasts_s": 0}):
        await m.operator("POST /v1/drills", **{**switchover, **more})
    for number in (1, 2):
        await m.operator(f"POST /v1/drills/{number}/probe")
    await m.operator("POST /v1/drills/1/end", verdict="over", sentence="so")
    await m.operator("POST /v1/drills/1/end", 3, verdict="passed", sentence="well", figures={"write_stop_us": 12_000})
    await m.operator("POST /v1/drills", **switchover, forced=["lag"])
    for who in ("operator", "operator eve", "operator eve"):
        await m.ask(who, "POST /v1/drills/2/confirm")
    for reason in ("the phone rings", "it rings again"):
        await m.operator("POST /v1/drills/2/abort", reason=reason)
    await m.operator("POST /v1/drills/2/probe", 70)
    await m.operator("GET /v1/drills/2")
    await m.operator("POST /v1/drills", **switchover)
    for _ in range(2):
        await m.operator("POST /v1/drill-locks", reason="an audit")
    await m.operator("POST /v1/drills/3/end", verdict="aborted", sentence="operator wants no drills: an audit")
    await m.operator("POST /v1/drills", **switchover)
    await m.operator("GET /v1/drills")
    await m.operator("GET /v1/drills/3")
    for _ in range(2):
        await m.operator("POST /v1/drill-locks/operator/remove")
    await m.ask("user ada", "POST /v1/drills", **switchover)
    # Under a lease, which probes of who carries it out renew.
    for lease_s in (4, 9):
        await m.operator("POST /v1/drills", **switchover, lease_s=lease_s)
    for who, after_s in (("operator", 2), ("operator", 3), ("operator eve", 4), ("operator", 1)):
        await m.ask(who, "POST /v1/drills/4/probe", after_s)
    await m.operator("POST /v1/drills/4/end", 2, verdict="passed", sentence="well")


async def _persistent_of_external_jobs(m: Maker, slurm: Bridge) -> None:
    """A persistent buffer that another scheduler has made, used by an external job, and removed."""

    async def ask(what: str, name: str = "pond", **more: Any) -> None:
        body = {"cluster": "6f1c", "user": "ada", "uid": 1000, "gid": 100, **more}
        await m.ask("scheduler slurm", f"POST /v1/persistent/{name}/{what}", **body)

    wanted = {"pool": "shared", "size": 1 << 30}
    for wrong in ({"uid": 0}, {"pool": "fast"}):
        await ask("make", **{**wanted, **wrong})
    await ask("make", **wanted)
    await m.finish(m.state.next_job - 1)
    await ask("make", **wanted, user="ben")
    await m.ask("scheduler slurm", "GET /v1/persistent")
    uses = await slurm.setup(18, script=asks("#DW persistentdw name=pond"))
    await slurm.tell("stage-in", 18)
    await ask("remove", user="ben")
    await ask("remove", hurry=True)
    removing = m.state.next_job - 1
    await slurm.tell("teardown", 18)
    await m.finish(uses)
    await m.finish(removing)
    await ask("remove")


SCENES = (
    opening, lua_site, configuration, records, taken_away, whole_lives, runs, persistent, arrays, waiting, capacity,
    giving_way, turns, nodes, filesystems, in_bulk, external_jobs,
)  # fmt: skip

"""What people and programs see of transfers: under way, how far, receipts from the ledger, what was not exported."""

import asyncio
from typing import Any

import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.schemas import OPERATIONS
from forebay.cluster.security import Role
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import LeftOut, TransferCheckpoint, TransferReceipt
from forebay.replica.values.units import SIZE_BYTES_MAX
from tests.cluster.api.test_agents import WOKEN_S, poll, register
from tests.cluster.harness import SCRIPT, Answer, Harness, story, until

OUT = SCRIPT.replace("true\n", "#DW stage_out type=file source=$DW_JOB_STRIPED/r destination={}/r\ntrue\n")


async def says(harness: Harness, job: int, stage: str, result: c.OperationResult, **fields: Any) -> Answer:
    row = {
        "command_id": harness.new_id(),
        "job": job,
        "attempt": harness.controller.state.jobs[job].attempt,
        "stage": stage,
        "result": msgspec.to_builtins(result),
        **fields,
    }
    answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [row]}, who="n1")
    assert answer.status == 200, answer
    return answer


async def submit(harness: Harness) -> int:
    """Submit a job that stages out; return it once its stage-in is ordered."""
    answer = await harness.submit(script=OUT.format(harness.config.file.parent / "out"))
    job = int(answer.body["job_id"])
    await until(lambda: bool(harness.controller.state.jobs[job].attempt))
    return job


async def to_stage_out(harness: Harness, job: int) -> None:
    await says(harness, job, "stage_in", c.OperationDone())
    await until(lambda: harness.controller.state.buffers[job].state.word == "pre-run")
    await says(harness, job, "run", c.ScriptStarted())
    await says(harness, job, "run", c.ScriptEnded(JobState.COMPLETED))
    await says(harness, job, "post_run", c.OperationDone())
    assert harness.controller.state.buffers[job].state.word == "staging-out"


def receipt(stage: Stage = Stage.STAGE_IN, **fields: Any) -> TransferReceipt:
    made = TransferReceipt(stage, 1, files=2, size_bytes=4096, written_bytes=4096, digest="xxh3-128:ab")
    return msgspec.structs.replace(made, **fields)


async def configure(harness: Harness, **settings: str) -> None:
    body = {
        "command_id": harness.new_id(),
        "partial": True,
        "settings": [{"key": key, "value": value} for key, value in settings.items()],
    }
    answer = await harness.ask("POST", "/v1/configuration", body)
    assert answer.status == 200, answer


@story
async def test_what_is_moved_is_shown_with_its_limits_and_how_far_its_agent_says_it_is(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        await configure(harness, TransferRatePerNode="10MiB", TransfersAtOnce="1")
        (row,) = (await harness.ask("GET", "/v1/transfers", who="alice")).body["transfers"]
        assert (row["state"], row["updated_time"], row["time_left_s"]) == ("moving", None, None)
        assert (row["node_limit_bytes_s"], row["user_limit_bytes_s"], row["paused"]) == (10 * 2**20, None, False)
        said = {
            "job": job,
            "attempt": row["attempt"],
            "stage": "stage_in",
            "files_done": 1,
            "files_total": 3,
            "bytes_done": 100,
            "bytes_total": 1_100,
            "rate_bytes_s": 500.0,
            "directories_done": 4,
            "retries": 2,
            "resumed_bytes": 60,
            "phase": "copying",
            "file": "deep/below/file",
            "waiting": True,
        }
        answer = await poll(harness, progress=[said])
        (order,) = answer.body["orders"]
        assert order["shares"] == [None, None, 10 * 2**20] and order["rules"][4] is None
        waiting = await submit(harness)
        rows = (await harness.ask("GET", "/v1/transfers", who="operator")).body["transfers"]
        assert [(row["job_id"], row["state"]) for row in rows] == [(job, "moving"), (waiting, "queued")]
        assert (rows[0]["time_left_s"], rows[0]["file"], rows[0]["phase"]) == (2.0, "deep/below/file", "copying")
        assert (rows[0]["retries"], rows[0]["resumed_bytes"], rows[0]["waiting"]) == (2, 60, True)
        # Which file it is, is for its user and for operators.
        rows = (await harness.ask("GET", "/v1/transfers", who="bob")).body["transfers"]
        assert (rows[0]["file"], rows[0]["bytes_done"]) == ("", 100)
        rows = (await harness.ask("GET", "/v1/transfers", who="alice")).body["transfers"]
        assert rows[0]["file"] == ("deep/below/file" if rows[0]["user"] == "alice" else "")
        text = (await harness.ask("GET", "/metrics")).body.decode()
        assert "forebay_transfers 1.0\n" in text and "forebay_transfers_left_bytes 1000.0\n" in text
        assert 'forebay_transfer_limit_bytes_per_second{scope="node"} 1.048576e+07\n' in text
        assert "forebay_transfers_held_back 1.0\n" in text


@story
async def test_a_new_limit_reaches_an_agent_that_waits_and_so_does_a_share_that_shrinks(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        await submit(harness)
        seen = (await poll(harness)).body["revision"]
        waiting = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        await configure(harness, TransferRateOfCluster="1000")
        answer = await asyncio.wait_for(waiting, WOKEN_S)
        assert [order["shares"] for order in answer.body["orders"]] == [[None, None, 1000]]
        # Another node begins to move data: this one hears of its smaller share.
        await register(harness, "n2", "j")
        seen = (await poll(harness)).body["revision"]
        waiting = asyncio.create_task(poll(harness, seen_revision=seen, wait_s=30))
        await until(lambda: harness.controller.orders.waiting == 1)
        other = await submit(harness)
        assert harness.controller.state.jobs[other].node == "n2"
        answer = await asyncio.wait_for(waiting, WOKEN_S)
        assert [order["shares"] for order in answer.body["orders"]] == [[None, None, 500]]


@story
async def test_receipts_are_shown_and_stay_in_the_ledger_when_their_job_is_gone(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        failed = receipt(complete=False, left_out=1, left_out_first=(LeftOut("/in/fifo", "a FIFO"),))
        reached = c.TransferProgressed(TransferCheckpoint(Stage.STAGE_IN, 1, 1, 2048, 2, 4096))
        await says(harness, job, "stage_in", reached)
        shown = (await harness.ask("GET", f"/v1/transfers/{job}", who="alice")).body
        assert shown["checkpoint"]["size_bytes"] == 2048 and shown["transfer"]["state"] == "moving"
        await says(harness, job, "stage_in", c.OperationFailed("it broke", receipt=failed))
        shown = (await harness.ask("GET", f"/v1/transfers/{job}", who="operator")).body
        assert (shown["transfer"]["state"], shown["checkpoint"]) == ("retrying", None)
        assert "it broke" in shown["transfer"]["message"]
        await until(lambda: not harness.controller.state.jobs[job].retry_at)
        attempt = harness.controller.state.jobs[job].attempt
        await says(harness, job, "stage_in", c.OperationDone(receipt=receipt(resumed_files=1, resumed_bytes=2048)))
        found = (await harness.ask("GET", f"/v1/jobs/{job}", who="operator")).body["transfers"]
        assert [(one["attempt"], one["complete"]) for one in found["receipts"]] == [(1, False), (attempt, True)]
        history = (await harness.ask("GET", f"/v1/jobs/{job}/history", who="operator")).body["rows"]
        sentences = [row["sentence"] for row in history if row["event"].startswith("transfer_")]
        assert sentences == [
            "stage-in continues: 1 file, 2KiB are durable",
            "stage-in moved before it failed: 2 files, 4KiB; 1 left out: /in/fifo (a FIFO); receipt xxh3-128:ab",
            "stage-in moved: 2 files, 4KiB; 1 file, 2KiB of it by an earlier attempt; receipt xxh3-128:ab",
        ]
        await configure(harness, FinishedJobsKept="0")
        await harness.ask("POST", f"/v1/jobs/{job}/cancel", {"command_id": harness.new_id(), "hurry": True})
        await says(harness, job, "run", c.ScriptEnded(JobState.CANCELLED))
        await says(harness, job, "teardown", c.OperationDone())
        await until(lambda: job not in harness.controller.state.jobs)
        gone = await harness.ask("GET", f"/v1/transfers/{job}", who="operator")
        assert gone.status == 404 and "receipts" in gone.body["error"]["remedy"]
        answer = (await harness.ask("GET", f"/v1/transfers/{job}/receipts", who="operator")).body
        assert answer["complete"] and [one["complete"] for one in answer["receipts"]] == [False, True]
        assert all(one["revision"] for one in answer["receipts"])
        assert answer["receipts"][0]["left_out_first"] == [{"path": "/in/fifo", "reason": "a FIFO"}]
        others = (await harness.ask("GET", f"/v1/transfers/{job}/receipts?attempt=1", who="bob")).body["receipts"]
        assert [(one["attempt"], one["left_out"], one["left_out_first"]) for one in others] == [(1, 1, [])]
        none = (await harness.ask("GET", f"/v1/transfers/{job}/receipts?stage=stage_out")).body
        assert (none["receipts"], none["complete"]) == ([], True)
        for query in ("stage=run", "attempt=0", "attempt=x"):
            assert (await harness.ask("GET", f"/v1/transfers/{job}/receipts?{query}")).status == 400
        assert (await harness.ask("GET", "/v1/transfers/99/receipts")).status == 404
        text = (await harness.ask("GET", "/metrics")).body.decode()
        assert 'forebay_transfers_ended_total{outcome="failed",stage="stage_in"} 1.0\n' in text
        assert 'forebay_transferred_bytes_total{stage="stage_in"} 8192.0\n' in text
        assert 'forebay_transfer_resumed_bytes_total{stage="stage_in"} 2048.0\n' in text


@story
async def test_what_was_not_exported_is_shown_until_it_is_and_said_to_be_lost_when_it_is(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        await to_stage_out(harness, job)
        await says(harness, job, "stage_out", c.OperationFailed("the destination is full", final=True))
        shown = (await harness.ask("GET", f"/v1/jobs/{job}", who="operator")).body
        (missing,) = shown["transfers"]["not_exported"]
        assert missing["path"].endswith("/out/r") and "the destination is full" in missing["why"]
        assert (missing["lost"], shown["transfers"]["transfer"]["state"]) == (False, "failed")
        assert shown["burst_buffer_state"] == "staging-out"  # the only copy is kept
        await harness.ask("POST", f"/v1/jobs/{job}/cancel", {"command_id": harness.new_id(), "hurry": True})
        (missing,) = (await harness.ask("GET", f"/v1/transfers/{job}")).body["not_exported"]
        assert missing["lost"]


@story
async def test_paths_of_others_are_not_shown_where_data_is_private(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        await configure(harness, PrivateData="yes")
        user = harness.controller.state.jobs[job].request.user
        for who in ("alice", "bob"):
            expected = 200 if who == user else 403
            assert (await harness.ask("GET", f"/v1/transfers/{job}", who=who)).status == expected
            assert (await harness.ask("GET", f"/v1/transfers/{job}/receipts", who=who)).status == expected
            rows = (await harness.ask("GET", "/v1/transfers", who=who)).body["transfers"]
            assert bool(rows) == (who == user)
            shown = (await harness.ask("GET", f"/v1/jobs/{job}", who=who)).body
            assert bool(shown["transfers"]) == (who == user)


@pytest.mark.parametrize("number", [-1, 2**63, 2**80])
@story
async def test_numbers_that_no_ledger_holds_are_cut_and_the_report_counts(config: Config, number: int) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        await says(
            harness, job, "stage_in", c.TransferProgressed(TransferCheckpoint(Stage.STAGE_IN, 1, size_bytes=number))
        )
        done = c.OperationDone(number, number, "", receipt(files=number, left_out=number))
        answer = await says(harness, job, "stage_in", done)
        assert answer.body["results"][0]["outcome"] == "accepted", answer
        kept = harness.controller.state.transfers[job].receipts[0]
        assert kept.files == kept.left_out == (0 if number < 0 else SIZE_BYTES_MAX)


@story
async def test_a_report_with_a_job_number_that_cannot_be_one_is_refused_with_its_place(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        row = {
            "command_id": harness.new_id(),
            "job": 2**70,
            "attempt": 1,
            "stage": "stage_in",
            "result": {"type": "done"},
        }
        answer = await harness.ask("POST", "/v1/agents/n1/reports", {"reports": [row]}, who="n1")
        assert answer.status == 400 and harness.controller.state.jobs[job].attempt == 1


@story
async def test_who_carries_out_drills_reads_of_nobodys_files_whatever_it_asks(config: Config) -> None:
    async with Harness(config) as harness:
        await register(harness)
        job = await submit(harness)
        said = {
            "job": job, "attempt": harness.controller.state.jobs[job].attempt, "stage": "stage_in", "files_done": 1,
            "files_total": 3, "bytes_done": 100, "bytes_total": 1_100, "rate_bytes_s": 500.0, "directories_done": 4,
            "retries": 2, "resumed_bytes": 60, "phase": "copying", "file": "secret/file", "waiting": True,
        }  # fmt: skip
        await poll(harness, progress=[said])
        await heard(harness, "moving")
        failed = receipt(complete=False, left_out=1, left_out_first=(LeftOut("/secret/fifo", "a FIFO"),))
        await says(harness, job, "stage_in", c.OperationFailed("/secret/place: it broke", receipt=failed))
        told = await heard(harness, "retrying")
        rows = [row for row in told["show_history"]["rows"] if row["job_id"] == job]
        assert not [row for row in told["show_history"]["rows"] if row["job_id"] == job]
        await until(lambda: not harness.controller.state.jobs[job].retry_at)
        await register(harness, "n1", "another")
        assert all_of(await harness.ask("GET", "/v1/history"), job)[-1:] == ["stage_retried"]
        rows = (await harness.ask("GET", "/v1/history", who="dora")).body["rows"]
        assert {(row["event"], row["job_id"], row["user"], str(row["detail"])) for row in rows} == {
            ("stage_retried", job, None, "{}")
        }, "of a command that registered a node nothing else"


def all_of(history: Answer, job: int) -> list[str]:
    """Return the events of a job in an answer that has those of all."""
    return [row["event"] for row in history.body["rows"] if row["job_id"] == job]


async def heard(harness: Harness, state: str) -> dict[str, Any]:
    """Return all that the role drill may read, with no name of a file in it, while a transfer is in a state."""
    told = {}
    for name, operation in OPERATIONS.items():
        if operation.method == "GET" and Role.DRILL in operation.roles and "{" not in operation.path:
            answer = await harness.ask("GET", operation.path, who="dora")
            assert answer.status == 200 and "secret" not in str(answer.body), name
            told[name] = answer.body
    assert [row["state"] for row in told["list_transfers"]["transfers"]] == [state]
    everything = (await harness.ask("GET", "/v1/transfers", who="operator")).body
    assert "secret" in str(everything), "there is something that could have been said"
    return told

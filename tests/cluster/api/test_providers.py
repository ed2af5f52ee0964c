"""A cluster with a site's own provider, over HTTP: validation at submit, pools, bbstat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay.cluster.config.config import Config
from tests.cluster.harness import Harness, story, until
from tests.cluster.provided import configure, provided, script


@story
async def test_a_submit_is_validated_by_the_script_and_refused_with_its_words(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Harness(config) as harness:
        await configure(harness, programs, validate_s=2)
        try:
            good = await harness.ask("POST", "/v1/jobs", harness.job(script=script()))
            assert good.status == 201, good.body
            bad = await harness.ask("POST", "/v1/jobs", harness.job(script=script("process:fail:not_for_you")))
            assert (bad.status, bad.code) == (400, "provider_refused")
            assert bad.sentence == "burst_buffer/lua: not for you"
            slow = await harness.ask("POST", "/v1/jobs", harness.job(script=script("process:spin")))
            assert (slow.status, slow.sentence) == (400, "burst_buffer/lua: Timeout @ 2000 msec")
            asked = len(programs.calls())
            plain = await harness.ask("POST", "/v1/jobs", harness.job(script="#!/bin/sh\ntrue\n"))
            assert plain.status == 201 and len(programs.calls()) == asked, "no buffer, no question"
            again = harness.job(script=script())
            for _ in range(2):
                assert (await harness.ask("POST", "/v1/jobs", again)).status == 201
            assert len(programs.calls()) == asked + 1, "a retry is not validated again"
            many = {
                "commands": [
                    {"type": "submit_job", **harness.job(script=script(action))}
                    for action in ("x:1", "process:fail:no", "y:2")
                ]
            }
            bulk = await harness.ask("POST", "/v1/commands", many)
            assert [row["status"] for row in bulk.body["results"]] == [201, 400, 201], bulk.body
            programs.script.write_text("this is no Lua\n")
            broken = await harness.ask("POST", "/v1/jobs", harness.job(script=script()))
            assert broken.status == 400 and "syntax error" in broken.sentence
        finally:
            await harness.service.providing.close()


@story
async def test_a_provider_that_is_too_busy_refuses_for_the_moment_only(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Harness(config) as harness:
        await configure(harness, programs)
        try:
            asked = harness.job(script=script())
            with monkeypatch.context() as busy:
                busy.setattr("forebay.cluster.providers.calls.CALLS_WAITING_MAX", 0)
                for _ in range(2):
                    refused = await harness.ask("POST", "/v1/jobs", asked)
                    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "queue_full", "1")
                many = await harness.ask("POST", "/v1/commands", {"commands": [{"type": "submit_job", **asked}]})
                assert [row["status"] for row in many.body["results"]] == [429]
            assert (await harness.ask("POST", "/v1/jobs", asked)).status == 201, "it was no verdict on the job"
        finally:
            await harness.service.providing.close()


@story
async def test_the_verdict_on_one_job_is_not_that_on_another_with_the_same_id(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Harness(config) as harness:
        await configure(harness, programs)
        try:
            good = harness.job(script=script())
            bad = {**harness.job(script=script("process:fail:no")), "command_id": good["command_id"]}
            slow = harness.job(script=script("process:sleep:1"))
            many = {"commands": [{"type": "submit_job", **one} for one in (good, slow)]}
            asked = asyncio.create_task(harness.ask("POST", "/v1/commands", many))
            await until(lambda: len(programs.calls()) == 2)
            await until(lambda: bool(harness.service.providing._verdicts))
            assert (await harness.ask("POST", "/v1/jobs", bad)).status == 400
            assert [row["status"] for row in (await asked).body["results"]] == [201, 201]
        finally:
            await harness.service.providing.close()


@story
async def test_bbstat_is_what_the_provider_says_or_that_it_failed(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Harness(config) as harness:
        native = await harness.ask("GET", "/v1/bbstat")
        assert (native.status, native.code) == (409, "wrong_state")
        await configure(harness, programs)
        try:
            said = await harness.ask("GET", '/v1/bbstat?arguments=["arg1","arg2"]')
            assert (said.status, said.body["text"]) == (200, "arg1 arg2\n")
            for arguments in ("{}", '["a",1]', "[" * 5000, '["' + "a" * 2000 + '"]'):
                assert (await harness.ask("GET", f"/v1/bbstat?arguments={arguments}")).status in (400, 414, 431)
            programs.script.write_text('function slurm_bb_get_status() return slurm.ERROR, "down" end\n')
            failed = await harness.ask("GET", "/v1/bbstat")
            assert (failed.status, failed.sentence) == (409, "Error running slurm_bb_get_status: down")
        finally:
            await harness.service.providing.close()

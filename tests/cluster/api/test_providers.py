"""A cluster with a site's own provider, over HTTP: validation at submit, pools, bbstat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from cluster.config.config import Config
from tests.cluster.provided import configure, provided, script
from tests.cluster.rig import Rig, story, until


@story
async def test_a_submit_is_validated_by_the_script_and_refused_with_its_words(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Rig(config) as rig:
        await configure(rig, programs)
        try:
            good = await rig.ask("POST", "/v1/jobs", rig.job(script=script()))
            assert good.status == 201, good.body
            bad = await rig.ask("POST", "/v1/jobs", rig.job(script=script("process:fail:not_for_you")))
            assert (bad.status, bad.code) == (400, "provider_refused")
            assert bad.sentence == "burst_buffer/lua: not for you"
            slow = await rig.ask("POST", "/v1/jobs", rig.job(script=script("process:spin")))
            assert (slow.status, slow.sentence) == (400, "burst_buffer/lua: Timeout @ 2000 msec")
            asked = len(programs.calls())
            plain = await rig.ask("POST", "/v1/jobs", rig.job(script="#!/bin/sh\ntrue\n"))
            assert plain.status == 201 and len(programs.calls()) == asked, "no buffer, no question"
            again = rig.job(script=script())
            for _ in range(2):
                assert (await rig.ask("POST", "/v1/jobs", again)).status == 201
            assert len(programs.calls()) == asked + 1, "a retry is not validated again"
            many = {
                "commands": [
                    {"type": "submit_job", **rig.job(script=script(action))}
                    for action in ("x:1", "process:fail:no", "y:2")
                ]
            }
            bulk = await rig.ask("POST", "/v1/commands", many)
            assert [row["status"] for row in bulk.body["results"]] == [201, 400, 201], bulk.body
            programs.script.write_text("this is no Lua\n")
            broken = await rig.ask("POST", "/v1/jobs", rig.job(script=script()))
            assert broken.status == 400 and "syntax error" in broken.sentence
        finally:
            await rig.service.providing.close()


@story
async def test_a_provider_that_is_too_busy_refuses_for_the_moment_only(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Rig(config) as rig:
        await configure(rig, programs)
        try:
            asked = rig.job(script=script())
            with monkeypatch.context() as busy:
                busy.setattr("cluster.providers.calls.CALLS_WAITING_MAX", 0)
                for _ in range(2):
                    refused = await rig.ask("POST", "/v1/jobs", asked)
                    assert (refused.status, refused.code, refused.headers["Retry-After"]) == (429, "queue_full", "1")
                many = await rig.ask("POST", "/v1/commands", {"commands": [{"type": "submit_job", **asked}]})
                assert [row["status"] for row in many.body["results"]] == [429]
            assert (await rig.ask("POST", "/v1/jobs", asked)).status == 201, "it was no verdict on the job"
        finally:
            await rig.service.providing.close()


@story
async def test_the_verdict_on_one_job_is_not_that_on_another_with_the_same_id(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Rig(config) as rig:
        await configure(rig, programs)
        try:
            good = rig.job(script=script())
            bad = {**rig.job(script=script("process:fail:no")), "command_id": good["command_id"]}
            slow = rig.job(script=script("process:sleep:1"))
            many = {"commands": [{"type": "submit_job", **one} for one in (good, slow)]}
            asked = asyncio.create_task(rig.ask("POST", "/v1/commands", many))
            await until(lambda: len(programs.calls()) == 2)
            await until(lambda: bool(rig.service.providing._verdicts))
            assert (await rig.ask("POST", "/v1/jobs", bad)).status == 400
            assert [row["status"] for row in (await asked).body["results"]] == [201, 201]
        finally:
            await rig.service.providing.close()


@story
async def test_bbstat_is_what_the_provider_says_or_that_it_failed(config: Config, tmp_path: Path) -> None:
    config, programs = provided(config, tmp_path / "programs")
    async with Rig(config) as rig:
        native = await rig.ask("GET", "/v1/bbstat")
        assert (native.status, native.code) == (409, "wrong_state")
        await configure(rig, programs)
        try:
            said = await rig.ask("GET", '/v1/bbstat?arguments=["arg1","arg2"]')
            assert (said.status, said.body["text"]) == (200, "arg1 arg2\n")
            for arguments in ("{}", '["a",1]', "[" * 5000, '["' + "a" * 2000 + '"]'):
                assert (await rig.ask("GET", f"/v1/bbstat?arguments={arguments}")).status in (400, 414, 431)
            programs.script.write_text('function slurm_bb_get_status() return slurm.ERROR, "down" end\n')
            failed = await rig.ask("GET", "/v1/bbstat")
            assert (failed.status, failed.sentence) == (409, "Error running slurm_bb_get_status: down")
        finally:
            await rig.service.providing.close()

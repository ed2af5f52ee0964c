"""Suspend, resume, requeue and clear over HTTP: who may, what comes of it, and what a rejection says."""

from __future__ import annotations

from forebay.cluster.config.config import Config
from tests.cluster.harness import Harness, story


@story
async def test_what_is_done_to_a_run_is_refused_with_the_words_of_the_decision_where_there_is_none(
    config: Config,
) -> None:
    async with Harness(config) as harness:
        job = (await harness.submit(hold=True)).body["job_id"]
        for what, words in (
            ("suspend", "only running jobs can be suspended"),
            ("resume", "only suspended jobs can be resumed"),
            ("requeue", "no action is needed: the job already waits"),
            ("clear", "only buffers whose teardown"),
        ):
            answer = await harness.ask("POST", f"/v1/jobs/{job}/{what}", {"command_id": harness.new_id()})
            assert (answer.status, answer.code) == (409, "wrong_state"), what
            assert words in str(answer.body), what


@story
async def test_clearing_a_persistent_buffer_that_is_not_there_says_where_the_buffers_are_listed(config: Config) -> None:
    async with Harness(config) as harness:
        answer = await harness.ask(
            "POST", "/v1/persistent/lake/clear", {"command_id": harness.new_id(), "discard": True}
        )
        assert (answer.status, answer.code) == (409, "wrong_state")
        assert "persistent buffer 'lake' does not exist" in answer.sentence

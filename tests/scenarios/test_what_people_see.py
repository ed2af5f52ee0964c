"""What people see of a cluster's life, as transcripts that read as stories.

With FOREBAY_REWRITE_GOLDEN=1 the files under seen/ are written again: look at the difference before it is committed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.replica.messages import commands as c
from forebay.replica.model.buffers import BufferState as B
from forebay.replica.model.pools import Pool
from forebay.replica.values.errors import Rejection
from tests.scenarios.stage import Stage

SEEN = Path(__file__).parent / "seen"
KIB, MIB, GIB = 1024, 1024**2, 1024**3

LUA = "BurstBufferType=burst_buffer/lua\n"
DATAWARP = (
    "BurstBufferType=burst_buffer/datawarp\nDefaultPool=wlm_pool\nFlags=EmulateCray,EnablePersistent\n"
    "GetSysState=/opt/bin/dw_wlm_cli\nGetSysStatus=/opt/bin/dwstat\n"
)


def stage(configuration: str, *pools: Pool, cpus: int = 8) -> Stage:
    here = Stage(configuration, pools={"scaffold": 1}, cpus=cpus)
    for pool in pools:
        assert not isinstance(here.settle(c.SetPool(pool)), Rejection)
    assert not isinstance(here.settle(c.RemovePool("scaffold")), Rejection)
    here.run_pass()
    return here


def lua() -> Stage:
    return stage(LUA, Pool("pool1", 100 * KIB, KIB), Pool("pool2", 10 * GIB, GIB), Pool("unit", 4, 1))


def datawarp() -> Stage:
    return stage(DATAWARP, Pool("wlm_pool", 5800 * GIB, 200 * GIB, is_default=True), Pool("test_pool", 100 * MIB, MIB))


def a_normal_life() -> Stage:
    here = lua()
    here.burst()
    job = here.asks("#BB_LUA pool=pool1 capacity=1000 data_in_sleep=3", mail_types=("all",))
    here.standing(job)
    here.burst()
    here.queue()
    for state in (B.PRE_RUN, B.RUNNING, B.POST_RUN, B.STAGING_OUT, B.TEARDOWN):
        here.until(job, state, seconds=2)
        here.standing(job)
        if state in (B.RUNNING, B.STAGING_OUT):
            here.job(job)
            here.queue()
    here.burst()
    here.until(job, B.COMPLETE)
    here.standing(job)
    here.mails()
    here.burst()
    here.burst(one_line=True)
    here.queue()
    return here


def who_waits_for_space() -> Stage:
    here = lua()
    here.say("A takes 8 of 10 GiB; B waits for it; C fits past B; D asks for nothing")
    first = here.asks("#BB_LUA pool=pool2 capacity=8G", name="A")
    here.wait(1)
    here.asks("#BB_LUA pool=pool2 capacity=8G", name="B")
    here.asks("#BB_LUA pool=pool2 capacity=1G", name="C", time_limit_s=10, who="bbu2")
    here.asks("#BB_LUA pool=unit capacity=3", name="U")
    here.asks(name="D")
    here.until(first, B.RUNNING)
    here.queue("%i %j %t %r %B")
    here.burst()
    here.say("an operator takes half of the pool away while 9 GiB of it are in use, and a quarter out of service")
    changed = here.settle(c.ChangePool("pool2", quantity=5 * GIB, out_of_service=GIB))
    assert not isinstance(changed, Rejection), changed
    here.burst()
    return here


def tasks_of_an_array() -> Stage:
    here = lua()
    here.asks("#BB_LUA pool=pool1 capacity=1KiB", array=(1, 2, 3), throttle=2)
    here.wait(1)
    here.queue()
    here.burst()
    here.job(2)
    return here


def persistent_buffers() -> Stage:
    here = datawarp()
    here.burst()
    create = here.asks(
        "#BB create_persistent name=alpha capacity=32GB access=striped type=scratch",
        "#BB create_persistent name=beta capacity=16MB access=striped type=scratch pool=test_pool",
        nodes=0,
        name="create",
    )
    here.standing(create)
    here.burst()
    here.finish(create)
    use = here.asks("#DW persistentdw name=alpha", name="use")
    here.until(use, B.RUNNING)
    here.queue()
    here.burst()
    here.until(use, B.COMPLETE)
    here.job(create)
    remove = here.asks(
        "#BB destroy_persistent name=alpha hurry", "#BB destroy_persistent name=beta", nodes=0, name="destroy"
    )
    here.burst()
    here.finish(remove)
    here.burst()
    return here


def operations_that_fail() -> Stage:
    here = datawarp()
    for message, operation in (("Error creating instance: 400", "setup"), ("offline namespaces", "data_in")):
        job = here.asks("#DW jobdw capacity=1M pool=test_pool type=scratch access_mode=striped")
        here.fails(job, message, operation)
        here.standing(job)
        here.job(job)
    out = here.asks(
        "#DW jobdw capacity=1M pool=test_pool type=scratch access_mode=striped",
        "#DW stage_out type=file source=$DW_JOB_STRIPED/x destination=/out/x",
    )
    here.until(out, B.STAGING_OUT)
    here.fails(out, "EIO", "data_out")
    here.job(out)
    here.queue()
    here.burst()
    return here


def data_that_is_private() -> Stage:
    here = stage(
        "BurstBufferType=burst_buffer/datawarp\nFlags=PrivateData\nAllowUsers=bbu1,bbu2,stranger\nStageInTimeout=30\n",
        Pool("fast", 3 * 1000**4, 10**9, is_default=True),
    )
    for who in ("bbu1", "bbu2", "stranger"):
        here.asks("#DW jobdw capacity=2TB type=scratch access_mode=striped" if who == "bbu1" else
                  "#DW jobdw capacity=1GB type=scratch access_mode=striped", who=who)  # fmt: skip
        here.wait(1)
    here.say("an operator sees all; nobody here knows the number of stranger")
    here.burst()
    here.say("bbu2 sees what is bbu2's")
    here.burst(only_user="bbu2")
    return here


STORIES: tuple[Callable[[], Stage], ...] = (
    a_normal_life,
    who_waits_for_space,
    tasks_of_an_array,
    persistent_buffers,
    operations_that_fail,
    data_that_is_private,
)


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_what_people_see_is_what_they_saw_before(story: Callable[[], Stage]) -> None:
    text = "\n".join(story().text) + "\n"
    file = SEEN / f"{story.__name__}.txt"
    if os.environ.get("FOREBAY_REWRITE_GOLDEN") == "1":
        file.write_text(text)
    assert text == file.read_text()


def test_no_transcript_is_left_of_a_story_that_is_gone() -> None:
    assert {file.stem for file in SEEN.iterdir()} == {story.__name__ for story in STORIES}

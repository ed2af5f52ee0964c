"""Whatever a client writes becomes a command or a problem with a sentence, never anything else."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from forebay.cluster.api import request_decoding
from forebay.cluster.api.render.events import _SENTENCES, as_json, event_name, sentence_of
from forebay.cluster.api.web.bodies import decode
from forebay.cluster.api.web.problems import Problem
from forebay.cluster.schemas import agents as agent_schemas
from forebay.cluster.schemas import requests as r
from forebay.cluster.schemas.event_kinds import kind_name
from forebay.cluster.schemas.external_jobs import SetUpExternalJobRequest
from forebay.cluster.schemas.job_fields import SubmitRequest, UpdateRequest
from forebay.cluster.security.identity import Identity, Role
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.messages.events import Event
from forebay.replica.model.configuration import DEFAULT_SITE
from forebay.replica.model.requests import (
    BufferRequest,
    CreatePersistent,
    DestroyPersistent,
    JobOptions,
    JobRequest,
    ListTransfer,
)
from forebay.replica.model.stages import Stage
from forebay.replica.values.units import NEVER

ALICE = Identity(Role.USER, "alice")
GOOD: dict[str, Any] = {
    "command_id": "0192c3b4a5d67000800000000000000a",
    "script": "#!/bin/sh\n#DW jobdw capacity=1GiB access_mode=striped type=scratch\n",
    "time_limit_s": 60,
    "workdir": "/",
}
WORDS = st.sampled_from(["#DW", "#BB", "jobdw", "stage_in", "capacity=", "1GiB", "=", "\\", "\n", "\0", "é", "🙂", " "])
TEXT = st.one_of(st.text(max_size=40), st.lists(WORDS, max_size=12).map(" ".join))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([*SubmitRequest.__struct_fields__, "walltime"])


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, JSON, max_size=5))
def test_any_submission_becomes_a_command_or_a_problem_with_a_sentence(changes: dict[str, Any]) -> None:
    body = json.dumps({**GOOD, **changes}).encode()
    try:
        command = request_decoding.submission(decode(body, SubmitRequest), ALICE)[0]
    except Problem as problem:
        assert 400 <= problem.status < 500
        assert problem.view.sentence
        assert problem.view.outcome == "rejected"
    else:
        assert isinstance(command, c.SubmitJob)
        assert command.request.user == "alice"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_body_or_a_problem(data: bytes) -> None:
    for kind in (SubmitRequest, r.BulkRequest, agent_schemas.PollRequest, agent_schemas.ReportsRequest):
        try:
            decode(data, kind)
        except Problem as problem:
            assert problem.status == 400


def test_every_event_has_a_sentence_and_a_name() -> None:
    kinds = set(Event.__args__)
    assert set(_SENTENCES) == kinds
    assert len({kind_name(kind) for kind in kinds}) == len(kinds)
    assert kind_name(e.StagedIn) == event_name(e.StagedIn(1, 0, 0)) == "staged_in"


def test_what_others_may_see_of_a_job_leaves_out_its_script_and_environment() -> None:
    spec = JobRequest("n", "u", "#!/bin/sh\nsecret\n", "/", 60, environment=(("TOKEN", "secret"),))
    event = e.JobSubmitted(1, replace(spec, buffer=BufferRequest("", 0, (), "", (), (), "")))
    assert "secret" not in json.dumps(as_json(event, private=False))
    assert "secret" in json.dumps(as_json(event, private=True))
    assert sentence_of(event)


def test_a_history_says_of_each_option_that_a_job_gave_what_it_asked_for() -> None:
    buffer = BufferRequest(
        "", 0, (), "scratch", (), (), "",
        creates=(CreatePersistent("lake", 8 * 2**20),), destroys=(DestroyPersistent("pond"),), uses=("sea",),
        swap_bytes=2**30, options=("colour=blue",), stage_in_command="/bin/fill", stage_out_command="/bin/drain",
        lists=(ListTransfer(False, "/in/list", "$DW_JOB_STRIPED"), ListTransfer(True, "/in/out", "/out")),
    )  # fmt: skip
    options = JobOptions(
        nodes=0, account="physics", qos="high", licenses=(("matlab", 2),), reservation="night", nice=7,
        singleton=True, any_of=True, requeue=False, mail_types=("end", "fail"), partition="long",
    )  # fmt: skip
    asked = JobRequest("n", "u", "#!/bin/sh\n", "/", 60, buffer=buffer, options=options)
    said = sentence_of(e.JobSubmitted(4, asked, array=e.SubmittedTasks((3,))))
    for words in (
        "no nodes", "account physics", "QOS high", "licences matlab:2", "reservation night", "nice 7", "mail end,fail",
        "as tasks 3 of array 4", "any one dependency suffices", "only one job of this name at a time",
        "not to be requeued", "partition long",
        "persistent buffer lake to be created (8MiB of the default pool)", "persistent buffer pond to be removed",
        "persistent buffer sea", "1GiB of swap on each node", "colour=blue for the provider",
        "stage-in by its own command", "stage-out by its own command",
        "stage-in of the files listed in /in/list", "stage-out of the files listed in /in/out",
    ):  # fmt: skip
        assert words in said
    plain = JobRequest("n", "u", "#!/bin/sh\n", "/", 60, options=JobOptions(nice=1))
    assert sentence_of(e.JobSubmitted(1, plain)) == "submitted without a buffer; nice 1"


def test_a_history_never_says_that_nothing_was_moved_where_a_provider_moved_it() -> None:
    for event, what in ((e.StagedIn(1, 0, 0), "staged in"), (e.StagedOut(1, 0, 0), "staged out")):
        assert sentence_of(event) == f"{what}: nothing had to be moved"
        assert sentence_of(event, provider="lua") == f"{what} by burst_buffer/lua, which reports no amounts"
    assert sentence_of(e.StagedIn(1, 2, 2**20), provider="lua") == "staged in: 2 files, 1MiB"


def test_a_planned_retry_says_when() -> None:
    failed = e.StageFailed(1, Stage.STAGE_IN, 1, "disk full", NEVER, "data_in")
    assert sentence_of(failed).endswith("disk full; waiting for a release")


STAGE = "#DW stage_in type=file source={} destination=$DW_JOB_STRIPED/x\n"


def test_a_submit_replaces_the_variables_that_the_site_permits() -> None:
    site = replace(DEFAULT_SITE, path_variables=("HOME", "PROJECT=/proj/%u"))
    script = GOOD["script"] + STAGE.format("$HOME/$USER") + STAGE.format("$PROJECT/a") + STAGE.format("in/a")
    request = decode(
        json.dumps({**GOOD, "script": script, "variables": {"HOME": "/h", "PWD": "/p"}}).encode(), SubmitRequest
    )
    decoded = request_decoding.decode_submit(request, ALICE, site)
    command, _ = decoded.result()
    asked = command.request.buffer
    assert asked is not None and asked.variables == (("HOME", "/h"),)
    assert [one.outside for one in asked.stage_in] == ["/h/%u", "/proj/%u/a", "%d/in/a"]
    # What one site permits is no answer for another.
    assert decoded.fits(site) and not decoded.fits(replace(site, path_variables=("HOME",)))


def test_an_update_replaces_variables_too() -> None:
    bbf = "#DW jobdw capacity=1GiB\n" + STAGE.format("$HOME/a")
    update = decode(
        json.dumps({"command_id": GOOD["command_id"], "bbf": bbf, "variables": {"HOME": "/h"}}).encode(), UpdateRequest
    )
    asked = request_decoding.update_job(1, None, update).buffer
    assert asked is not None and asked.stage_in[0].outside == "/h/a"


def test_the_setup_of_an_external_job_has_no_environment() -> None:
    setup = SetUpExternalJobRequest(
        command_id=GOOD["command_id"], cluster="c", user="alice", uid=1000, gid=1000, script="", workdir="/w"
    )
    space = "#!/bin/sh\n#BB_LUA pool=fast capacity=1GiB\n"
    known = replace(setup, script=space + STAGE.format("in/$USER").replace("#DW", "#BB_LUA"))
    asked = request_decoding.external_job_setup("7", known, DEFAULT_SITE)[0].request.buffer
    assert asked is not None and asked.stage_in[0].outside == "%d/in/%u"
    for line in (
        STAGE.format("$HOME/a").replace("#DW", "#BB_LUA"),
        "#DW jobdw capacity=1GiB\n" + STAGE.format("$HOME/a"),
    ):
        script = space + line if "BB_LUA" in line else "#!/bin/sh\n" + line
        with pytest.raises(Problem, match="Slurm does not pass on"):
            request_decoding.external_job_setup("7", replace(setup, script=script), DEFAULT_SITE)

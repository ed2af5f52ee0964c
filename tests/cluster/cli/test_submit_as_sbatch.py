"""Submit features of sbatch: script arguments, --wrap, --parsable, and --wait."""

import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.cli.submission.sbatch_options import OPTIONS, VALUES_WITHOUT_EFFECT, Treatment, Value
from forebay.cluster.cli.submission.waiting import exit_code_of
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import ErrorAnswer, ErrorView, JobsAnswer, OtherError
from forebay.replica.model.job_states import ENDED, JobState
from tests.cluster.cli.double import Asked, Double, forebay
from tests.cluster.cli.views import job

LIST = r"/v1/jobs\?.*"


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "job.sh"
    path.write_text("#!/bin/sh\necho hello\n")
    return str(path)


def test_words_after_two_dashes_are_script_arguments(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--hold", script, "--", "-n", "a b", "--", "").exit_code == 0
    [asked] = double.asked
    assert (asked.body["arguments"], asked.body["hold"]) == (["-n", "a b", "--", ""], True)


def test_an_unknown_argument_error_names_the_place_of_script_arguments(
    double: Double, script: str, tmp_path: Path
) -> None:
    (tmp_path / "input.txt").write_text("1 2 3\n")
    result = forebay(double.config, "submit", script, str(tmp_path / "input.txt"))
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    assert "to pass arguments to a script, write them after --" in result.stderr


def test_wrap_submits_a_generated_script(double: Double) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--wrap", "sort a | uniq", "-c2").exit_code == 0
    body = double.asked[0].body
    assert body["script"].startswith("#!/bin/sh\n") and body["script"].endswith("\nsort a | uniq\n")
    assert (body["name"], body["cpus"]) == ("wrap", 2)


@pytest.mark.parametrize("words", [("--wrap", "x", "SCRIPT"), ("--wrap", "x", "--", "a"), ()])
def test_wrap_excludes_a_script_and_one_of_them_is_required(
    double: Double, script: str, words: tuple[str, ...]
) -> None:
    result = forebay(double.config, "submit", "--hold", *(script if word == "SCRIPT" else word for word in words))
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    assert "--wrap" in result.stderr


def test_parsable_prints_the_job_id_alone(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "--parsable", script).stdout == "42\n"


def test_output_files_and_open_modes_reach_the_controller(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    words = ("-o", "out-%j", "-e", "err-%j", "--open-mode=append", "--ntasks=1")
    assert forebay(double.config, "submit", *words, script).exit_code == 0
    body = double.asked[0].body
    assert (body["output"], body["error"], body["open_mode"]) == ("out-%j", "err-%j", "append")


def body_of(asked: Asked) -> SubmitRequest:
    """Return the request of a submit, defaults included."""
    return msgspec.convert(asked.body, SubmitRequest)


REJECTED = {name: option for option in OPTIONS if option.treatment is Treatment.REJECTED for name in option.names}
IGNORED = {name: option for option in OPTIONS if option.treatment is Treatment.IGNORED for name in option.names}


@pytest.mark.parametrize("name", sorted(REJECTED.keys() - {"--wrap", "--uid", "--help", "--usage", "--version", "-h"}))
def test_rejected_sbatch_options_are_rejected_on_the_command_line(double: Double, script: str, name: str) -> None:
    option = REJECTED[name]
    words = [name, "1"] if option.value is Value.REQUIRED else [name]
    result = forebay(double.config, "submit", *words, script)
    Path(script).write_text(f"#!/bin/sh\n#SBATCH {' '.join(words)}\n")
    of_script = forebay(double.config, "submit", script)
    for one in (result, of_script):
        assert (one.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
        assert f"{name} is not supported: {option.reason}" in one.stderr
        assert f"what to do: {option.remedy}" in one.stderr


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_ignored_options_are_sent_to_the_controller(double: Double, script: str, name: str) -> None:
    """On the command line as in a script."""
    option = IGNORED[name]
    words = [name, "1"] if option.value is Value.REQUIRED else [name]
    double.answer("POST", "/v1/jobs", job(job_id=42, warnings=(f"options without effect here: {option.long}",)), 201)
    result = forebay(double.config, "submit", *words, "--hold", script)
    Path(script).write_text(f"#!/bin/sh\n#SBATCH {' '.join(words)} -H\n")
    of_script = forebay(double.config, "submit", script)
    assert [asked.body["ignored_options"] for asked in double.asked] == [[option.long]] * 2
    assert [asked.body["hold"] for asked in double.asked] == [True] * 2
    for one in (result, of_script):
        assert one.stderr == f"forebay: warning: options without effect here: {option.long}\n"
        assert (one.exit_code, one.stdout) == (0, "Submitted batch job 42\n")


def test_a_strict_site_rejects_each_ignored_option_with_its_place(double: Double, script: str) -> None:
    sentence = "Forebay does not carry out --mem, --gres"
    double.refuse("POST", "/v1/jobs", 400, "invalid_field", sentence, place="ignored_options")
    Path(script).write_text("#!/bin/sh\n#SBATCH -t 1 --mem=4G\n#SBATCH --gres=gpu:1\n")
    result = forebay(double.config, "submit", script)
    assert result.exit_code == ExitCode.BAD_INPUT
    lines = [line for line in result.stderr.splitlines() if line.startswith("forebay: ")]
    assert [line.partition(" has no effect: ")[0] for line in lines] == [
        f"forebay: {script} line 2, column 14: --mem",
        f"forebay: {script} line 3, column 9: --gres",
    ]


def test_all_errors_of_a_request_are_reported_together(double: Double, script: str) -> None:
    Path(script).write_text("#!/bin/sh\n#SBATCH --tiem=1 -N 2\n#SBATCH -t soon -n 0\n#SBATCH --export=1X=2\ntrue\n")
    result = forebay(double.config, "submit", "--begin", "whenever", script)
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    places = [line.split(": ")[1] for line in result.stderr.splitlines() if line.startswith("forebay: ")]
    assert sorted(place.removeprefix(f"{script} ") for place in places) == [
        "--begin",
        "line 2, column 21",
        "line 2, column 9",
        "line 3, column 12",
        "line 3, column 20",
        "line 4, column 18",
    ]


WRONG_DIRECTIVES = "#DW jobdw capacity=many\n#DW stage_in type=files\n#DW wobble\n"


def test_directive_errors_are_reported_with_option_errors(double: Double, script: str, tmp_path: Path) -> None:
    Path(script).write_text(f"#!/bin/sh\n#SBATCH --tiem=1\n{WRONG_DIRECTIVES}true\n")
    (tmp_path / "more.bb").write_text("#DW what\n")
    result = forebay(double.config, "submit", "--bbf", str(tmp_path / "more.bb"), script)
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    lines = [line for line in result.stderr.splitlines() if line.startswith("forebay: ")]
    assert [line.split(",")[0] for line in lines] == [
        f"forebay: {script} line 2",
        f"forebay: {tmp_path / 'more.bb'} line 1",
        f"forebay: {script} line 3",
        f"forebay: {script} line 4",
        f"forebay: {script} line 5",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_all_controller_errors_are_reported_with_places(double: Double, script: str, as_json: bool) -> None:
    others = tuple(OtherError(sentence=f"s{at}", remedy=f"r{at}", place=f"script line {at}, column 1") for at in (3, 4))
    error = ErrorView(code="invalid_directive", sentence="s2", place="script line 2, column 1", others=others)
    double.answer("POST", "/v1/jobs", ErrorAnswer(error=error), 400)
    result = forebay(double.config, "submit", *(["--json"] if as_json else []), script)
    if as_json:
        found = msgspec.json.decode(result.stderr.splitlines()[-1], type=ErrorAnswer).error
        assert found.others == tuple(
            msgspec.structs.replace(one, place=one.place.replace("script", script)) for one in others
        )
    else:
        assert result.stderr.splitlines() == [
            f"forebay: {script} line 2, column 1: s2",
            f"forebay: {script} line 3, column 1: s3", "  what to do: r3",
            f"forebay: {script} line 4, column 1: s4", "  what to do: r4",
            "Burst Buffer request invalid",
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "tasks", "cpus"),
    [
        (("-n4",), 4, 4),
        (("-n 4 -c2",), 4, 8),
        (("--ntasks-per-node=3", "--cpus-per-task=5"), 3, 15),
        (("--tasks-per-node 3 -N1",), 3, 3),
        (("-n 2 --ntasks-per-node=4",), 2, 2),
        (("-c 3 --mincpus=8",), 1, 8),
        (("-n 4 -c 4 --mincpus=8",), 4, 16),
    ],
)
def test_tasks_request_their_cpus_on_one_node(
    double: Double, script: str, lines: tuple[str, ...], tasks: int, cpus: int
) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    Path(script).write_text("\n".join(["#!/bin/sh", *(f"#SBATCH {line}" for line in lines), "true", ""]))
    assert forebay(double.config, "submit", script).exit_code == 0
    Path(script).write_text("#!/bin/sh\ntrue\n")
    assert forebay(double.config, "submit", *" ".join(lines).split(), script).exit_code == 0
    for body in map(body_of, double.asked):
        assert (body.tasks, body.cpus, body.ignored_options) == (tasks, cpus, ())


def test_multi_node_tasks_run_on_one_node_with_a_warning(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    assert forebay(double.config, "submit", "-n8", "--ntasks-per-node=4", script).exit_code == 0
    body = double.asked[0].body
    assert (body["tasks"], body["cpus"], body["ignored_options"]) == (8, 8, ["--ntasks-per-node"])


def test_values_undefined_at_the_site_are_reported_at_their_script_line(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    Path(script).write_text("#!/bin/sh\n#SBATCH -A m12 -q debug --license=SCRATCH,db@host:2\n")
    assert forebay(double.config, "submit", "--qos=regular", script).exit_code == 0
    body = double.asked[0].body
    assert body["if_defined"] == ["account", "licenses"]
    assert (body["account"], body["qos"], body["licenses"]) == ("m12", "regular", ["SCRATCH"])
    assert body["ignored_options"] == ["--licenses=db@host:2"]


def test_unsupported_mail_types_are_ignored(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    Path(script).write_text("#!/bin/sh\n#SBATCH --mail-type=END,TIME_LIMIT_80,ARRAY_TASKS --mail-user=$USER@site\n")
    assert forebay(double.config, "submit", script).exit_code == 0
    assert forebay(double.config, "submit", "--mail-user", "ada", "--mail-type", "time_limit", script).exit_code == 0
    of_script, typed = map(body_of, double.asked)
    assert (of_script.mail_types, of_script.mail_user) == (("END",), None)
    assert of_script.ignored_options == ("--mail-type=TIME_LIMIT_80", "--mail-type=ARRAY_TASKS", "--mail-user")
    assert (typed.mail_types, typed.mail_user, typed.ignored_options) == (("time_limit",), "ada", ())


def test_a_strict_site_rejects_ignored_values_with_reasons(double: Double, script: str) -> None:
    double.refuse("POST", "/v1/jobs", 400, "invalid_field", "no", place="ignored_options")
    Path(script).write_text(
        "#!/bin/sh\n#SBATCH --export=ALL -n4 --ntasks-per-node=2 -L a@b --requeue=expedite\n"
        "#SBATCH --mail-type=TIME_LIMIT --mail-user=<you>\n"
    )
    result = forebay(double.config, "submit", script)
    for long, (reason, remedy) in VALUES_WITHOUT_EFFECT.items():
        assert re.search(rf"{script} line [23], column [0-9]+: {long}\S* has no effect: {reason}", result.stderr)
        assert f"what to do: {remedy}" in result.stderr


def test_a_script_exports_named_variables(double: Double, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    monkeypatch.setenv("FROM_HERE", "here")
    Path(script).write_text("#!/bin/sh\n#SBATCH --export=ALL,A=1,B=x=y,FROM_HERE,NOT_SET_HERE\n")
    result = forebay(double.config, "submit", "--export", "A=2,3", script)
    body = double.asked[0].body
    assert body["environment"] == {"A": "2,3", "B": "x=y", "FROM_HERE": "here"}
    assert body["ignored_options"] == ["--export=ALL"]
    assert "line 2, column 18: the variable NOT_SET_HERE is not set here" in result.stderr


def test_the_whole_environment_is_never_exported(double: Double, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    monkeypatch.setenv("ALL", "a variable of that name")
    assert forebay(double.config, "submit", "--export=ALL", "--export", "A=1", script).exit_code == 0
    body = body_of(double.asked[0])
    assert (body.environment, body.ignored_options) == ({"A": "1"}, ("--export=ALL",))


@pytest.mark.parametrize("value", ["NONE", "NIL"])
def test_export_none_in_a_script_is_not_an_ignored_option(double: Double, script: str, value: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    Path(script).write_text(f"#!/bin/sh\n#SBATCH --export={value}\n")
    assert forebay(double.config, "submit", script).exit_code == 0
    body = body_of(double.asked[0])
    assert (body.environment, body.ignored_options) == ({}, ())


@pytest.mark.parametrize(
    ("text", "seconds"), [("3-24:00:00", 345_600), ("0:90:00", 5_400), ("1:90", 150), ("00:60:00", 3_600)]
)
def test_script_durations_may_exceed_field_limits_as_in_sbatch(
    double: Double, script: str, text: str, seconds: int
) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    Path(script).write_text(f"#!/bin/sh\n#SBATCH --time={text} --export=/usr/local/bin\n")
    assert forebay(double.config, "submit", script).exit_code == 0
    assert (body_of(double.asked[0]).time_limit_s, body_of(double.asked[0]).environment) == (seconds, {})
    assert forebay(double.config, "submit", "--time", text, script).exit_code == ExitCode.BAD_INPUT


def test_several_named_nodes_are_rejected_on_the_command_line(double: Double, script: str) -> None:
    result = forebay(double.config, "submit", "--nodelist", "n[1-4]", script)
    assert (result.exit_code, double.asked) == (ExitCode.BAD_INPUT, [])
    assert "--nodelist names several nodes" in result.stderr


def test_a_script_can_set_parsable_and_wait(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    double.answer("GET", LIST, JobsAnswer(revision=7, jobs=(job(job_id=42, state="FAILED", exit_code=5),)))
    Path(script).write_text("#!/bin/sh\n#SBATCH --parsable -W\n")
    result = forebay(double.config, "submit", script)
    assert (result.exit_code, result.stdout) == (5, "42\n")


def test_submit_with_wait_exits_with_the_script_exit_code(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    double.answer("GET", LIST, JobsAnswer(revision=7, jobs=(job(job_id=42, state="FAILED", exit_code=5),)))
    result = forebay(double.config, "submit", "--wait", script)
    assert (result.exit_code, result.stdout) == (5, "Submitted batch job 42\n")
    assert "job=42" in double.asked[-1].target


def test_submit_with_wait_waits_for_all_tasks_and_returns_the_largest_code(
    double: Double, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    tasks = [job(job_id=42, state="COMPLETED"), job(job_id=43, state="RUNNING"), job(job_id=44, state="STAGE_OUT")]
    double.answer("GET", LIST, JobsAnswer(revision=7, jobs=tuple(tasks)))
    looked: list[float] = []

    async def pause(length_s: float) -> None:
        looked.append(length_s)
        if len(looked) == 3:
            done = tasks[0], job(job_id=43, state="FAILED", exit_code=2), job(job_id=44, state="CANCELLED")
            double.answer("GET", LIST, JobsAnswer(revision=8, jobs=done))

    monkeypatch.setattr("forebay.cluster.cli.submission.waiting.asyncio.sleep", pause)
    assert forebay(double.config, "submit", "-W", "--array=0-2", script).exit_code == 2
    assert len(looked) == 3 and looked == sorted(looked)


def test_submit_with_wait_fails_if_the_job_is_deleted(double: Double, script: str) -> None:
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    double.refuse("GET", LIST, 404, "unknown_job", "job 42 is over and has left the list of finished jobs")
    result = forebay(double.config, "submit", "--wait", script)
    assert result.exit_code == ExitCode.NOT_FOUND and "has left the list" in result.stderr


@given(st.sampled_from(sorted(ENDED)), st.integers(0, 255), st.integers(0, 64))
def test_only_a_successful_script_gives_exit_code_zero(state: JobState, exit_code: int, signal: int) -> None:
    came_to = exit_code_of(job(state=state.name, exit_code=exit_code, signal=signal))
    assert (came_to == 0) == (state is JobState.COMPLETED and exit_code == 0 and signal == 0)
    assert came_to == exit_code or exit_code == 0 or signal


def test_wait_and_json_exclude_each_other(double: Double, script: str) -> None:
    assert forebay(double.config, "submit", "--wait", "--json", script).exit_code == ExitCode.BAD_INPUT
    assert double.asked == []


def test_generated_sbatch_lines_are_parsed_back(double: Double, script: str) -> None:
    """Any text that a shell can pass."""
    double.answer("POST", "/v1/jobs", job(job_id=42), 201)
    words = [chr(code) for code in (1, 9, 10, 34, 39, 92, 127, 0xE9, 0x1F600)]
    forebay(double.config, "submit", script, "--", *words)
    assert msgspec.json.decode(msgspec.json.encode(double.asked[0].body["arguments"])) == words

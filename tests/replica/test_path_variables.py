"""Variables in the paths of directives, and paths relative to the working directory."""

from __future__ import annotations

import pytest

from forebay.replica.grammar import (
    UNKNOWN_VARIABLES,
    DirectiveRejected,
    PathVariables,
    path_variable_table,
    read_external_job_request,
    read_request,
    variable_names,
)
from forebay.replica.grammar.settings import ValueFormatError, find_key, format_value, parse_value
from forebay.replica.model import BufferRequest, ListTransfer, Site, check_site
from tests.replica.world import World

ALLOWED = ("HOME", "SCRATCH", "PROJECT=/proj/%u/50%")
GIVEN = (("HOME", "/home/alice"), ("SCRATCH", "/scratch/100%/dana"), ("PWD", "/secret"))
VARIABLES = PathVariables(ALLOWED, GIVEN)


def request_of(line: str, variables: PathVariables = VARIABLES) -> BufferRequest:
    found = read_request(f"#!/bin/sh\n#DW jobdw capacity=1GiB\n#DW {line}\n", variables=variables).request
    assert found is not None
    return found


def outside_of(path: str, variables: PathVariables = VARIABLES) -> str:
    line = f"stage_in type=file source={path} destination=$DW_JOB_STRIPED/x"
    return request_of(line, variables).stage_in[0].outside


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ("$HOME/a", "/home/alice/a"),
        ("${HOME}/a", "/home/alice/a"),
        ("${HOME}", "/home/alice"),
        ("/data/$USER/${USER}_1", "/data/%u/%u_1"),
        ("$SCRATCH/%j", "/scratch/100%%/dana/%j"),
        ("$PROJECT/a", "/proj/%u/50%%/a"),
        ("/cost/$5/a$", "/cost/$5/a$"),
        ("/data/\\\\$HOME", "/data/\\\\$HOME"),
        ("data/a", "%d/data/a"),
        ("./data/a", "%d/data/a"),
        ("./$USER/a", "%d/%u/a"),
        ("%d/a", "%d/a"),
        ("%d", "%d"),
        (".", "%d/"),
        ("%x.in", "%d/%x.in"),
        ("\\\\a%j", "%d/\\\\a%j"),
    ],
)
def test_a_path_may_begin_with_a_variable_or_in_the_working_directory(written: str, path: str) -> None:
    assert outside_of(written) == path


def test_variables_are_replaced_below_the_variable_of_a_buffer_and_in_lists_and_destinations() -> None:
    into = request_of("stage_in type=file source=/a destination=$DW_JOB_STRIPED/$USER/${HOME}/x")
    assert into.stage_in[0].inside == "$DW_JOB_STRIPED/%u//home/alice/x"
    out = request_of("stage_out type=directory source=${DW_JOB_STRIPED}/o destination=$HOME/out")
    assert (out.stage_out[0].outside, out.stage_out[0].inside) == ("/home/alice/out", "${DW_JOB_STRIPED}/o")
    listed = request_of("stage_out type=list source=$HOME/files destination=results/%j")
    assert listed.lists == (ListTransfer(True, "/home/alice/files", "%d/results/%j", "script line 3, column 25"),)


def test_the_request_keeps_the_values_that_its_paths_contain_and_no_others() -> None:
    assert request_of("stage_in type=file source=$HOME/$USER destination=$DW_JOB_STRIPED/x").variables == (
        ("HOME", "/home/alice"),
    )
    assert request_of("stage_in type=file source=/a destination=$DW_JOB_STRIPED/x").variables == ()


@pytest.mark.parametrize(
    ("path", "column", "sentence", "remedy"),
    [
        ("$PWD/a", 31, "variable $PWD is not permitted", "use one of $HOME, $PROJECT, $SCRATCH, $USER"),
        ("/a/${HOEM}", 34, "variable $HOEM is not permitted", "$HOME"),
        ("/a/${HOME/b", 34, "'${HOME/b' is not a variable", "${HOME}"),
        ("/a/${}", 34, "is not a variable", "${HOME}"),
        ("$DW_JOB_STRIPED/a", 31, "is a path in a buffer", "outside the buffers"),
        ("$USER/a", 31, "is not an absolute path", "./$USER"),
        ("~/a", 31, "starts with ~", "$HOME"),
        ("%da", 31, "without a slash", "%d/"),
        ("../a", 31, "goes up with ..", "without .."),
        ("a/../../b", 31, "goes up with ..", "without .."),
    ],
)
def test_an_invalid_path_is_rejected_with_line_and_column(path: str, column: int, sentence: str, remedy: str) -> None:
    with pytest.raises(DirectiveRejected) as error:
        outside_of(path)
    rejection = error.value.rejection
    assert rejection.place == f"script line 3, column {column}"
    assert sentence in rejection.sentence and remedy in rejection.remedy


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("scratch", "not an absolute path"),
        ("", "not an absolute path"),
        ("/a/../b", "goes up with .."),
        ("/a\\\\b", "cannot be a part of a path"),
        ("/a\nb", "cannot be a part of a path"),
        ("/" + "a" * 5000, "cannot be a part of a path"),
    ],
)
def test_a_value_that_is_no_path_is_rejected(value: str, sentence: str) -> None:
    with pytest.raises(DirectiveRejected, match=sentence):
        outside_of("$HOME/a", PathVariables(ALLOWED, (("HOME", value),)))


def test_a_variable_that_is_not_set_is_rejected_and_slurm_jobs_have_none_from_the_environment() -> None:
    with pytest.raises(DirectiveRejected, match="not set where the job was submitted"):
        outside_of("$HOME/a", PathVariables(ALLOWED))
    stage = "#BB_LUA stage_in type=file source={} destination=$DW_JOB_STRIPED/x"
    script = f"#!/bin/sh\n#BB_LUA pool=fast capacity=1GiB\n{stage}\n"
    by_slurm = PathVariables(ALLOWED, by_scheduler=True)
    with pytest.raises(DirectiveRejected, match="Slurm does not pass on.*PathVariables=HOME"):
        read_external_job_request(script.format("$HOME/a"), variables=by_slurm)
    for written, path in (("$PROJECT/$USER", "/proj/%u/50%%/%u"), ("in/a", "%d/in/a")):
        found = read_external_job_request(script.format(written), variables=by_slurm).request
        assert found is not None and found.stage_in[0].outside == path


def test_a_reader_that_does_not_know_the_site_accepts_every_variable() -> None:
    assert outside_of("$ANY/a", UNKNOWN_VARIABLES) == "//a"


def test_only_variables_outside_the_buffers_are_sent_by_a_client() -> None:
    assert variable_names("$HOME/${SCRATCH}x $DW_JOB_STRIPED $FOREBAY_JOB_DIR $5 ${HOME}") == ["HOME", "SCRATCH"]


def test_decided_paths_contain_user_and_working_directory() -> None:
    world = World(sources=("/home", "/work"), destinations=("/work",))
    script = (
        "#!/bin/sh\n#DW jobdw capacity=1\n"
        "#DW stage_in type=file source=/home/$USER/a destination=$DW_JOB_STRIPED/a\n"
        "#DW stage_in type=file source=in/%j destination=$DW_JOB_STRIPED/b\n"
        "#DW stage_out type=file source=$DW_JOB_STRIPED/b destination=out/$USER\n"
    )
    job = world.submit(script=script, who="alice", workdir="/work/alice")
    asked = world.state.jobs[job].request.buffer
    assert asked is not None
    assert [one.outside for one in asked.stage_in] == ["/home/alice/a", f"/work/alice/in/{job}"]
    assert asked.stage_out[0].outside == "/work/alice/out/alice"


def test_the_setting_lists_names_and_templates() -> None:
    key = find_key("pathvariables")
    assert key is not None
    parsed = parse_value(key, "HOME,PROJECT=/proj/%u")
    assert parsed == ("HOME", "PROJECT=/proj/%u") and format_value(key, parsed) == "HOME,PROJECT=/proj/%u"
    assert check_site(Site(path_variables=parsed)) is None
    # For a site that permits no other variable.
    only = PathVariables(parse_value(key, "USER"), GIVEN)
    assert only.names == ["USER"] and outside_of("/a/$USER", only) == "/a/%u"
    assert path_variable_table(("USER", "A", "B=/b/%u/%j")) == {"USER": "%u", "A": False, "B": "/b/%u/%%j"}
    with pytest.raises(DirectiveRejected, match="use one of [$]USER;"):
        outside_of("$HOME/a", only)


@pytest.mark.parametrize(
    "text", ["1A", "A=b", "A=/b/../c", "USER=/a", "DW_X", "FOREBAY_X=/a", "A,A=/b", "A=/" + "b" * 5000]
)
def test_an_invalid_entry_of_the_setting_is_rejected(text: str) -> None:
    key = find_key("PathVariables")
    assert key is not None
    with pytest.raises(ValueFormatError):
        parse_value(key, text)


def test_more_variables_than_a_site_may_list_are_rejected() -> None:
    assert check_site(Site(path_variables=tuple(f"V{number}" for number in range(33)))) is not None

"""`#SBATCH` lines: every option in every form, and every mistake with its line and column."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli.exits import ExitCode, Failure
from forebay.cluster.cli.submission.sbatch import ScriptOptions, check_script, read_options
from forebay.cluster.cli.submission.sbatch_options import LONG, OPTIONS, Option, Treatment, Value, options_for
from forebay.replica.values.limits import SUBMITTED_SCRIPT_BYTES_MAX


def options(*lines: str) -> ScriptOptions:
    """Return the options and errors of a script with these lines after the first."""
    return read_options("\n".join(["#!/bin/sh", *lines, "true", ""]), "job.sh")


def read(*lines: str) -> dict[str, str]:
    """Return the options of a script with these lines after the first; the script has no errors."""
    found = options(*lines)
    assert not found.faults, found.faults[0].lines()
    return {field: setting.value for field, setting in found.settings.items()}


def refused(*lines: str) -> Failure:
    [failure] = options(*lines).faults
    return failure


def forms(option: Option, value: str) -> list[str]:
    """Return every way to write an option with a value."""
    written = [
        f"{option.long}={value}",
        f"{option.long} {value}",
        f'{option.long}="{value}"',
        f"{option.long} '{value}'",
    ]
    if option.short:
        written += [f"{option.short} {value}", f"{option.short}{value}", f'{option.short} "{value}"']
    return written


CARRIED_OUT = [option for option in OPTIONS if option.treatment is Treatment.CARRIED_OUT]
WITH_VALUE = [option for option in CARRIED_OUT if option.value is Value.REQUIRED]


@pytest.mark.parametrize(("option", "line"), [(option, line) for option in WITH_VALUE for line in forms(option, "a-1")])
def test_every_option_is_parsed_in_every_form(option: Option, line: str) -> None:
    assert read(f"#SBATCH {line}") == {option.field: "a-1"}


def all_forms(option: Option) -> list[str]:
    """Return every way to write an option, whether it has a value or not."""
    if option.value is Value.REQUIRED:
        return forms(option, "a-1")
    return [*option.names, *([f"{option.long}=a-1"] if option.value is Value.OPTIONAL else [])]


@pytest.mark.parametrize(
    ("option", "form"), [(option, form) for option in OPTIONS if option.reason for form in all_forms(option)]
)
def test_options_without_effect_are_ignored_or_rejected_in_every_form(option: Option, form: str) -> None:
    """The next word is not the option's value, and the rest of its word is not an option."""
    found = options(f"#SBATCH {form} --time=5 # why", "#SBATCH -c2")
    assert {field: setting.value for field, setting in found.settings.items()} == {"time_limit_s": "5", "cpus": "2"}
    if option.treatment is Treatment.IGNORED:
        assert [one.written for one in found.ignored] == [option.long] and not found.faults
        assert found.ignored[0].place == "job.sh line 2, column 9"
        failure = found.ignored[0].rejection()
    else:
        [failure] = found.faults
        assert not found.ignored
    assert failure.place == "job.sh line 2, column 9"
    assert option.reason in failure.sentence and option.remedy == failure.remedy


def test_every_option_has_one_treatment_and_a_reason() -> None:
    assert len(LONG) == len(OPTIONS)
    shorts = [option.short for option in OPTIONS if option.short]
    assert len(set(shorts)) == len(shorts)
    for option in OPTIONS:
        is_carried_out = option.treatment is Treatment.CARRIED_OUT
        assert bool(option.field) == is_carried_out != bool(option.reason) and bool(option.remedy) == bool(
            option.reason
        )


def test_options_that_direct_output_are_never_ignored() -> None:
    says = """output error input chdir bb bbf array dependency nodes wrap export-file volume container uid gid
        open-mode nodefile begin deadline hold test-only"""
    assert all(LONG[f"--{name}"].treatment is not Treatment.IGNORED for name in says.split())


@pytest.mark.parametrize("long", sorted(LONG))
def test_an_option_prefix_is_resolved_as_in_getopt(long: str) -> None:
    for length in range(3, len(long) + 1):
        meant = [name for name in LONG if name.startswith(long[:length])]
        found = [option.long for option in options_for(long[:length])]
        assert found == ([long] if long == long[:length] else [long[:length]] if long[:length] in LONG else meant)


@pytest.mark.parametrize("line", ["--license=SCRATCH", "--lic SCRATCH", "--licenses SCRATCH"])
def test_an_abbreviated_option_is_accepted(line: str) -> None:
    assert read(f"#SBATCH {line}") == {"licenses": "SCRATCH"}


def test_all_script_errors_are_reported_with_places() -> None:
    found = options(
        "#SBATCH --tiem=10 --gpu-typo v100 -J x", "#SBATCH -F n1 -N", '#SBATCH --bb="x', "#SBATCH --gpu=1 word -t=5"
    )
    assert [failure.place.removeprefix("job.sh ") for failure in found.faults] == [
        "line 2, column 9",
        "line 2, column 19",
        "line 3, column 9",
        "line 3, column 15",
        "line 4, column 9",
        "line 5, column 9",
        "line 5, column 24",
    ]
    assert {field: setting.value for field, setting in found.settings.items()} == {"name": "x"}


def test_options_follow_the_sbatch_mark_as_in_sbatch() -> None:
    assert read("#SBATCH--time=1", "#SBATCH-c 2") == {"time_limit_s": "1", "cpus": "2"}


@pytest.mark.parametrize("line", ["#PBS -o out", "#BSUB -J x", "#COBALT -n 2", "#$ -cwd"])
def test_lines_of_other_batch_systems_cause_warnings(line: str) -> None:
    found = options(line, "#SBATCH -t 1")
    assert found.warnings == (f"job.sh line 2: {line.split()[0]} lines are ignored; write #SBATCH",)


@pytest.mark.parametrize("word", ["hetjob", "packjob"])
def test_a_heterogeneous_job_is_rejected(word: str) -> None:
    assert "one node" in refused("#SBATCH -c 1", f"#SBATCH {word}").sentence


def test_an_expedited_requeue_is_an_ordinary_requeue() -> None:
    found = options("#SBATCH --requeue=expedite")
    assert ([one.written for one in found.ignored], found.faults) == (["--requeue=expedite"], ())


@pytest.mark.parametrize("line", ["--hold", "-H", "  -H  ", "\t--hold # until tomorrow"])
def test_a_flag_is_parsed_in_every_form(line: str) -> None:
    assert read(f"#SBATCH {line}") == {"hold": "yes"}


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--nice", {"nice": "100"}),
        ("--nice=-5", {"nice": "-5"}),
        ("--nice -t 10", {"nice": "100", "time_limit_s": "10"}),
        ("--requeue", {"requeue": "yes"}),
        ("--no-requeue", {"requeue": "no"}),
        ("--requeue --no-requeue", {"requeue": "no"}),
    ],
)
def test_an_optional_value_is_never_the_next_word(line: str, fields: dict[str, str]) -> None:
    assert read(f"#SBATCH {line}") == fields


def test_any_two_options_can_share_a_line() -> None:
    for first, second in itertools.permutations(WITH_VALUE, 2):
        expected = {second.field: "b"} if first.field == second.field else {first.field: "a", second.field: "b"}
        assert read(f"#SBATCH {first.long}=a {second.long} b") == expected


def test_short_flags_and_options_combine_as_in_getopt() -> None:
    assert read("#SBATCH -Ht10") == {"hold": "yes", "time_limit_s": "10"}
    assert read("#SBATCH -HJ night") == {"hold": "yes", "name": "night"}


def test_mail_types_are_combined_as_in_sbatch() -> None:
    lines = ("#SBATCH --mail-type=BEGIN", "#SBATCH --mail-type=END,FAIL --mail-type REQUEUE")
    assert read(*lines) == {"mail_types": "BEGIN,END,FAIL,REQUEUE"}


def test_options_of_earlier_releases_and_srun_are_known() -> None:
    found = options("#SBATCH --workdir=/w --share --cpu_bind=cores --cpu-bind=none")
    assert found.settings["workdir"].value == "/w" and not found.faults
    assert [one.written for one in found.ignored] == ["--share", "--cpu_bind", "--cpu-bind"]


def test_the_last_of_repeated_options_wins() -> None:
    assert read("#SBATCH -t 1", "#SBATCH --time=2 -t3") == {"time_limit_s": "3"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('--bb="capacity=1GiB access=striped"', "capacity=1GiB access=striped"),
        ("--bb='capacity=1GiB pool=\"x\"'", 'capacity=1GiB pool="x"'),
        (r"--bb=capacity=1GiB\ pool=x", "capacity=1GiB pool=x"),
        (r'--bb="a \"quoted\" word \\ \n"', 'a "quoted" word \\ \\n'),
        ('--bb="#DW jobdw capacity=1GiB"', "#DW jobdw capacity=1GiB"),
        ("--bb=a#b # a comment", "a"),
        ("--bb='a#b'#c", "a#b"),
        (r"--bb=a\#b", "a#b"),
        ("--bb=a \\", "a"),
        ("--bb=a\\", "a"),
        ('--bb=a"b c"d', "ab cd"),
    ],
)
def test_quotes_backslashes_and_comments_are_parsed_as_in_sbatch(line: str, value: str) -> None:
    assert read(f"#SBATCH {line}") == {"bb": value}


def test_option_lines_after_the_first_command_are_ignored_with_a_warning() -> None:
    script = "#!/bin/sh\n\n# text\n#SBATCH -t 1\n   \n  # indented\n#SBATCH -J a\necho\n#SBATCH -J b\n"
    found = read_options(script, "job.sh")
    assert {field: setting.value for field, setting in found.settings.items()} == {"time_limit_s": "1", "name": "a"}
    assert found.warnings == ("job.sh line 9: #SBATCH after the first command is ignored; move it to the top",)


@pytest.mark.parametrize(
    "line", ["##SBATCH --nope", "#SBATCHED --nope", "# SBATCH --nope", " #SBATCH --nope", "#SBATCH", "#SBATCH   "]
)
def test_comment_lines_set_no_options(line: str) -> None:
    assert read(line) == {}


@pytest.mark.parametrize(
    ("line", "place", "word", "remedy"),
    [
        ("#SBATCH --tiem=1", "line 2, column 9", "--tiem", "--time"),
        ("#SBATCH -t 1 --wrap=x", "line 2, column 14", "--wrap is not supported: a script", "forebay submit"),
        ("#SBATCH -Hw", "line 2, column 11", "needs a value", "--nodelist=VALUE"),
        ("#SBATCH --gpu=1", "line 2, column 9", "'--gpu' is ambiguous: --gpus, ", "whole name"),
        ("#SBATCH -HZ", "line 2, column 11", "-Z", "lists the supported"),
        ("#SBATCH -w n[1-2]", "line 2, column 12", "-w names several nodes", "--partition"),
        ("#SBATCH --nodelist=n1,n2", "line 2, column 20", "--nodelist names several nodes", "--partition"),
        ("#SBATCH -F hosts", "line 2, column 9", "-F is not supported", "--partition"),
        ("#SBATCH --requeue=yes", "line 2, column 18", "--requeue takes no value", "write --requeue alone"),
        ("#SBATCH --time", "line 2, column 9", "--time", "--time=VALUE"),
        ("#SBATCH --time=", "line 2, column 16", "empty", "--time=VALUE"),
        ("#SBATCH -t", "line 2, column 9", "-t", "--time=VALUE"),
        ("#SBATCH -t=5", "line 2, column 11", "equals", "--time=5"),
        ("#SBATCH --hold=yes", "line 2, column 15", "--hold", "alone"),
        ("#SBATCH night", "line 2, column 9", "'night'", "quote"),
        ("#SBATCH -- x", "line 2, column 9", "'--'", "quote"),
        ("#SBATCH -", "line 2, column 9", "'-'", "quote"),
        ('#SBATCH --bb="x', "line 2, column 9", '"', "add"),
    ],
)
def test_each_option_error_names_place_and_remedy(line: str, place: str, word: str, remedy: str) -> None:
    failure = refused(line)
    assert failure.code is ExitCode.BAD_INPUT
    assert failure.place == f"job.sh {place}"
    assert word in failure.sentence
    assert remedy in failure.remedy


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60))
def test_any_line_is_parsed_or_rejected_with_its_place(text: str) -> None:
    found = options(f"#SBATCH {text}")
    for failure in (*found.faults, *(one.rejection() for one in found.ignored)):
        assert failure.place.startswith("job.sh line 2, column ")
        assert failure.sentence
        assert failure.remedy
    assert set(found.settings) <= {option.field for option in CARRIED_OUT}


@given(st.lists(st.sampled_from([form for option in OPTIONS for form in all_forms(option)]), max_size=6))
def test_options_on_one_line_equal_options_on_separate_lines(written: list[str]) -> None:
    def said(found: ScriptOptions) -> object:
        values = {field: setting.value for field, setting in found.settings.items()}
        return values, [one.written for one in found.ignored], [failure.sentence for failure in found.faults]

    assert said(options("#SBATCH " + " ".join(written))) == said(options(*(f"#SBATCH {one}" for one in written)))


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=40))
def test_any_value_survives_quoting(value: str) -> None:
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    assert read(f'#SBATCH --job-name="{quoted}"') == {"name": value}


@pytest.mark.parametrize(
    ("data", "place", "remedy"),
    [
        (b"echo\n", "job.sh line 1, column 1", "#!/bin/sh"),
        (b"", "job.sh line 1, column 1", "#!/bin/sh"),
        (b"#!/bin/sh\r\necho\r\n", "job.sh line 1", "sed"),
        (b"#!/bin/sh\necho \xff\n", "job.sh line 2", "convert"),
        (b"#!/bin/sh\n\n\0\n", "job.sh line 3", "text"),
        (b"#!/bin/sh\n" + b"#" * SUBMITTED_SCRIPT_BYTES_MAX, "job.sh", "files"),
    ],
)
def test_a_file_that_is_no_batch_script_is_rejected(data: bytes, place: str, remedy: str) -> None:
    with pytest.raises(Failure) as caught:
        check_script(data, "job.sh")
    assert caught.value.place == place
    assert remedy in caught.value.remedy


def test_the_largest_script_is_accepted() -> None:
    data = b"#!/bin/sh\n".ljust(SUBMITTED_SCRIPT_BYTES_MAX, b"#")
    assert len(check_script(data, "job.sh")) == SUBMITTED_SCRIPT_BYTES_MAX

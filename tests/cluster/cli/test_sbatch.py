"""`#SBATCH` lines: every option in every form, and every mistake with its line and column."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cli.exits import ExitCode, Failure
from cluster.cli.submission.sbatch import OPTIONS, Option, check_script, read_options
from replica.values.limits import SCRIPT_BYTES_MAX


def read(*lines: str) -> dict[str, str]:
    """Return what lines after the first one of a script ask for."""
    script = "\n".join(["#!/bin/sh", *lines, "true", ""])
    return {field: setting.value for field, setting in read_options(script, "job.sh").settings.items()}


def refused(*lines: str) -> Failure:
    with pytest.raises(Failure) as caught:
        read(*lines)
    return caught.value


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


WITH_VALUE = [option for option in OPTIONS if option.takes_value and not option.alone]


@pytest.mark.parametrize(
    ("option", "line"), [(option, line) for option in WITH_VALUE for line in forms(option, option.only or "a-1")]
)
def test_every_option_is_read_in_every_form(option: Option, line: str) -> None:
    assert read(f"#SBATCH {line}") == {option.field: option.only or "a-1"}


@pytest.mark.parametrize("line", ["--hold", "-H", "  -H  ", "\t--hold # until tomorrow"])
def test_a_flag_is_read_in_every_form(line: str) -> None:
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
def test_what_may_stand_alone_never_takes_the_next_word(line: str, fields: dict[str, str]) -> None:
    assert read(f"#SBATCH {line}") == fields


def test_every_pair_of_options_may_share_a_line() -> None:
    for first, second in itertools.permutations(WITH_VALUE, 2):
        line = f"#SBATCH {first.long}={first.only or 'a'} {second.long} {second.only or 'b'}"
        assert read(line) == {first.field: first.only or "a", second.field: second.only or "b"}


def test_short_flags_and_options_combine_as_in_getopt() -> None:
    assert read("#SBATCH -Ht10") == {"hold": "yes", "time_limit_s": "10"}
    assert read("#SBATCH -HJ night") == {"hold": "yes", "name": "night"}


def test_the_last_of_two_wins() -> None:
    assert read("#SBATCH -t 1", "#SBATCH --time=2 -t3") == {"time_limit_s": "3"}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('--bb="capacity=1GiB access=striped"', "capacity=1GiB access=striped"),
        ("--bb='capacity=1GiB pool=\"x\"'", 'capacity=1GiB pool="x"'),
        (r"--bb=capacity=1GiB\ pool=x", "capacity=1GiB pool=x"),
        (r'--bb="a \"quoted\" word \\ \n"', 'a "quoted" word \\ \\n'),
        ('--bb="#DW jobdw capacity=1GiB"', "#DW jobdw capacity=1GiB"),
        ("--bb=a#b # a comment", "a#b"),
        ('--bb=a"b c"d', "ab cd"),
    ],
)
def test_quotes_backslashes_and_comments_are_read_as_in_sbatch(line: str, value: str) -> None:
    assert read(f"#SBATCH {line}") == {"bb": value}


def test_only_lines_before_the_first_command_are_read_and_later_ones_are_warned_of() -> None:
    script = "#!/bin/sh\n\n# text\n#SBATCH -t 1\n   \n  # indented\n#SBATCH -J a\necho\n#SBATCH -J b\n"
    options = read_options(script, "job.sh")
    assert {field: setting.value for field, setting in options.settings.items()} == {"time_limit_s": "1", "name": "a"}
    assert options.warnings == ("job.sh line 9: #SBATCH after the first command is not read; move it to the top",)


@pytest.mark.parametrize(
    "line", ["##SBATCH --nope", "#SBATCHED --nope", "# SBATCH --nope", " #SBATCH --nope", "#SBATCH", "#SBATCH   "]
)
def test_what_is_a_comment_asks_for_nothing(line: str) -> None:
    assert read(line) == {}


@pytest.mark.parametrize(
    ("line", "place", "word", "remedy"),
    [
        ("#SBATCH --tiem=1", "line 2, column 9", "--tiem", "--time"),
        ("#SBATCH -t 1 --gres=gpu:1", "line 2, column 14", "--gres cannot be had: Forebay gives out", "license"),
        ("#SBATCH -Hx", "line 2, column 11", "-x cannot be had", "--partition"),
        ("#SBATCH -HZ", "line 2, column 11", "-Z", "Forebay knows"),
        ("#SBATCH -w n1", "line 2, column 9", "-w cannot be had", "--partition"),
        ("#SBATCH --mem=4G", "line 2, column 9", "no account of memory", "leave it out"),
        ("#SBATCH --export=ALL", "line 2, column 9", "brings nothing", "--export NAME=VALUE"),
        ("#SBATCH --requeue=yes", "line 2, column 18", "--requeue takes no value", "write --requeue alone"),
        ("#SBATCH -n 4", "line 2, column 12", "'4'", "--cpus-per-task"),
        ("#SBATCH --ntasks=4", "line 2, column 18", "'4'", "--cpus-per-task"),
        ("#SBATCH --time", "line 2, column 9", "--time", "--time VALUE"),
        ("#SBATCH --time=", "line 2, column 16", "empty", "--time=VALUE"),
        ("#SBATCH -t", "line 2, column 9", "-t", "VALUE"),
        ("#SBATCH -t=5", "line 2, column 11", "equals", "--time=5"),
        ("#SBATCH --hold=yes", "line 2, column 15", "--hold", "alone"),
        ("#SBATCH night", "line 2, column 9", "'night'", "quote"),
        ("#SBATCH -- x", "line 2, column 9", "'--'", "quote"),
        ("#SBATCH -", "line 2, column 9", "'-'", "quote"),
        ('#SBATCH --bb="x', "line 2, column 9", '"', "add"),
        ("#SBATCH--time=1", "line 2, column 8", "space", "#SBATCH --time=1"),
    ],
)
def test_each_mistake_names_its_place_and_what_would_be_right(line: str, place: str, word: str, remedy: str) -> None:
    failure = refused(line)
    assert failure.code is ExitCode.BAD_INPUT
    assert failure.place == f"job.sh {place}"
    assert word in failure.sentence
    assert remedy in failure.remedy


@given(st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=60))
def test_any_line_is_read_or_refused_with_its_place(text: str) -> None:
    try:
        found = read(f"#SBATCH {text}")
    except Failure as failure:
        assert failure.place.startswith("job.sh line 2, column ")
        assert failure.sentence
        assert failure.remedy
    else:
        assert set(found) <= {option.field for option in OPTIONS}


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
        (b"#!/bin/sh\n" + b"#" * SCRIPT_BYTES_MAX, "job.sh", "files"),
    ],
)
def test_what_is_not_a_batch_script_is_refused(data: bytes, place: str, remedy: str) -> None:
    with pytest.raises(Failure) as caught:
        check_script(data, "job.sh")
    assert caught.value.place == place
    assert remedy in caught.value.remedy


def test_the_largest_script_is_accepted() -> None:
    data = b"#!/bin/sh\n".ljust(SCRIPT_BYTES_MAX, b"#")
    assert len(check_script(data, "job.sh")) == SCRIPT_BYTES_MAX

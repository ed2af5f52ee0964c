"""What options of sbatch come to in the state: tasks, whole nodes, names, files, signals, and what is left out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import Account, AccountUser, License, Qos
from forebay.replica.model.partitions import Partition
from forebay.replica.model.requests import (
    SIGNAL_BEFORE_S_MAX,
    SIGNAL_NAMES,
    JobOptions,
    JobRequest,
    error_path,
    input_path,
    output_path,
    parse_signal,
    with_options,
)
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.limits import JOB_NAME_CHARACTERS_MAX
from forebay.replica.values.names import FILE_SYMBOLS, SYMBOLS, UnknownSymbol, expand_symbols
from tests.replica.world import OPERATOR, World, user


def submit(made: World, *, run: JobOptions | None = None, **more: Any) -> Rejection | int:
    command = {name: more.pop(name) for name in ("tasks", "ignored", "if_defined") if name in more}
    options = replace(
        run or JobOptions(), **{name: more.pop(name) for name in JobOptions.__struct_fields__ if name in more}
    )
    fields = {"name": "job", "user": "alan", "script": "#!/bin/sh\n", "workdir": "/w", "time_limit_s": 60, **more}
    request = with_options(JobRequest(**fields), options)
    return made.settle(c.SubmitJob(request, **command), user())


def taken(made: World, **more: Any) -> int:
    job = submit(made, **more)
    assert isinstance(job, int), job
    return job


def requested(made: World, **more: Any) -> JobRequest:
    """Return what is asked of a job that was just submitted, as it was decided."""
    job = taken(made, **more)
    return made.state.jobs[job].request


def refused(made: World, **more: Any) -> Rejection:
    found = submit(made, **more)
    assert isinstance(found, Rejection) and found.remedy
    return found


@pytest.mark.parametrize("name", ["nf-foo_(1)", "a b", "[x] {y}: ü", "-J", "snakejob.rule.42", "x" * 255, "$(id)"])
def test_a_job_may_have_any_name_that_can_be_printed(name: str) -> None:
    made = World()
    assert requested(made, name=name).name == name


@pytest.mark.parametrize("name", ["", "  ", "a\nb", "a\tb", "\x1b[31m", "x" * (JOB_NAME_CHARACTERS_MAX + 1)])
def test_a_name_that_cannot_be_shown_on_one_line_is_rejected(name: str) -> None:
    found = refused(World(), name=name)
    assert (found.code, found.place) == (RejectionCode.INVALID_FIELD, "name")


def test_tasks_share_the_cpus_of_their_job_and_have_one_each_at_least() -> None:
    made = World(cpus=8)
    assert requested(made, run=JobOptions(tasks=4), cpus=8).effective_options.tasks == 4
    for tasks, cpus in ((9, 8), (0, 8), (2, 1)):
        assert refused(made, run=JobOptions(tasks=tasks), cpus=cpus).place == "tasks"


def test_a_whole_node_is_the_cpus_of_the_largest_of_its_partition_and_nobody_shares_it() -> None:
    made = World(nodes=1, cpus=4)
    made.register("n2", cpus=8)
    for name, nodes in (("small", ("n1",)), ("large", ("n1", "n2"))):
        assert made.settle(c.SetPartition(Partition(name, nodes=nodes))) == 0
    whole = JobOptions(exclusive=True)
    first = taken(made, run=whole, partition="small")
    second = taken(made, run=whole, partition="large", cpus=2)
    assert [made.state.jobs[one].request.cpus for one in (first, second)] == [4, 8]
    assert [made.state.jobs[one].node for one in (first, second)] == ["n1", "n2"]
    third = taken(made, partition="large")
    assert made.state.jobs[third].node == ""


def test_a_whole_node_cannot_be_had_while_there_is_none() -> None:
    found = refused(World(nodes=0), run=JobOptions(exclusive=True))
    assert (found.code, found.place) == (RejectionCode.WRONG_STATE, "exclusive")


SYMBOL_VALUES = {
    "%%": "%", "%A": "12", "%J": "12", "%N": "n1", "%d": "/w", "%j": "12", "%n": "0", "%s": "batch", "%t": "0",
    "%u": "alan", "%x": "x", "%a": "3", "%b": "3",
}  # fmt: skip
FACTS: dict[str, Any] = {"job": 12, "user": "alan", "name": "x", "workdir": "/w", "array_job": 12, "array_task": 13}


@pytest.mark.parametrize("symbol", SYMBOL_VALUES)
def test_every_symbol_of_a_file_name_stands_for_what_sbatch_puts_there(symbol: str) -> None:
    facts = FACTS | {"array_task": 3}
    assert symbol in FILE_SYMBOLS.replace(",", "").split()
    assert expand_symbols(f"a{symbol}b", **facts, node="n1") == f"a{SYMBOL_VALUES[symbol]}b"
    if symbol not in SYMBOLS.replace(",", "").split():
        with pytest.raises(UnknownSymbol):
            expand_symbols(symbol, **facts)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("%4j", "0012"), ("%3a", "013"), ("%b", "3"), ("%2b", "03"), ("%04A", "0012"), ("%20j", "0000000012"),
        ("%5N", "n1"), ("%5x", "x"), ("%5s", "batch"), ("%%4j", "%4j"), ("%3t-%3n", "000-000"),
    ],
)  # fmt: skip
def test_a_width_pads_what_is_a_number(text: str, expected: str) -> None:
    assert expand_symbols(text, **FACTS, node="n1") == expected
    if "%%" not in text:
        with pytest.raises(UnknownSymbol):
            expand_symbols(text, **FACTS)


def test_the_files_of_a_job_have_the_name_of_its_node_once_it_has_one() -> None:
    made = World()
    job = taken(made, output="%x-%N.%J", error="%N/%j.err", run=JobOptions(input="in.%N"))
    request = made.state.jobs[job].request
    assert (made.order(job).output, made.order(job).error, made.order(job).input) == (
        f"/w/job-n1.{job}", f"/w/n1/{job}.err", "/w/in.n1",
    )  # fmt: skip
    assert [output_path(request, ""), error_path(request, job, ""), input_path(request, job, "")] == [
        f"/w/job-%N.{job}", f"/w/%N/{job}.err", "/w/in.%N",
    ]  # fmt: skip


def test_an_output_that_comes_to_the_symbol_of_the_node_is_rejected() -> None:
    made = World()
    assert refused(made, output="%%N").place == "output"
    assert refused(made, output="%x", name="a%Nb").place == "output"
    assert made.order(taken(made, output="%%n-%N")).output == "/w/%n-n1"


@pytest.mark.parametrize("field", ["input", "error", "output"])
def test_a_symbol_that_means_nothing_is_rejected_by_its_field(field: str) -> None:
    made = World()
    asked: dict[str, Any] = {"run": JobOptions(input="%q")} if field == "input" else {field: "%q"}
    assert refused(made, **asked).place == field


@pytest.mark.parametrize(
    ("text", "number", "before_s", "to_script"),
    [
        ("USR1", 10, 60, False), ("SIGUSR1@120", 10, 120, False), ("B:TERM@0", 15, 0, True), ("b:sigint@5", 2, 5, True),
        ("R:12", 12, 60, False), ("RB:10@65535", 10, 65_535, True), ("64@1", 64, 1, False),
    ],
)  # fmt: skip
def test_a_signal_is_read_as_sbatch_reads_it(text: str, number: int, before_s: int, to_script: bool) -> None:
    found = parse_signal(text)
    assert (found.number, found.before_s, found.to_script) == (number, before_s, to_script)


@pytest.mark.parametrize(
    "text", ["", "NOPE", "0", "65", "B:", "@60", "X:USR1", "USR1@", f"USR1@{SIGNAL_BEFORE_S_MAX + 1}"]
)
def test_a_signal_that_does_not_exist_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="; write "):
        parse_signal(text)
    if text:
        assert refused(World(), run=JobOptions(signal=text)).place == "signal"


def test_the_signals_have_the_numbers_of_this_system() -> None:
    import signal

    assert {name: int(signal.Signals[f"SIG{name}"]) for name in SIGNAL_NAMES} == SIGNAL_NAMES


def test_of_several_partitions_a_job_gets_the_first_that_takes_it() -> None:
    made = World()
    assert requested(made, partition="debug,batch").effective_options.partition == "debug"
    for name, users in (("own", ("brenda",)), ("batch", ())):
        assert made.settle(c.SetPartition(Partition(name, every_node=True, users=users))) == 0
    assert requested(made, partition="nosuch,own,batch").effective_options.partition == "batch"
    assert "partition 'nosuch' does not exist" in refused(made, partition="nosuch,own").sentence
    assert refused(made, partition="a,,b").place == "partition"


def defined(made: World) -> World:
    assert made.settle(c.SetQos(Qos("high"))) == 0
    assert made.settle(c.SetLicense(License("matlab", 4))) == 0
    return made


FIELDS = ("account", "qos", "licenses", "reservation")
UNDEFINED: dict[str, Any] = {
    "account": "m1", "qos": "debug", "licenses": (("SCRATCH", 1), ("matlab", 2)), "reservation": "r"
}  # fmt: skip


def test_what_the_site_has_not_defined_is_left_out_where_the_submit_says_so() -> None:
    made = defined(World())
    asked = requested(made, **UNDEFINED, if_defined=FIELDS).effective_options
    assert (asked.account, asked.qos, asked.licenses, asked.reservation) == ("", "", (("matlab", 2),), "")
    kept = requested(made, qos="high", licenses=(("matlab", 1),), if_defined=FIELDS).effective_options
    assert (kept.qos, kept.licenses) == ("high", (("matlab", 1),))


@pytest.mark.parametrize("field", FIELDS)
def test_what_is_not_marked_so_is_rejected(field: str) -> None:
    others = tuple(one for one in FIELDS if one != field)
    assert refused(defined(World()), **UNDEFINED, if_defined=others).place == field


def test_an_account_is_left_out_only_where_there_are_none() -> None:
    made = World()
    assert made.settle(c.SetAccount(Account("physics", members=(AccountUser("alan"),)))) == 0
    assert refused(made, account="m1", if_defined=FIELDS).place == "account"


def test_a_site_may_reject_options_without_effect_and_what_it_has_not_defined() -> None:
    made = defined(World())
    assert isinstance(submit(made, ignored=("--mem", "--gres")), int)
    made.configure(UnknownSbatchOptions="reject")
    found = refused(made, ignored=("--mem", "--gres"))
    assert (found.code, found.place) == (RejectionCode.INVALID_FIELD, "ignored_options")
    assert "--mem, --gres" in found.sentence and "UnknownSbatchOptions=warn" in found.remedy
    assert refused(made, qos="debug", if_defined=("qos",)).place == "qos"
    made.configure(Flags="EnablePersistent")
    assert refused(made, ignored=("--mem",)).place == "ignored_options"
    made.configure(UnknownSbatchOptions="warn")
    assert isinstance(submit(made, ignored=("--mem",)), int)
    assert made.state.site.flags == ("EnablePersistent",)


def test_a_retry_is_known_whatever_its_submitter_ignored() -> None:
    """A release that knows no such options has the same digest, and gives the same answer."""
    request = JobRequest("job", "alan", "#!/bin/sh\n", "/w", 60)
    plain = c.Request(b"\0" * 16, OPERATOR, c.SubmitJob(request))
    ignoring = replace(plain, command=c.SubmitJob(request, ignored=("--mem",), if_defined=("qos",)))
    assert c.command_digest(plain) == c.command_digest(ignoring)
    other = replace(plain, command=c.SubmitJob(replace(request, cpus=2)))
    assert c.command_digest(plain) != c.command_digest(other)

"""A site's burst_buffer.lua: arguments, results, and timeouts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from forebay.cluster.providers import OperationError, Provider, Subject
from forebay.cluster.providers.limits import OUTPUT_BYTES_MAX
from forebay.cluster.system.clock import SystemClock
from tests.cluster.providers.conftest import Programs, pairs

JOB = ("process", "setup", "data_in", "paths", "pre_run", "post_run", "data_out", "teardown")
"""Operations that get the job's script, in the order of a job's life."""


BRIEFLY_S = 0.3
"""Timeout of operations that never end by themselves, seconds."""


def perform(provider: Provider, operation: str, subject: Subject, directory: str) -> object:
    """Call one operation."""
    if operation == "teardown":
        return provider.teardown(subject, False, directory)
    call: Callable[[Subject, str], object] = getattr(provider, operation)
    return call(subject, directory)


def failure_of(programs: Programs, operation: str, subject: Subject, **settings: object) -> OperationError:
    """Return the error of an operation."""
    with pytest.raises(OperationError) as raised:
        perform(programs.provider("lua", **settings), operation, subject, str(programs.directory))
    return raised.value


def test_functions_get_documented_and_newer_arguments(
    programs: Programs,
) -> None:
    lua, directory = programs.provider("lua"), str(programs.directory)
    subject = programs.subject("x:%j")
    for operation in JOB[:-1]:
        perform(lua, operation, subject, directory)
    lua.real_size(subject, directory)
    lua.teardown(subject, True, directory)
    assert programs.calls() == [
        "process D/script 1001 2002 {job_id=7}",
        "setup 7 1001 2002 fast 2048 D/script.replaced {job_id=7}",
        "data_in 7 D/script.replaced 1001 2002 {job_id=7}",
        "paths 7 D/script D/path 1001 2002 {job_id=7}",
        "pre_run 7 D/script 1001 2002 {job_id=7}",
        "post_run 7 D/script.replaced 1001 2002 {job_id=7}",
        "data_out 7 D/script.replaced 1001 2002 {job_id=7}",
        "real_size 7 1001 2002 {job_id=7}",
        "teardown 7 D/script true 1001 2002",
    ]


def test_a_job_without_a_pool_is_set_up_with_null_and_size_zero(
    programs: Programs,
) -> None:
    lua, subject = programs.provider("lua"), programs.subject(pool="", size=5)
    lua.setup(subject, str(programs.directory))
    assert lua.real_size(subject, str(programs.directory)) is None
    assert programs.calls() == ["setup 7 1001 2002 (null) 0 D/script {job_id=7}"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("fail:no_space", "no space"),
        ("code:3", "slurm_bb_setup returned 3 and no message"),
        ("table", "slurm_bb_setup returned a second value that is not a string"),
        ("flag", "slurm_bb_setup returned a second value that is not a string"),
        ("none", "slurm_bb_setup returned a first value that is not a number; return slurm.SUCCESS or slurm.ERROR"),
        ("yes", "slurm_bb_setup returned a first value that is not a number"),
        ("word:no_space", "no space"),
        ("raise:broken", ": broken"),
        ("leave", "slurm_bb_setup ended with code 7 before it returned"),
        ("grow", "of memory"),
        ("read", "read 5"),
        ("python", "nil"),
    ],
)
def test_return_values_and_errors_become_the_failure_message(programs: Programs, action: str, message: str) -> None:
    error = failure_of(programs, "setup", programs.subject(f"setup:{action}"))
    assert error.operation == "setup"
    assert message in error.message


@pytest.mark.parametrize("action", ["nothing", "code:0", "say:fine", "number", "digits:0", "digits:0x0", "digits:0.5"])
def test_no_value_zero_and_zero_with_text_are_success(programs: Programs, action: str) -> None:
    subject = programs.subject(f"setup:{action}")
    programs.provider("lua").setup(subject, str(programs.directory))
    assert [call.split()[0] for call in programs.calls()] == ["setup"]


def test_scripts_do_not_see_this_interpreters_environment(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONPATH", "LD_PRELOAD_OF_NOBODY", "HOME"):
        monkeypatch.setenv(name, "/somewhere")
    programs.script.write_text(
        "function slurm_bb_setup()\n"
        "  local names = {}\n"
        "  for name in io.popen('env'):read('a'):gmatch('([%w_]+)=') do names[#names + 1] = name end\n"
        "  table.sort(names)\n"
        "  return slurm.ERROR, tostring(os.getenv('PYTHONPATH')) .. ' ' .. table.concat(names, ' ')\n"
        "end\n"
    )
    first, *names = failure_of(programs, "setup", programs.subject()).message.split()
    assert first == "nil"
    # The shell itself sets PWD, SHLVL and _.
    allowed = {"PATH", "LANG", "LC_ALL", "TMPDIR", "FOREBAY_OPERATION", "SITE_LOG", "PWD", "OLDPWD", "SHLVL", "_"}
    assert {"PATH", "SITE_LOG"} <= set(names) <= allowed


def test_a_missing_function_is_named(programs: Programs) -> None:
    programs.script.write_text("function slurm_bb_pools() return slurm.SUCCESS end\n")
    for operation in JOB:
        error = failure_of(programs, operation, programs.subject())
        function = {"process": "slurm_bb_job_process", "teardown": "slurm_bb_job_teardown"}.get(
            operation, f"slurm_bb_{operation}"
        )
        assert error.message == f"the function {function} is missing in {programs.script}"


def test_a_script_without_polling_functions_can_stage(programs: Programs) -> None:
    programs.script.write_text("function slurm_bb_data_in() return slurm.SUCCESS end\n")
    programs.provider("lua").data_in(programs.subject(), str(programs.directory))
    assert programs.calls() == []


def test_the_script_is_read_again_for_each_call(programs: Programs) -> None:
    lua = programs.provider("lua")
    lua.setup(programs.subject(), str(programs.directory))
    programs.script.write_text("this is no Lua\n")
    assert "burst_buffer.lua:1: syntax error" in failure_of(programs, "setup", programs.subject()).message
    programs.script.write_text('function slurm_bb_setup() return slurm.ERROR, "the new one" end\n')
    assert failure_of(programs, "setup", programs.subject()).message == "the new one"


@pytest.mark.parametrize(
    "head", ["#!/usr/bin/env lua\n", "# a comment of another language\n", "\ufeff", "\ufeff#!/bin/lua\n"]
)
def test_an_interpreter_line_and_a_byte_order_mark_are_skipped(programs: Programs, head: str) -> None:
    programs.script.write_text(head + "function slurm_bb_setup() error('here') end\n")
    line = 1 + head.count("\n")
    assert f"burst_buffer.lua:{line}: here" in failure_of(programs, "setup", programs.subject()).message


def test_a_script_that_returns_a_code_on_loading_fails(programs: Programs) -> None:
    programs.script.write_text("function slurm_bb_setup() end\nreturn slurm.ERROR\n")
    error = failure_of(programs, "setup", programs.subject())
    assert error.message == f"{programs.script} returned -1 when it was loaded; return nothing or slurm.SUCCESS"


def text_of(programs: Programs, expression: str) -> str:
    """Return the text of a Lua expression in a site's script."""
    programs.script.write_text(f"function slurm_bb_setup(...) return slurm.ERROR, tostring({expression}) end\n")
    return failure_of(programs, "setup", programs.subject()).message


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("slurm.to_json({a = 1, b = {'x', 2.5, true}})", '{"a":1,"b":["x",2.5,true]}'),
        ("slurm.to_json({})", "[]"),
        ("slurm.to_json({[3] = 'c', [2] = 'b', [1] = 'a'})", '["a","b","c"]'),
        ("slurm.to_json({[1.5] = 1, b = 2})", '{"1.5":1,"b":2}'),
        ("select(2, pcall(slurm.to_json, {[true] = 1}))", "a key is neither a string nor a number"),
        ("slurm.to_json({[1] = 'a', [3] = 'c'})", '{"1":"a","3":"c"}'),
        ('slurm.from_json(\'{"a": [1, {"b": null}, "x"]}\').a[3]', "x"),
        ("slurm.from_json('18446744073709551615')", "1.844674407371e+19"),
        ("slurm.from_json(slurm.to_json({n = 2 ^ 31 | 0})).n", "2147483648"),
        ("select(2, pcall(slurm.from_json, '{'))", "the string is not JSON: Input data was truncated"),
        ("select(2, pcall(slurm.to_json, print))", "the value cannot be JSON: it contains a function"),
        ("select(2, pcall(slurm.to_json, {0 / 0}))", "the value cannot be JSON: a number is not finite"),
        ("select(2, pcall(slurm.to_yaml, {}))", "slurm.to_yaml has no YAML library here: use JSON instead"),
        ("select('#', slurm.get_qos_priority('normal'))", "0"),
        ("slurm.CLUSTER_NAME", "demo"),
        ("slurm.NO_VAL16 .. ' ' .. slurm.ESLURM_ACCESS_DENIED", "65534 2002"),
    ],
)
def test_the_slurm_table_has_functions_and_constants(programs: Programs, expression: str, text: str) -> None:
    programs.cluster = "demo"
    assert text in text_of(programs, expression)


@pytest.mark.parametrize(
    ("depth", "text"),
    [(16, "[" * 16 + "1" + "]" * 16), (17, "the value cannot be JSON: its tables are nested more than")],
)
def test_json_nesting_is_limited_as_in_slurm(programs: Programs, depth: int, text: str) -> None:
    nested = (
        f"(function() local t = 1 for _ = 1, {depth} do t = {{t}} end return select(2, pcall(slurm.to_json, t)) end)()"
    )
    assert text_of(programs, nested).startswith(text)


def test_a_recursive_table_has_no_json(programs: Programs) -> None:
    loop = "(function() local t = {} t.t = t return select(2, pcall(slurm.to_json, t)) end)()"
    assert "its tables are nested more than 16 deep" in text_of(programs, loop)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("log_info('%u of %s', 1, nil)", "info: 1 of nil"),
        ("log_error('100%%')", "error: 100%"),
        ("log_error('100%')", "error: 100%"),
        ("log(2, 'x')", "debug: x"),
        ("log(9, 'x')", "debug4: x"),
    ],
)
def test_log_messages_are_formatted(programs: Programs, call: str, line: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    programs.script.write_text(f"function slurm_bb_setup() slurm.{call} end\n")
    programs.provider("lua").setup(programs.subject(), str(programs.directory))
    assert [record.getMessage() for record in caplog.records] == [f"slurm_bb_setup: {line}"]


def test_precompiled_lua_is_rejected(programs: Programs) -> None:
    programs.script.write_bytes(b"\x1bLua" + bytes(40))
    assert (
        "is precompiled Lua, which is not supported; provide the script as text"
        in failure_of(programs, "setup", programs.subject()).message
    )


def test_a_busy_operation_is_polled_until_it_ends(programs: Programs) -> None:
    programs.provider("lua").data_in(programs.subject("busy:3"), str(programs.directory))
    assert (programs.directory.parent / "calls.log.7").read_text() == "3"


@pytest.mark.parametrize("word", ["BUSY", "busy", "Busy"])
def test_busy_is_recognised_in_any_case(programs: Programs, word: str) -> None:
    programs.script.write_text(
        "function slurm_bb_data_in() end\n"
        "function slurm_bb_test_data_in()\n"
        "  local file = io.open(os.getenv('SITE_LOG'), 'a+')\n"
        "  local calls = #file:read('*a') + 1\n"
        "  file:write('x') file:close()\n"
        f"  return slurm.SUCCESS, calls < 3 and '{word}' or 'done'\n"
        "end\n"
    )
    programs.provider("lua").data_in(programs.subject(), str(programs.directory))
    assert programs.calls() == ["xxx"]


def test_an_operation_that_stays_busy_fails_with_slurms_message(programs: Programs) -> None:
    error = failure_of(programs, "data_in", programs.subject("busy:1000000"), stage_in_timeout_s=BRIEFLY_S)
    assert error.operation == "data_in"
    assert error.message.startswith(("Poll exceeded time limit", "Timeout @"))


@pytest.mark.parametrize(("operation", "action"), pairs(JOB, ("sleep:60", "deaf:60", "fork:60", "spin")))
def test_every_function_is_killed_at_its_timeout_without_leftovers(
    programs: Programs, operation: str, action: str
) -> None:
    before_s = SystemClock().monotonic_s()
    error = failure_of(
        programs,
        operation,
        programs.subject(f"{operation}:{action}"),
        validate_timeout_s=BRIEFLY_S,
        other_timeout_s=BRIEFLY_S,
        stage_in_timeout_s=BRIEFLY_S,
        stage_out_timeout_s=BRIEFLY_S,
    )
    assert SystemClock().monotonic_s() - before_s < 30
    assert (error.operation, error.message) == (operation, "Timeout @ 300 msec")
    assert programs.left() == []


def test_excess_output_neither_blocks_the_call_nor_fills_memory(programs: Programs) -> None:
    assert 40_000 * 101 > 4 * OUTPUT_BYTES_MAX
    programs.provider("lua").setup(programs.subject("setup:flood"), str(programs.directory))
    assert len(programs.calls()) == 1


def test_background_processes_of_a_successful_call_continue(programs: Programs) -> None:
    programs.provider("lua").setup(programs.subject("setup:background:60"), str(programs.directory))
    left = programs.left()
    assert len(left) == 1
    with pytest.raises(OperationError):
        programs.provider("lua", other_timeout_s=BRIEFLY_S).pre_run(
            programs.subject("pre_run:sleep:60"), str(programs.directory)
        )
    assert programs.left() == left, "only what the later call started was ended with it"
    os.kill(left[0], signal.SIGKILL)
    os.waitpid(left[0], 0)


def test_the_path_variables_are_parsed(programs: Programs) -> None:
    found = programs.provider("lua").paths(programs.subject(), str(programs.directory))
    assert found == (("BB_PLACE", "/bb/7"), ("DW_JOB_STRIPED", "/bb/striped"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no equals", "line 1 of the path file is not NAME=value"),
        ("\\n1A=b", "line 2 of the path file is not NAME=value"),
        ("FOREBAY_STEP=x", "line 1 of the path file sets FOREBAY_STEP"),
        ("A=\\255", "not UTF-8 at byte 2"),
    ],
)
def test_an_invalid_path_file_is_rejected_with_the_line(programs: Programs, text: str, message: str) -> None:
    programs.script.write_text(
        f'function slurm_bb_paths(_, _, path) local f = io.open(path, "w") f:write("{text}") f:close() end\n'
    )
    assert message in failure_of(programs, "paths", programs.subject()).message


@pytest.mark.parametrize(("said", "size"), [("2KiB", 2048), ("10000", 10000), ("", None)])
def test_the_real_size_is_the_functions_result(programs: Programs, said: str, size: int | None) -> None:
    programs.variables["SITE_SIZE"] = said
    assert programs.provider("lua").real_size(programs.subject(), str(programs.directory)) == size


def test_an_invalid_real_size_fails(programs: Programs) -> None:
    programs.variables["SITE_SIZE"] = "-5"
    assert "slurm_bb_real_size did not return a size" in failure_of(programs, "real_size", programs.subject()).message


def test_pools_and_status_are_the_scripts_results(programs: Programs) -> None:
    lua = programs.provider("lua")
    pools = lua.pools(str(programs.directory))
    assert pools is not None
    assert [(pool.name, pool.quantity, pool.granularity) for pool in pools] == [("fast", 5, 1048576)]
    assert lua.get_status(("a", "b"), 1, 2, str(programs.directory)) == "a b\n"


@pytest.mark.parametrize(
    ("row", "quantity", "granularity"),
    [
        ('"quantity": 5, "granularity": 2', 5, 2),
        ('"quantity": 5', 5, 1),
        ('"quantity": 5, "granularity": 0', 5, 1),
        ('"granularity": 2', 0, 2),
    ],
)
def test_omitted_pool_values_have_slurms_defaults(
    programs: Programs, row: str, quantity: int, granularity: int
) -> None:
    pools = f'{{"pools": [{{"id": "a", {row}}}]}}'
    programs.script.write_text(f"function slurm_bb_pools() return slurm.SUCCESS, [[{pools}]] end\n")
    found = programs.provider("lua").pools(str(programs.directory))
    assert found is not None and [(pool.quantity, pool.granularity) for pool in found] == [(quantity, granularity)]


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ("{", "not valid JSON"),
        ('{"pools": 1}', "not valid JSON"),
        ('{"pools": [{"id": "a", "quantity": -1}]}', "quantity -1"),
        ('{"pools": [{"id": "a", "quantity": 1, "granularity": -1}]}', "granularity -1"),
        ('{"pools": [{"quantity": 1}]}', "not valid JSON"),
        ('{"pools": [{"id": "a", "quantity": "1"}]}', "not valid JSON"),
        ('{"pools": [{"id": "a/b", "quantity": 1}]}', "the id of a pool"),
        ('{"pools": [{"id": "a", "quantity": 1}, {"id": "a", "quantity": 1}]}', "twice"),
        (
            '{"pools": [{"id": "a", "quantity": 9223372036854775807, "granularity": 1024}]}',
            "quantity 9223372036854775807",
        ),
    ],
)
def test_invalid_pools_are_rejected(programs: Programs, pools: str, message: str) -> None:
    programs.script.write_text(f"function slurm_bb_pools() return slurm.SUCCESS, [[{pools}]] end\n")
    with pytest.raises(OperationError, match=message):
        programs.provider("lua").pools(str(programs.directory))


def test_a_call_ended_by_sigterm_leaves_nothing(programs: Programs) -> None:
    class Ended(BaseException):
        pass

    def end(_number: int, _frame: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(Ended):
            programs.provider("lua").setup(programs.subject("setup:fork:60"), str(programs.directory))
        assert programs.left() == []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

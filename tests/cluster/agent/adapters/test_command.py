"""The program of a site: its contract, and programs that hang, lie, or print garbage."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from forebay.cluster.agent.adapters import (
    BAD_OUTPUT,
    EXIT_CODE,
    NOT_INSTALLED,
    TIMED_OUT,
    UNTRUSTED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    quota_adapter,
)
from forebay.cluster.system import closing, open_directory
from tests.cluster.agent.adapters.fakes import FakePrograms

CASES = {
    "fails": ("sys.exit('no space in the quota table')", EXIT_CODE, "no space in the quota table"),
    "unsupported": ("print('not this path', file=sys.stderr); sys.exit(3)", UNUSABLE, "not this path"),
    "killed": ("os.kill(os.getpid(), 9)", EXIT_CODE, "signal 9"),
    "garbage": ("print('done!')", BAD_OUTPUT, "done!"),
    "empty": ("pass", BAD_OUTPUT, ""),
    "list": ("print('[]')", BAD_OUTPUT, ""),
    "unknown-field": ("""print('{"size": 1}')""", BAD_OUTPUT, "size"),
    "wrong-type": ("""print('{"size_bytes": "1"}')""", BAD_OUTPUT, ""),
    "negative": ("""print('{"size_bytes": -5, "inodes": 1, "size_limit_bytes": 1}')""", BAD_OUTPUT, ""),
    "incomplete": ("""print('{"size_bytes": 5}')""", BAD_OUTPUT, ""),
    "binary": ("sys.stdout.buffer.write(bytes(range(256)))", BAD_OUTPUT, ""),
    "endless": ("while True: print('x' * 4096)", TIMED_OUT, ""),
    "long": ("print('x' * 70000)", BAD_OUTPUT, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_that_fails_or_prints_something_else_is_reported(
    programs: FakePrograms, parent: int, case: str
) -> None:
    body, code, said = CASES[case]
    tools = programs.tools(command=str(programs.write("quota", body)), timeout_s=3.0 if case == "endless" else 60.0)
    with pytest.raises(AdapterFailed) as caught:
        quota_adapter("command", tools).usage(parent)
    assert caught.value.code == code and said in str(caught.value), caught.value
    # Terminals must not receive control characters.
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1024


def test_a_program_that_hangs_is_killed_with_all_its_processes(
    programs: FakePrograms, parent: int, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    body = f"""
import signal
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
with open({str(pids)!r}, "a") as file:
    print(os.getpid(), file=file, flush=True)
while True:
    signal.pause()
"""
    tools = programs.tools(command=str(programs.write("quota", body)), timeout_s=2.0)
    with pytest.raises(AdapterFailed) as caught:
        quota_adapter("command", tools).usage(parent)
    assert caught.value.code == TIMED_OUT
    written = [int(pid) for pid in pids.read_text().split()]
    assert len(written) == 2
    assert not any(os.path.exists(f"/proc/{pid}/exe") for pid in written)


def test_the_program_receives_the_request_on_standard_input_and_nothing_of_the_agent(
    programs: FakePrograms, parent: int, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    body = f"""
limit = json.load(sys.stdin)
seen = {{"request": limit, "environment": dict(os.environ), "words": words, "cwd": os.getcwd(),
         "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]}}
with open({str(seen)!r}, "a") as file:
    print(json.dumps(seen), file=file)
print(json.dumps({{"size_bytes": 0, "inodes": 1, "size_limit_bytes": 4096}} if words[0] == "usage" else {{}}))
"""
    secret = os.open(tmp_path, os.O_RDONLY)
    os.set_inheritable(secret, True)
    tools = programs.tools(command=str(programs.write("quota", body)))
    os.mkdir("7", dir_fd=parent)
    with closing(secret), closing(open_directory("7", dir_fd=parent)) as directory:
        quota_adapter("command", tools).apply(directory, "a seed", BufferLimit(4096, None))
    applied, usage = map(json.loads, seen.read_text().splitlines())
    assert applied["words"] == ["apply", f"{tmp_path}/fs/7"] and usage["words"] == ["usage", f"{tmp_path}/fs/7"]
    assert applied["request"] == {"version": 1, "seed": "a seed", "size_bytes": 4096, "inodes": None}
    assert applied["environment"].keys() <= {"PATH", "LC_ALL", "LC_CTYPE"}
    assert applied["cwd"] == "/" and applied["descriptors"] == [0, 1, 2]


def test_a_program_that_others_may_change_is_not_run(programs: FakePrograms, parent: int) -> None:
    program = programs.write("quota", "print('{}')")
    program.chmod(0o777)
    adapter = quota_adapter("command", programs.tools(command=str(program)))
    with pytest.raises(AdapterFailed) as caught:
        adapter.usage(parent)
    assert caught.value.code == UNTRUSTED and not programs.calls()
    program.chmod(0o644)
    with pytest.raises(AdapterFailed) as caught:
        adapter.usage(parent)
    assert caught.value.code == UNTRUSTED
    program.unlink()
    with pytest.raises(AdapterFailed) as caught:
        adapter.usage(parent)
    assert caught.value.code == NOT_INSTALLED


def test_a_reason_of_the_program_is_the_reason_of_the_check(programs: FakePrograms, parent: int) -> None:
    program = programs.write("quota", """print('{"reason": "its licence has expired"}')""")
    assert quota_adapter("command", programs.tools(command=str(program))).check(parent) == "its licence has expired"

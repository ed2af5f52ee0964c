"""The two groups that scripts/test runs at once: together they are all tests, and no failure of either is lost."""

import subprocess
import sys
from collections import Counter
from pathlib import Path, PurePath

import pytest

from tests.groups import NOTHING_TO_DO, WAITING, Ended, Group, files_of_tests, group_of, groups_for, judged
from tests.repo.tree import ROOT, repository_files, text_of

ONE_OF_EACH = {Group.WORKING: "tests/repo/test_lock.py", Group.WAITING: "tests/e2e/test_drill.py"}
OK, FAILED = int(pytest.ExitCode.OK), int(pytest.ExitCode.TESTS_FAILED)


def ended(group: Group, code: int, *files: str) -> Ended:
    """Return how a group ended that had one test in each of these files."""
    return Ended(group, code, dict.fromkeys(files, 1), 1.0)


def test_every_test_file_of_the_repository_is_in_a_group_and_none_else() -> None:
    files = {str(path) for path in repository_files() if path.name.startswith("test_") and path.parts[0] == "tests"}
    assert files_of_tests() == files
    groups = Counter(group_of(PurePath(name)) for name in files)
    assert set(groups) == set(Group)
    assert groups.total() == len(files)


def test_every_place_where_tests_wait_has_tests() -> None:
    assert [place for place in WAITING if not files_of_tests(ROOT / place)] == []
    assert [place for place in WAITING if not (ROOT / place).exists()] == []


def test_files_that_are_named_are_run_by_the_group_that_has_them_and_by_no_other() -> None:
    for group, name in ONE_OF_EACH.items():
        assert groups_for(["-x", f"{name}::test_a"]) == [group]
    assert groups_for([*ONE_OF_EACH.values()]) == [*Group]
    assert groups_for(["tests"]) == groups_for([]) == groups_for(["-k", "wal or e2e"]) == [*Group]


def test_both_groups_get_the_options_and_each_collects_its_own_files() -> None:
    line = [sys.executable, "-m", "tests.groups", "--collect-only", *ONE_OF_EACH.values()]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == OK, done.stdout + done.stderr
    working, waiting = done.stdout.split("== pytest, waiting group")
    assert ("test_lock.py::" in working, "test_drill.py::" in working) == (True, False)
    assert ("test_lock.py::" in waiting, "test_drill.py::" in waiting) == (False, True)


def test_a_file_that_no_group_ran_or_that_both_ran_is_a_failure_by_name() -> None:
    both = [ended(Group.WORKING, OK, "a", "b"), ended(Group.WAITING, OK, "c")]
    code, lines = judged(both, {"a", "b", "c"})
    assert (code, len(lines)) == (OK, 2)
    code, lines = judged(both, {"a", "b", "c", "d"})
    assert (code, lines[2:]) == (FAILED, ["d was run by no group"])
    code, lines = judged([both[0], ended(Group.WAITING, OK, "b", "c")], {"a", "b", "c"})
    assert (code, lines[2:]) == (FAILED, ["b was run by 2 groups"])


@pytest.mark.parametrize("code", [int(code) for code in pytest.ExitCode if code not in (OK, NOTHING_TO_DO)] + [-9])
@pytest.mark.parametrize("first", [True, False])
def test_a_failure_of_either_group_is_a_failure_of_both(code: int, first: bool) -> None:
    codes = (code, OK) if first else (OK, code)
    found, lines = judged([ended(group, one, "a") for group, one in zip(Group, codes, strict=True)], set())
    assert found == code
    assert [line.startswith("FAILED") for line in lines] == [first, not first]


def test_a_group_of_which_the_options_left_nothing_is_no_failure_unless_nothing_is_left_at_all() -> None:
    nothing = ended(Group.WAITING, NOTHING_TO_DO)
    assert judged([ended(Group.WORKING, OK, "a"), nothing], set())[0] == OK
    assert judged([ended(Group.WORKING, NOTHING_TO_DO), nothing], set())[0] == NOTHING_TO_DO


def test_the_script_runs_the_groups_with_what_it_is_given() -> None:
    assert '-m tests.groups "$@"' in text_of(Path("scripts/test"))

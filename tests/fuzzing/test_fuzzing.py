"""The fuzzer itself: a short run of it finds nothing, and what is nonsense it would find."""

import json
from typing import Any

import pytest

from forebay.replica.grammar.directives import ParsedRequest, read_request
from tests.fuzzing import runner
from tests.fuzzing.generator import Case
from tests.fuzzing.oracle import nonsense
from tests.fuzzing.runner import check_case, main

CASES = 3_000


def test_a_short_run_finds_nothing_and_accepts_something(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seconds", "60", "--cases", str(CASES), "--seed", "7"]) == 0
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert said["cases"] == CASES and said["faults"] == 0 and said["accepted"] > CASES // 50


def case(line: str, **fields: Any) -> Case:
    return Case(**{"script": f"{line}\n", "bb": "", "bbf": "", "provider": "native", "directive": "BB_LUA", **fields})


SOUND = "#DW jobdw capacity=1GiB"


@pytest.mark.parametrize(
    "line",
    [
        "#DW jobdw capacity=-5",
        "#DW jobdw capacity=1KX",
        "#DW jobdw capacity=2GiB",
        "#DW jobdw capacity=1GiB\n#DW jobdw capacity=1GiB",
        "#DW jobdw capacity=1GiB pool=no/pe",
        "#DW frob\n#DW jobdw capacity=1GiB",
        "#DW jobdw capacity=1GiB\n#DW persistentdw name=1a",
        "#DW jobdw capacity=1GiB\n#DW persistentdw name=a",
        "#DW jobdw capacity=1GiB\n#BB create_persistent name=a capacity=1G",
        "#DW jobdw capacity=1GiB\n#DW stage_in type=file source=/a destination=$DW_JOB_STRIPED/a",
        "#DW jobdw capacity=1GiB\n#DW stage_in type=file source=/../a destination=$DW_JOB_STRIPED/a",
        "#DW jobdw capacity=1GiB\n#DW swap 1",
    ],
)
def test_the_oracle_sees_what_a_bad_grammar_would_accept(line: str) -> None:
    accepted = read_request(SOUND)
    assert nonsense(case(SOUND), accepted.request) is None
    assert nonsense(case(line), accepted.request) is not None


@pytest.mark.parametrize(
    "line",
    [
        r"#DW stage_in type=file source=/in/a\\ destination=$FOREBAY_JOB_DIR/a",
        r"#DW stage_in type=list destination=$FOREBAY_JOB_DIR/\\a source=%d/x colour=red",
        r"#DW stage_in type=list source=/in/%j/\\%u destination=$FOREBAY_JOB_DIR/f",
        "#DW jobdw capacity=1.5TB pool\\=test_pool\\ \\\n#DW ",
    ],
)
def test_what_the_fuzzer_once_found_stays_right(line: str) -> None:
    assert check_case(case(line)) is None


def test_a_crash_a_loss_and_a_hang_are_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(case: Case) -> ParsedRequest:
        raise ZeroDivisionError

    def hang(case: Case) -> ParsedRequest:
        while True:
            pass

    monkeypatch.setattr(runner, "HANG_S", 0.05)
    for broken, word in ((crash, "ZeroDivisionError"), (hang, "took more than")):
        monkeypatch.setattr(runner, "_read", broken)
        assert main(["--seconds", "30", "--cases", "1"]) == 1
        assert word in capsys.readouterr().out
    monkeypatch.setattr(runner, "_read", lambda case: ParsedRequest(None, ()))
    assert check_case(case(SOUND)) == "accepted: there is a directive, and no request"


@pytest.mark.parametrize(
    "line",
    [
        "#BB_LUA pool=alpha capacity pool=alpha capacity=32GB anything",
        "#BB_LUA pool=beta capacity pool=beta capacity=16MB",
        "#BB_LUA pool pool poolB_LUA pool=beta",
    ],
)
def test_a_word_without_a_value_is_the_sites_whatever_it_is_called(line: str) -> None:
    assert check_case(case(line, provider="lua")) is None

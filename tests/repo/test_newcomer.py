"""What the checks of packages would catch: half a statement, a drill that lost something, a way that is too long."""

import subprocess
from pathlib import Path

import pytest

from tests.packages import document
from tests.packages.campaign import Clock
from tests.packages.document import Terminal, Typed, documented, sampled
from tests.packages.drill import first_drill
from tests.packages.machine import Machine, StepFailed

REPORT = {
    "Verdict": "passed",
    "Result": "r1 leads; writes stopped for 134.0 ms, and none of 432 acknowledged writes is lost",
    "Writes stopped": "134.0 ms",
    "User writes stopped": "134.0 ms",
    "Reads stopped": "140.1 ms",
    "Longest write gap before": "40.0 ms",
    "Leadership transfer": "12.1 ms",
    "Writes acknowledged": "432",
    "Acknowledged writes lost": "0",
    "Re-runs": "0",
    "Replicas consistent": "yes",
}


class Answering(Terminal):
    """A terminal of a cluster whose plans hold from the second on, and whose drill says `report`."""

    def __init__(self, report: dict[str, str]) -> None:
        self.report = report
        self.typed = list[str]()

    def type(self, text: str) -> str:
        self.typed.append(text)
        if " plan " in text and self.typed.count(text) > 1:
            return "plan 5f0c2a91: …\nto run it: forebay drill run switchover --target r1 --confirm 5f0c2a91\n"
        return "".join(f"{name:30} {value}\n" for name, value in self.report.items()) if " run " in text else ""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.packages.drill.AGAIN_S", 0.0)


def test_a_first_drill_is_typed_as_its_plan_says_once_everything_holds() -> None:
    terminal = Answering(REPORT)
    first_drill(terminal, Clock())
    plan = "forebay drill plan switchover"
    assert [text for text in terminal.typed if text == plan] == [plan, plan]
    assert "forebay drill run switchover --target r1 --confirm 5f0c2a91 || [ $? = 7 ]" in terminal.typed


def test_a_machine_that_is_slow_does_not_fail_a_first_drill() -> None:
    first_drill(
        Answering({**REPORT, "Verdict": "failed", "Result": "writes stopped for 877.6 ms, and the goal is 500 ms"}),
        Clock(),
    )


@pytest.mark.parametrize(
    "said",
    [
        {"Acknowledged writes lost": "1"},
        {"Re-runs": "2"},
        {"Replicas consistent": "no"},
        {"Writes acknowledged": "0"},
        {"Verdict": "failed", "Result": "1 acknowledged writes are gone; writes stopped for 877.6 ms"},
        {"Verdict": "aborted", "Result": "r2 does not answer any more"},
    ],
)
def test_a_first_drill_that_lost_something_or_was_aborted_fails(said: dict[str, str]) -> None:
    with pytest.raises(AssertionError):
        first_drill(Answering({**REPORT, **said}), Clock())


@pytest.mark.parametrize("name", sampled("first drill"))
def test_a_line_that_the_document_explains_and_a_drill_does_not_say_fails(name: str) -> None:
    with pytest.raises((AssertionError, KeyError)):
        first_drill(Answering({key: value for key, value in REPORT.items() if key != name}), Clock())


def test_a_way_that_takes_longer_than_its_bound_fails() -> None:
    clock = Clock()
    clock.steps.append(("before it", 1000.0))
    with clock.within(300, "five minutes"):
        clock.steps.append(("at most", 300.0))
    with pytest.raises(AssertionError, match="took 300.1 s, and may take 300"), clock.within(300, "five minutes"):
        clock.steps += [("some", 200.0), ("more", 100.1)]


def test_a_statement_of_several_lines_is_typed_as_one_and_its_user_is_who_the_prose_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = (
        "<!-- begin: way, typed by x -->\n    one\n    for a in b; do\n      two\n    done\nAnd as alan\n\n    three\n"
        "<!-- end -->\n    four\n"
    )
    monkeypatch.setattr(document, "PAGES", ("docs/install/packages.md",))
    monkeypatch.setattr(document, "text_of", lambda path: text)
    assert [*documented("way")] == [Typed("", "one"), Typed("", "for a in b; do\n  two\ndone"), Typed("alan", "three")]
    monkeypatch.setattr(document, "text_of", lambda path: text.replace("    done\n", ""))
    with pytest.raises(AssertionError, match="the end of"):
        list(documented("way"))
    with pytest.raises(AssertionError, match="have 0 blocks 'no way'"):
        list(documented("no way"))


class Here(Machine):
    """This machine, in place of a clean one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def started(self, *words: str, user: str = "") -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(words, cwd=self.directory, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def test_a_terminal_goes_on_where_it_was_and_ends_with_the_first_statement_that_fails(tmp_path: Path) -> None:
    terminal = Terminal(Here(tmp_path))
    assert terminal.type("mkdir a; cd a; export B=c") == ""
    assert terminal.type("cat; echo $B >&2; basename $PWD") == "c\na\n"
    with pytest.raises(StepFailed, match="ended with 1"):
        terminal.type("for one in 1 2; do\n  false\n  echo never\ndone")
    terminal.close()

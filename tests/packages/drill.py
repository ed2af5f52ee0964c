"""A first drill, typed as docs/operate/drills.md has it, and its report held to what the document explains."""

import re
import time
from typing import Final

from tests.packages.campaign import Clock
from tests.packages.document import Terminal, documented, sampled

DRILL_S: Final = 300.0
"""Seconds until a newcomer has had a first drill, at most."""

COMPARED_S: Final = 120.0
"""Seconds until the replicas of a new cluster have compared their states, which a plan needs: they do each minute."""

AGAIN_S: Final = 2.0
"""Seconds until somebody types it again."""

HAS_TO_BE: Final = {"Acknowledged writes lost": "0", "Re-runs": "0", "Replicas consistent": "yes"}
"""Figures of a drill that are no matter of how busy the machine is."""

ONLY_SLOW: Final = r"writes stopped for [\d.]+ ms, and the goal is 500 ms"
"""Why a drill may have failed all the same: of the machine, not of what was typed."""

FAILED: Final = 7
"""What `forebay drill run` ends with where its verdict is not that it passed."""


def first_drill(terminal: Terminal, clock: Clock) -> None:
    """Type it, and hold its report to the document; AssertionError, StepFailed."""
    allowed, report = "", dict[str, str]()
    for _, text in documented("first drill"):
        with clock.step(text):
            if " plan " in text:
                allowed = _planned(terminal, text)
            elif " run " in text:
                assert _shape(allowed) == _shape(text), (allowed, text)
                printed = terminal.type(f"{allowed} || [ $? = {FAILED} ]")
                report = dict(re.findall(r"^(\w[\w -]+?)  +(.+)$", printed, re.MULTILINE))
            else:
                terminal.type(text)
    assert set(sampled("first drill")) <= set(report), report
    assert {name: report[name] for name in HAS_TO_BE} == HAS_TO_BE, report
    assert int(report["Writes acknowledged"]) > 0, report
    if report["Verdict"] != "passed":
        assert re.fullmatch(ONLY_SLOW, report["Result"]), report
    print(f"           {report['Verdict']}: {report['Result']}; writes stopped for {report['Writes stopped']}")


def _planned(terminal: Terminal, text: str) -> str:
    """Return what a plan says is to be typed next, once everything holds that must."""
    end_s = time.monotonic() + COMPARED_S
    while True:
        printed = terminal.type(text)
        found = re.search(r"^to run it: (.+)$", printed, re.MULTILINE)
        if found is not None:
            return found[1]
        assert time.monotonic() < end_s, printed
        time.sleep(AGAIN_S)


def _shape(command: str) -> str:
    """Return a command without what is different in each cluster: to whom, and the plan's id."""
    return re.sub(r"(--target|--confirm) \w+", r"\1", command)

"""Runs the grammar of requests over cases out of a seed, and says of each what it should have been."""

from __future__ import annotations

import argparse
import json
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Final

from msgspec.structs import replace

from forebay.replica.grammar.directives import ParsedRequest, read_request
from forebay.replica.grammar.lexer import DirectiveRejected
from forebay.replica.grammar.variables import PathVariables
from forebay.replica.model.requests import BufferRequest
from tests.fuzzing.generator import Case, make_case
from tests.fuzzing.oracle import nonsense
from tests.replica.reference.printing import format_request

HANG_S: Final = 5.0
"""Seconds of CPU that one case may take: a thousand times what it takes, so that only a hang reaches it."""

FAULTS_SHOWN: Final = 5
"""Cases that are printed before a run ends, count."""


VARIABLES: Final = PathVariables(given=(("HOME", "/home/alice"),))
"""What the client of each case sends."""


class Hang(Exception):
    """A case took longer than HANG_S."""


def check_case(case: Case) -> str | None:
    """Return what is wrong with what the grammar says of a case, or None."""
    try:
        reading = _read(case)
    except DirectiveRejected as refused:
        rejection = refused.rejection
        if not rejection.sentence or not rejection.remedy or not rejection.place:
            return f"refused without sentence, remedy or place: {rejection}"
        if len(rejection.sentence) > 1_000 or len(rejection.remedy) > 1_000:
            return "a rejection that is too long to read"
        return None
    wrong = nonsense(case, reading.request)
    if wrong is not None:
        return f"accepted: {wrong}"
    if reading.request is None:
        return None
    return _printed_wrongly(case, reading) or _shown_wrongly(case, reading)


def _read(case: Case) -> ParsedRequest:
    return read_request(
        case.script, case.bb, case.bbf, provider=case.provider, directive=case.directive, variables=VARIABLES
    )


def asked(request: BufferRequest | None) -> BufferRequest | None:
    """Return a request without what only says where it stood."""
    if request is None:
        return None
    return replace(
        request,
        text="",
        places=(),
        creates=tuple(replace(record, place="") for record in request.creates),
        destroys=tuple(replace(record, place="") for record in request.destroys),
        lists=tuple(replace(record, place="") for record in request.lists),
        variables=(),
        directives_kind=request.directives_kind if request.directives_kind in ("lua", "spur") else "",
    )


def _printed_wrongly(case: Case, reading: ParsedRequest) -> str | None:
    """Return how a native request does not read back as it was printed, or None."""
    if case.provider != "native" or reading.request is None:
        return None
    bb, bbf = format_request(reading.request)
    try:
        again = read_request("", bb, bbf, variables=VARIABLES)
    except DirectiveRejected as refused:
        return f"printed as {bb!r} {bbf!r}, which is refused: {refused}"
    before, after = asked(reading.request), asked(again.request)
    return None if before == after else f"printed as {bb!r} {bbf!r}, read back as {after} instead of {before}"


def _shown_wrongly(case: Case, reading: ParsedRequest) -> str | None:
    """Return how the text that people are shown does not ask for the same, or None."""
    if reading.request is None:
        return None
    lines = reading.request.text.split("\n")
    bb = "\n".join(line for line in lines if not line.startswith("#"))
    bbf = "\n".join(line for line in lines if line.startswith("#"))
    try:
        again = read_request("", bb, bbf, provider=case.provider, directive=case.directive, variables=VARIABLES)
    except DirectiveRejected as refused:
        return f"shown as {reading.request.text!r}, which is refused: {refused}"
    before, after = asked(reading.request), asked(again.request)
    return None if before == after else f"shown as {reading.request.text!r}, read back as {after} instead of {before}"


@contextmanager
def _bounded() -> Iterator[None]:
    def hang(number: int, frame: object) -> None:
        raise Hang

    previous = signal.signal(signal.SIGPROF, hang)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, previous)


def main(arguments: list[str] | None = None) -> int:
    """Run until the time or the number of cases is over; 1 where something is wrong."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description="Fuzz the grammar of burst-buffer requests.")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to run")
    parser.add_argument("--seed", type=int, default=1, help="where the randomness begins")
    parser.add_argument("--cases", type=int, default=0, help="how many cases at most; 0: as many as there is time for")
    chosen = parser.parse_args(arguments)
    started = time.monotonic()
    count, accepted, faults, slowest_s = 0, 0, 0, 0.0
    with _bounded():
        while time.monotonic() - started < chosen.seconds and (not chosen.cases or count < chosen.cases):
            case = make_case(Random(f"{chosen.seed}:{count}"))
            before = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, HANG_S)
            try:
                wrong = check_case(case)
            except Hang:
                wrong = f"took more than {HANG_S} s"
            except Exception:  # Whatever it is, it is what is looked for.
                wrong = traceback.format_exc()
            signal.setitimer(signal.ITIMER_PROF, 0)
            slowest_s = max(slowest_s, time.process_time() - before)
            if wrong is not None:
                faults += 1
                print(f"seed {chosen.seed} case {count}: {wrong}\n  {case}")
                if faults >= FAULTS_SHOWN:
                    break
            elif _is_accepted(case):
                accepted += 1
            count += 1
    print(
        json.dumps(
            {
                "seed": chosen.seed,
                "cases": count,
                "accepted": accepted,
                "faults": faults,
                "seconds": round(time.monotonic() - started, 1),
                "slowest_ms": round(slowest_s * 1000, 1),
            }
        )
    )
    return 1 if faults or not count else 0


def _is_accepted(case: Case) -> bool:
    try:
        return _read(case).request is not None
    except DirectiveRejected:
        return False

"""System calls of a transfer that fail once or permanently: no file is lost or partial, and the error is clear."""

import errno
import sys
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone, OperationFailed
from tests.faults.tracing import Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import STAGES, Broken, Harness, judge, said
from tests.faults.transfers.kills import CALLS_MAX, prepare, wait_until_gone

ERRORS = {
    Calls.WRITE: ("EIO", "ENOSPC", "EDQUOT"),
    Calls.SYNC: ("EIO", "ENOSPC"),
    Calls.RENAME: ("EIO", "ENOSPC", "EACCES"),
    Calls.MAKE: ("ENOSPC", "EROFS", "EACCES", "EMFILE"),
    Calls.READ: ("EIO",),
    Calls.LOOK: ("EIO", "EACCES", "ESTALE", "ENOENT"),
    Calls.META: ("EIO", "EPERM"),
    Calls.REMOVE: ("EIO", "EACCES"),
}
"""What a disk, a file server or a permission may say to each kind of call."""

LASTING = (Calls.WRITE, Calls.SYNC, Calls.RENAME)
"""Calls without which nothing can be moved: where they fail for ever, a transfer may not say that it is done."""


class Size(NamedTuple):
    """How much is done."""

    stride: int
    """Every so manyth call is the one."""
    errors: int
    """Of each kind of call, so many errors."""
    classes: tuple[Calls, ...] = tuple(ERRORS)
    always: tuple[int, ...] = (0, 3)
    """From which call on it is for ever."""


TINY = Size(stride=60, errors=1, classes=(Calls.WRITE,), always=(1,))
SMALL = Size(stride=17, errors=1)
FULL = Size(stride=1, errors=4)


def refuse_once(harness: Harness, tracer: Tracer, stage: str, plan: Plan, seed: int, *, reference: bool) -> bool:
    """One transfer of which calls are refused, and the attempt after it; return whether any was."""
    story = prepare(harness, stage, seed)
    source, destination = harness.places(stage)
    tracer.set(plan)
    outcome = harness.operate(stage)
    wait_until_gone(tracer)
    hits, where = tracer.hits, tracer.last
    tracer.set(Plan(needle="-"))
    name = errno.errorcode[plan.error]
    try:
        if not hits and not isinstance(outcome, OperationDone):
            raise Broken(f"nothing was refused, and it {said(outcome)}")
        done = isinstance(outcome, OperationDone)
        # The C library takes the one for the end of a directory that was removed, and so is empty: nobody sees it. The
        # other is said of what is open by no file system that we know: it says ESTALE.
        unseen = plan.error == errno.ENOENT and (" getdents64 " in where or " fstat " in where)
        judge(story, source, destination, complete=done and not unseen)
        if isinstance(outcome, OperationDone):
            lasting = plan.period == 1 and plan.classes in LASTING and plan.needle == str(harness.written(stage))
            if hits and lasting:
                raise Broken("it says that it is done")
            return hits > 0
        check_words(outcome)
        if not reference:
            again = harness.operate(stage)
            if not isinstance(again, OperationDone):
                raise Broken(f"the attempt after it {said(again)}")
            judge(story, source, destination, complete=True)
    except Broken as error:
        often = "always" if plan.period == 1 else "once"
        raise Broken(f"{name} {often} at call {where!r} of {stage}: {error}") from error
    return hits > 0


def check_words(outcome: object) -> None:
    """Check that a failure is a sentence about a file, and not a program that fell over."""
    if not isinstance(outcome, OperationFailed):
        raise Broken(f"there is no outcome: {outcome!r}")
    if "before it returned a result" in outcome.message or "Traceback" in outcome.message:
        raise Broken(f"the worker fell over: {outcome.message}")
    if not any(mark in outcome.message for mark in ("/", "$", "(", "the buffer")):
        raise Broken(f"no file is named: {outcome.message}")


def refusals(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Refuse every call that is asked for; Broken at the first broken promise."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "refusals", tracer=tracer, reference=reference)
    once = always = 0
    try:
        for classes in size.classes:
            # Calls that only look are many, and much the same.
            stride = size.stride * (5 if classes in (Calls.LOOK, Calls.READ) else 1)
            for error in ERRORS[classes][: size.errors]:
                number = getattr(errno, error)
                for stage in STAGES:
                    for call in range(seed % stride, CALLS_MAX, stride):
                        plan = Plan(Action.FAIL, classes, str(harness.directory), skip=call, error=number)
                        if not refuse_once(harness, tracer, stage, plan, seed, reference=reference):
                            break
                        once += 1
                        if once % 100 == 0:
                            print(f"refusals: {once}, {stage}, {error} at {classes.name} {call}", file=sys.stderr)
                    for call in size.always:
                        plan = Plan(
                            Action.FAIL, classes, str(harness.written(stage)), skip=call, period=1, error=number
                        )
                        always += refuse_once(harness, tracer, stage, plan, seed, reference=reference)
    finally:
        harness.close()
    return {"once": once, "always": always}

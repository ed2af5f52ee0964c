"""What a site's provider was told: its own log of calls beside the one that the transcript has, job by job.

Both logs are written by the same scripts, as `TIME OPERATION start|end rc=N ARGUMENTS` (Lua) or `TIME start ARGUMENTS`
and `TIME end rc=N FUNCTION TOKEN` (dw_wlm_cli). Of each job, and of each persistent buffer by its name, the calls must
be the same ones in the same order, with the same arguments: the operation, the pool, the size, whose it is, whether it
is hurried. A row of the kind `call` says what may differ. A call that failed and was made again is one call. The
validation of a submit is made before there is a job, and compared with its answer.
"""

import os
import pwd
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.conformance.replayer.compare import Outcome, Step
from tests.conformance.replayer.differences import Difference, Differences, Kind, Situation
from tests.conformance.replayer.run import Run
from tests.conformance.replayer.sightings import situation_at
from tests.conformance.replayer.transcript import Log, Transcript

LOGS: Final = ("calls.log", "dwcalls.log")
"""Logs of the providers lua and datawarp."""

_LINE: Final = re.compile(r"(\d\d):(\d\d):(\d\d(?:\.\d+)?) +(.*)")
_OF_NO_JOB: Final = frozenset(("process", "job_process", "pools", "get_status"))
_EXACT, _DECLARED, _WRONG = 0, 1, 1_000
_DAY_S: Final = 86_400.0


class Call(msgspec.Struct):
    """One call: about which job (its number) or persistent buffer (its name), and what was said."""

    line: int
    at_s: float
    """Seconds of the day."""
    about: str
    text: str
    """The operation and its arguments, without what differs from machine to machine."""
    code: int | None = None
    """What it ended with; None if it did not."""
    late: bool = False
    """Whether it came after the part of the transcript in which the job is seen: nobody wrote such calls down."""

    after_gap: bool = False
    """Whether the log begins in the middle of the job: what was said of it before nobody wrote down."""


Named = Callable[[str, str, str], str]
"""How a user or group id is named: of what (`uid` or `gid`), the number, about which job."""


def read_calls(lines: Iterable[tuple[int, str]], named: Named) -> list[Call]:
    """Return the calls of a log that are about jobs or persistent buffers, in the order in which they began."""
    found: list[Call] = []
    for number, line in lines:
        stamp = _LINE.fullmatch(line.strip())
        words = stamp[4].split() if stamp is not None else []
        if stamp is None or len(words) < 2:
            continue
        at_s = int(stamp[1]) * 3600 + int(stamp[2]) * 60 + float(stamp[3])
        if words[0] in ("start", "end"):
            _take_command(found, number, at_s, words, named)
        else:
            _take_function(found, number, at_s, words, named)
    for about in {call.about for call in found}:
        of_it = [call for call in found if call.about == about]
        if not of_it[0].text and len(of_it) > 1:
            of_it[1].after_gap = True
    return [call for call in found if call.text]


def _take_function(found: list[Call], number: int, at_s: float, words: list[str], named: Named) -> None:
    """Take a line of the Lua script: `OPERATION start JOB …`, `OPERATION end rc=N … JOB …`."""
    operation, what, rest = words[0], words[1], words[2:]
    if operation in _OF_NO_JOB:
        return
    if what == "start" and rest:
        if operation == "setup" and len(rest) > 2:
            rest[1:3] = [named("uid", rest[1], rest[0]), named("gid", rest[2], rest[0])]
        said = ["JOB", *(_placeless(word) for word in rest[1:])]
        found.append(Call(number, at_s, rest[0], " ".join((operation, *said))))
    elif what == "end":
        codes = [word for word in rest if re.fullmatch(r"rc=-?\d+", word)]
        about = next((word for word in rest if word.isdigit()), "")
        _end(found, operation, about, int(codes[0][3:]) if codes else 0)


def _take_command(found: list[Call], number: int, at_s: float, words: list[str], named: Named) -> None:
    """Take a line of dw_wlm_cli: `start --function F --token JOB …`, `end rc=N F JOB`."""
    if words[0] == "end":
        if len(words) == 4 and words[1].startswith("rc="):
            _end(found, words[2], words[3], int(words[1][3:]))
        return
    function = words[words.index("--function") + 1] if "--function" in words[:-1] else ""
    about = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in ("--token", "-t")), "")
    if function in _OF_NO_JOB or not about:
        return
    said, before = [], ""
    for word in words[1:]:
        if before in ("--user", "-u", "--groupid"):
            word = named("gid" if before == "--groupid" else "uid", word, about)
        elif before in ("--token", "-t") and about.isdigit():
            word = "JOB"
        said.append(_placeless(word))
        before = word
    found.append(Call(number, at_s, about, f"{function} {' '.join(said)}"))


def _placeless(word: str) -> str:
    return "PATH" if word.startswith(("/", "$")) else word


def _end(found: list[Call], operation: str, about: str, code: int) -> None:
    """Note how the last such call that is under way ended; a call without text where none is."""
    for call in reversed(found):
        if call.about == about and call.text and call.text.split()[0] == operation and call.code is None:
            call.code = code
            return
    found.append(Call(0, 0.0, about, "", code))


def without_repeats(calls: Sequence[Call]) -> list[Call]:
    """Return the calls without those that were made again because they had failed."""
    found: list[Call] = []
    for call in calls:
        if found and found[-1].text == call.text and found[-1].code:
            found[-1] = call
        else:
            found.append(call)
    return found


def compare_calls(
    seen: Sequence[Call], made: Sequence[Call], differences: Differences, where: Situation, *, whole: bool
) -> list[Step]:
    """Lay the calls of one job beside each other, in order; `whole`: whether Slurm's log has all of them."""
    rows, columns = len(seen), len(made)
    begun = not (seen and seen[0].after_gap)

    def unwritten(i: int, j: int) -> bool:
        """Whether Slurm may have made the call too, where its log does not reach: before its first line, or behind."""
        return (i == rows and not whole) or (i == 0 and not begun) or made[j - 1].late

    def lone(slurm: str, forebay: str) -> tuple[int, Difference | None]:
        row = differences.find(Kind.CALL, where, slurm, forebay)
        return (_WRONG if row is None else _DECLARED), row

    def pair(i: int, j: int) -> tuple[int, Difference | None]:
        if seen[i].text == made[j].text:
            return _EXACT, None
        cost, row = lone(seen[i].text, made[j].text)
        return (cost if row is not None else 2 * _WRONG - 1), row

    best: list[list[tuple[int, str]]] = [[(0, "")] * (columns + 1) for _ in range(rows + 1)]
    for i in range(rows + 1):
        for j in range(columns + 1):
            ways: list[tuple[int, str]] = []
            if i and j:
                ways.append((best[i - 1][j - 1][0] + pair(i - 1, j - 1)[0], "both"))
            if i:
                ways.append((best[i - 1][j][0] + lone(seen[i - 1].text, "")[0], "seen"))
            if j:
                cost = 0 if unwritten(i, j) else lone("", made[j - 1].text)[0]
                ways.append((best[i][j - 1][0] + cost, "made"))
            if ways:
                best[i][j] = min(ways, key=lambda way: way[0])
    steps: list[Step] = []
    i, j = rows, columns
    while i or j:
        way = best[i][j][1]
        expected, got = seen[i - 1].text if way != "made" else "", made[j - 1].text if way != "seen" else ""
        line = seen[i - 1].line if i else (seen[0].line if seen else 0)
        if way == "both" and expected == got:
            steps.append(Step(Outcome.MATCHED, line, expected, got))
        elif way == "made" and unwritten(i, j):
            steps.append(Step(Outcome.ASIDE, line, "", got))
        else:
            row = differences.find(Kind.CALL, where, expected, got)
            steps.append(Step(Outcome.FAILED if row is None else Outcome.DECLARED, line, expected, got, row))
        i, j = i - (way in ("both", "seen")), j - (way in ("both", "made"))
    steps.reverse()
    return steps


def recorded_calls(transcript: Transcript) -> list[Call]:
    """Return the calls that the transcript's logs have."""
    users: dict[str, str] = {}
    owners = {str(act.submitted): act.user for act in transcript.acts if act.submitted is not None}
    lines: list[tuple[int, str]] = []
    for item in transcript.items:
        for text in getattr(item, "output", getattr(item, "lines", ())):
            users |= {number: name for name, number in re.findall(r"UserID=(\w+)\((\d+)\)", text)}
        if isinstance(item, Log) and item.name in LOGS:
            lines += [(item.line + offset, text) for offset, text in enumerate(item.lines, start=1)]

    def named(what: str, number: str, about: str) -> str:
        if what == "gid":
            return "gid"
        # Who has no buffer in any listing is whoever submitted the first job that has his number.
        return f"uid({users.setdefault(number, owners[about]) if about in owners else users.get(number, number)})"

    return read_calls(lines, named)


def compare_told(run: Run) -> None:
    """Compare what the provider of this run was told with what the transcript's was, where it wrote that down."""
    seen = recorded_calls(run.transcript)
    by_about: dict[str, list[Call]] = defaultdict(list)
    for call in seen:
        by_about[run.sightings.names.get(call.about, call.about)].append(call)
    made: dict[str, list[Call]] = defaultdict(list)
    for call in _made(run):
        made[call.about].append(call)
    for about, calls in by_about.items():
        number = run.number(about)
        if number is None and about[0].isdigit():
            if about.partition("_")[0] not in run.refused:
                run.note(Step(Outcome.FAILED, calls[0].line, calls[0].text, "", note=f"job {about} is not there"))
            continue
        mine = made.get(about if number is None else str(number), [])
        cut = run.cuts.get(about)
        for call in mine:
            call.late = cut is not None and not _before(call.at_s, cut)
        sightings = run.sightings.seen.get(about, [])
        # The log of a part has its jobs up to there, and not what becomes of them later.
        whole = any(one.buffer == "complete" and one.line < calls[-1].line for one in sightings)
        where = situation_at(run.sightings, about, calls[-1].line, Situation(run.setting.provider))
        where = msgspec.structs.replace(where, after=sightings[-1].text if sightings else "")
        for step in compare_calls(without_repeats(calls), without_repeats(mine), run.differences, where, whole=whole):
            run.note(msgspec.structs.replace(step, note=f"what the provider is told of {about}"))


def _made(run: Run) -> list[Call]:
    """Return the calls that this run's provider wrote down."""

    def named(what: str, number: str, about: str) -> str:
        job = run.mirror.state.jobs.get(int(about)) if about.isdigit() else None
        user = _owner(run, about) if job is None else job.request.user
        uid, gid = _ids(user)
        if what == "uid":
            return f"uid({user})" if int(number) == uid and user else f"uid({number})"
        return "gid" if int(number) == gid else f"gid({number})"

    lines: list[tuple[int, str]] = []
    for name in LOGS:
        path = Path(run.cluster.run) / "log" / name
        if path.exists():
            lines += list(enumerate(path.read_text(errors="replace").splitlines(), start=1))
    return read_calls(lines, named)


def _owner(run: Run, name: str) -> str:
    """Return whose a persistent buffer is or was."""
    for moment in reversed(run.mirror.moments):
        if (buffer := moment.state.persistent.get(name)) is not None:
            return buffer.user
    return ""


def _ids(user: str) -> tuple[int, int]:
    """Return what a provider is told of a user: his ids here, or those of this process where nobody is called so."""
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        return os.geteuid(), os.getegid()
    return found.pw_uid, found.pw_gid


def _before(at_s: float, cut: float) -> bool:
    """Say whether a second of the day is before a moment of the wall clock, less than half a day away."""
    then = time.localtime(cut)
    cut_s = then.tm_hour * 3600 + then.tm_min * 60 + then.tm_sec + cut % 1
    return (cut_s - at_s) % _DAY_S < _DAY_S / 2

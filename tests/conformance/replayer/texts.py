"""Answers and listings made comparable: times, numbers and places normalised, then compared line by line. Pure."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from tests.conformance.replayer.compare import Outcome, Step
from tests.conformance.replayer.differences import Differences, Kind, Situation

_TIME: Final = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:Z|[+-]\d\d:?\d\d)?")
_USER: Final = re.compile(r"UserID=([\w.-]+)\(\d+\)")
_PROGRAM: Final = re.compile(r"(GetSysState|GetSysStatus)=\S*/([^/\s]+)")
_JOB: Final = re.compile(r"\bJobID=(\d+)(_\d+)?(?:\((\d+)\))?")
_BURST_LINE: Final = re.compile(
    r"Name=\S+ DefaultPool=.*| {2}PoolName\[\d+\]=.*| {2}Flags=.*| {2}StageInTimeout=.*| {2}PollInterval=.*"
    r"| {2}GetSysStat\w+=.*| {2}Allocated Buffers:| +(?:JobID|Name)=\S+ CreateTime=.*| {2}Per User Buffer Use:"
    r"| +UserID=\S+ Used=.*"
)
_BUFFER: Final = re.compile(r" +JobID=(\d+(?:_\d+)?)")
_SUM: Final = re.compile(r" +UserID=\S+ Used=|.*\bFreeSpace=")
_NOISE: Final = re.compile(r"(?:srun|salloc): (?!error)")
_PREFIX: Final = re.compile(
    r"(?:sbatch|srun|salloc|scancel|scontrol): (?:error: )?(?:Batch job submission failed: |"
    r"Unable to allocate resources: )?"
)


def is_burst_line(line: str) -> bool:
    """Say whether a line is one of `show burst`."""
    return _BURST_LINE.fullmatch(line) is not None


def normal_line(line: str, numbers: Mapping[str, str] = {}) -> str:
    """Return a line of `show burst` without times, user numbers and places, jobs numbered as in the transcript."""

    def job(found: re.Match[str]) -> str:
        if found[2] is None:
            return f"JobID={numbers.get(found[1], found[1])}"
        # A task of an array: the array's number is what the transcript calls it, the task's own is anybody's.
        return f"JobID={numbers.get(found[1], found[1]).partition('_')[0]}{found[2]}"

    line = _TIME.sub("TIME", line.rstrip())
    line = _USER.sub(r"UserID=\1(N)", line)
    line = _PROGRAM.sub(r"\1=…/\2", line)
    return _JOB.sub(job, line)


def compare_texts(
    line: int,
    expected: Sequence[str],
    variants: Sequence[Sequence[str]],
    where: Callable[[str], Situation],
    differences: Differences,
    *,
    refused: frozenset[str] = frozenset(),
    kept: Callable[[int], frozenset[str]] = lambda _: frozenset(),
) -> list[Step]:
    """Compare what Slurm printed with all that Forebay would have printed in the time; return the steps of the best.

    `where` tells the situation that a line is about. `refused` are jobs that Forebay refused by a declared difference,
    `kept(variant)` those whose buffers it has and Slurm forgot by one: their lines, and the sums that they are part of,
    are not compared.
    """
    best: list[Step] | None = None
    for number, variant in enumerate(variants or [()]):
        gone = refused | kept(number)
        steps = _compare_lines(line, list(expected), list(variant), where, differences, gone)
        if best is None or _cost(steps) < _cost(best):
            best = steps
        if _cost(best) == 0:
            break
    return best or []


def _cost(steps: Sequence[Step]) -> int:
    return sum({Outcome.FAILED: 1_000, Outcome.DECLARED: 1}.get(step.outcome, 0) for step in steps)


def _compare_lines(
    line: int,
    expected: list[str],
    got: list[str],
    where: Callable[[str], Situation],
    differences: Differences,
    refused: frozenset[str],
) -> list[Step]:
    gone = [one for one in (*expected, *got) if (found := _BUFFER.match(one)) and found[1] in refused]
    if gone:
        expected = [one for one in expected if one not in gone and not _SUM.match(one)]
        got = [one for one in got if one not in gone and not _SUM.match(one)]
        if not any(_BUFFER.match(one) for one in (*expected, *got)):
            headings = ("  Allocated Buffers:", "  Per User Buffer Use:")
            expected = [one for one in expected if one not in headings]
            got = [one for one in got if one not in headings]
    steps: list[Step] = []
    rows, columns = len(expected), len(got)
    cost = [[0] * (columns + 1) for _ in range(rows + 1)]
    outcomes: dict[tuple[int, int, str], Step] = {}

    def step(i: int, j: int, way: str) -> Step:
        key = (i, j, way)
        if key not in outcomes:
            one = expected[i - 1] if way != "got" else ""
            other = got[j - 1] if way != "expected" else ""
            if one == other:
                outcomes[key] = Step(Outcome.MATCHED, line, one, other)
            else:
                row = differences.find(Kind.LINE, where(one or other), one, other)
                outcomes[key] = Step(Outcome.FAILED if row is None else Outcome.DECLARED, line, one, other, row)
        return outcomes[key]

    choice: dict[tuple[int, int], str] = {}
    for i in range(rows + 1):
        for j in range(columns + 1):
            if i == j == 0:
                continue
            ways: list[tuple[int, str]] = []
            if i and j:
                ways.append((cost[i - 1][j - 1] + _cost([step(i, j, "both")]), "both"))
            if i:
                ways.append((cost[i - 1][j] + _cost([step(i, j, "expected")]), "expected"))
            if j:
                ways.append((cost[i][j - 1] + _cost([step(i, j, "got")]), "got"))
            cost[i][j], choice[i, j] = min(ways, key=lambda way: way[0])
    i, j = rows, columns
    while i or j:
        way = choice[i, j]
        steps.append(step(i, j, way))
        i, j = i - (way != "got"), j - (way != "expected")
    steps.reverse()
    return steps


def answer_lines(output: Sequence[str]) -> list[str]:
    """Return what Slurm answered without the names of its programs and without what it says of its own progress."""
    return [_PREFIX.sub("", line).rstrip() for line in output if not _NOISE.match(line) and line.strip()]


def says(expected: str, got: Sequence[str]) -> bool:
    """Say whether Forebay's answer has the sentence: a line of its own, or what a line ends with after its place."""
    return any(line == expected or line.endswith(f": {expected}") for line in got)

"""Listings and lives, compared when a run is over: what Slurm printed with what Forebay would have printed then."""

import contextlib
import re
import shutil
import subprocess
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import Final

import msgspec

from tests.conformance.replayer.burst import burst_text, squeue_text
from tests.conformance.replayer.compare import Outcome, Seen, Step, compare_sequences
from tests.conformance.replayer.differences import Kind, Situation
from tests.conformance.replayer.run import Run, Window
from tests.conformance.replayer.sightings import done_before, situation_at
from tests.conformance.replayer.texts import compare_texts, is_burst_line, normal_line
from tests.conformance.replayer.transcript import Act, Remark
from tests.conformance.replayer.words import Parsed, parse_command, split_commands, split_filters, split_pipeline

VARIANTS_MAX: Final = 2_000
"""Moments at which a listing is tried, count."""


def watch_listing(run: Run, act: Act, command: str, parsed: Parsed) -> None:
    """Keep what `show burst` printed, to be compared at the end."""
    expected = [line for line in act.output if is_burst_line(line)]
    if parsed.option("o") is not None:
        expected = list(act.output)
    run.watch(act, command, expected)


def watch_remark(run: Run, remark: Remark) -> None:
    """Keep the lines of a listing that the recorder remarked."""
    lines = [re.sub("^ +(?=JobID)", "    ", line) for line in remark.lines if is_burst_line(line)]
    for line in lines:
        job = re.search(r"JobID=(\d+)", line)
        if job is not None and job[1] not in run.refused:
            run.watch(remark, f"scontrol show burst | grep JobID={run.numbers.get(job[1])}", [line])


def compare(run: Run) -> None:
    """Compare everything that has to be compared over the whole run: listings, and each job's sequence."""
    numbers = {str(number): job for job, number in run.numbers.items()}
    for window in run.windows:
        _compare_window(run, window, numbers)
    for job, seen in run.sightings.seen.items():
        _compare_job(run, job, seen)
    _compare_order(run)


def _compare_window(run: Run, window: Window, numbers: dict[str, str]) -> None:
    after = done_before(run.sightings, window.item.line)
    where = Situation(run.setting.provider, "show", window.command, after=after)
    expected = [normal_line(line) for line in window.expected]
    if is_counted(window.command):
        expected = _counted(window.command, expected)
    found = list(_variants(run, window, numbers))

    def about(line: str) -> Situation:
        job = re.match(r" +JobID=(\d+(?:_\d+)?)", line)
        return where if job is None else situation_at(run.sightings, job[1], window.item.line, where)

    def kept(number: int) -> frozenset[str]:
        return found[number][1] if found else frozenset()

    steps = compare_texts(
        window.item.line,
        expected,
        [lines for lines, _ in found],
        about,
        run.differences,
        refused=frozenset(run.refused),
        kept=kept,
    )
    run.steps += [msgspec.structs.replace(step, note=f"$ {window.command}") for step in steps]


def _variants(run: Run, window: Window, numbers: dict[str, str]) -> Iterable[tuple[list[str], frozenset[str]]]:
    """Make what the command would have printed after each event of the time, each text once, and whose buffers are
    in it that Slurm had forgotten.
    """
    forgotten = _forgotten(run, window.item.at_s)
    known: set[str] = set()
    commands = [split_pipeline(one) for one in split_commands(window.command)]
    parsed = [(parse_command(head), filters) for head, filters in commands]
    recorded = run.mirror.moments
    times = [moment.at_s for moment in recorded]
    first, last = bisect_left(times, window.first_s), bisect_right(times, window.last_s or times[-1])
    for moment in recorded[max(0, first - 1) : last][-VARIANTS_MAX:]:
        texts = []
        for line, filters in parsed:
            if line.words[:1] == ("show",) and "".join(line.words[1:2]).startswith("burst"):
                texts.append(
                    (burst_text(moment.state, oneliner=line.option("o") is not None, polls=run.setting.polls), filters)
                )
            elif line.program == "squeue" and (listing := squeue_text(moment.state, line)) is not None:
                texts.append((listing, filters))
        if "".join(text for text, _ in texts) in known:
            continue
        known.add("".join(text for text, _ in texts))
        lines = [line for text, filters in texts for line in _filtered(text, filters) if line.strip()]
        kept = {
            job
            for job in forgotten
            if (buffer := moment.state.buffers.get(run.numbers[job])) is not None
            and buffer.state.word not in ("pending", "complete")
        }
        yield [normal_line(one, numbers) for one in lines], frozenset(kept)


def _forgotten(run: Run, at_s: float) -> list[str]:
    """Return the jobs whose buffers Slurm had given up by then, by a row that says so."""
    return [
        job
        for job, seen in run.sightings.seen.items()
        if job in run.numbers
        for one in seen
        if one.at_s <= at_s and one.buffer == "complete"
        if run.differences.find(Kind.MISSING, one.where, one.text, "", lasted_s=one.lasted_s) is not None
    ]


def _compare_job(run: Run, job: str, seen: list[Seen]) -> None:
    number = run.number(job)
    if number is None:
        if job.partition("_")[0] not in run.refused:
            run.note(Step(Outcome.FAILED, seen[0].line, seen[0].text, "", note=f"job {job} is not there"))
        return
    shown = list(run.mirror.shown.get(number, []))
    cut = run.cuts.get(job)
    if cut is not None:
        shown = [
            msgspec.structs.replace(one, lasted_s=min(one.lasted_s, cut - one.at_s)) for one in shown if one.at_s < cut
        ]
    for step in compare_sequences(seen, shown, run.differences, transient_s=run.setting.transient_s):
        run.note(msgspec.structs.replace(step, note=f"job {job} {step.note}".strip()))


def _compare_order(run: Run) -> None:
    wanted = [run.numbers[job] for job in run.sightings.order if job in run.numbers]
    if not wanted:
        return
    got = [number for number in run.mirror.setups if number in wanted]
    outcome = Outcome.MATCHED if got == wanted else Outcome.FAILED
    run.note(Step(outcome, 0, f"space reserved in the order {wanted}", str(got)))


def is_counted(command: str) -> bool:
    """Say whether a command counts lines of listings."""
    return any(word in command for word in ("uniq -c", "grep -c"))


def _counted(command: str, expected: list[str]) -> list[str]:
    """Return the lines of an answer that the parts of the command gave which can be counted here, too."""
    commands = split_commands(command)
    if all(re.search(r"grep -c|wc -l", one) for one in commands):
        return [line for one, line in zip(commands, expected, strict=False) if "-t all" not in one]
    # What is not counted, such as a last `squeue | head`, is no part of it.
    return [line for line in expected if re.fullmatch(r" *\d+( \w+)?", line)]


def _filtered(text: str, filters: str) -> list[str]:
    """Run what stood behind the first `|` over a listing: only filters, which read nothing but their input."""
    if not filters:
        return text.splitlines()
    for one in split_filters(filters):
        if not re.match(r"\s*(grep|head|tail|sort|uniq|wc)\b", one):
            return text.splitlines()
    shell = shutil.which("bash") or "/bin/sh"
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run([shell, "-c", filters], input=text, capture_output=True, text=True, timeout=10)
        return done.stdout.splitlines()
    return text.splitlines()

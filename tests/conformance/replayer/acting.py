"""Types one command of a transcript at Forebay, and compares the answers."""

import asyncio
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from tests.conformance.replayer.commands import administering, controlling, steering, submission
from tests.conformance.replayer.compare import Outcome, Step
from tests.conformance.replayer.differences import Kind, Situation
from tests.conformance.replayer.listings import is_counted, watch_listing
from tests.conformance.replayer.reservations import NOUN, named, reserved_in
from tests.conformance.replayer.run import PATIENCE_S, PERIOD_S, Run
from tests.conformance.replayer.sightings import act_name
from tests.conformance.replayer.texts import answer_lines, is_burst_line, says
from tests.conformance.replayer.transcript import Act
from tests.conformance.replayer.words import (
    NoSuchCommand,
    Parsed,
    directives,
    jobs_named,
    parse_command,
    split_commands,
    split_pipeline,
)

_LOOKS: Final = frozenset(("true", "cat", "sleep", "sinfo", "date", "sprio", "sdiag", "squeue"))
_SHOWN: Final = re.compile(r"jobs?|jobid|node|nodes|config|partition|partitions|job=\d+|jobid=\d+", re.IGNORECASE)
"""What `scontrol show` shows without it being compared as a text: what it tells of jobs is compared as sightings."""

STATUS_S: Final = 20.0
"""Seconds that the site's own status program may take when it is asked directly."""


async def perform(run: Run, act: Act) -> None:
    """Do what was typed; what cannot be done is noted, with its line."""
    if is_counted(act.command):
        run.watch(act, act.command, list(act.output))
        return
    if (signal_number := controlling(act.command)) is not None:
        run.new_window()
        await (run.cluster.start_replicas() if signal_number == 0 else run.cluster.end_replicas(signal_number))
        run.matches(act.line, act.command, "started" if signal_number == 0 else f"ended with signal {signal_number}")
        return
    for command in split_commands(act.command):
        head, _ = split_pipeline(command)
        try:
            parsed = parse_command(head)
            await _perform_one(run, act, command, parsed)
        except (NoSuchCommand, ValueError) as error:
            _unseen(run, act, command, str(error))


async def _perform_one(run: Run, act: Act, command: str, parsed: Parsed) -> None:
    verb, what = parsed.words[:1], parsed.words[1] if len(parsed.words) > 1 else ""
    if parsed.program in ("sbatch", "srun", "salloc"):
        await _submit(run, act, parsed)
    elif act_name(parsed) is not None and not _of_no_job(parsed):
        await _steer(run, act, parsed)
    elif parsed.program in _LOOKS:
        _compare_file(run, act, parsed)
    elif parsed.program == "scontrol" and verb == ("show",) and what.startswith("burst"):
        watch_listing(run, act, command, parsed)
    elif parsed.program == "scontrol" and verb == ("show",) and what in ("bbstat", "dwstat"):
        await _status(run, act, parsed)
    elif parsed.program == "scontrol" and verb == ("show",) and NOUN.fullmatch(what.partition("=")[0]):
        await _reservations(run, act, parsed)
    elif parsed.program == "scontrol" and verb == ("show",) and _SHOWN.fullmatch(what):
        pass
    elif parsed.program == "scontrol" and verb in (("reconfigure",), ("reconfig",)):
        # What the site's files say is applied again: nothing may come of it.
        await _typed(run, act, [["config", "apply", str(run.cluster.run / "burst_buffer.conf")]])
    elif parsed.program == "scontrol":
        await _administer(run, act, parsed)
    elif parsed.program == "sacctmgr":
        await _typed(run, act, run.accounting.typed(parsed))
    else:
        raise NoSuchCommand("this command cannot be repeated")


def _of_no_job(parsed: Parsed) -> bool:
    """Say whether scontrol updates something else than a job."""
    return parsed.words[:1] == ("update",) and not jobs_named(parsed)


async def _administer(run: Run, act: Act, parsed: Parsed) -> None:
    words = administering(act, parsed, datetime.now(UTC))
    about = words[3] if words[:2] == ["policy", "reservation"] else ""
    if about in run.unreserved and words[2] == "delete":
        return  # it was rejected, which was counted there
    if not await _typed(run, act, [words]) and words[1:3] == ["reservation", "set"]:
        run.unreserved.add(about)


async def _reservations(run: Run, act: Act, parsed: Parsed) -> None:
    """Compare the reservations that both list: names, states, who may use them, and what they set aside."""
    name = named(parsed)
    if name in run.unreserved:
        return
    answer = await run.cluster.forebay("policy", "reservation", "list", user=_typing(act))
    found = reserved_in(answer.out.splitlines())
    got = [one.text for one in found if name in ("", one.name)]
    expected = [one.text for one in reserved_in(act.output) if one.name not in run.unreserved]
    if got == expected:
        run.matches(act.line, " / ".join(expected) or "none", " / ".join(got) or "none")
        return
    where = Situation(run.setting.provider, "show", act.command)
    run.differs(Kind.ANSWER, where, act.line, " / ".join(expected), " / ".join(got), f"$ {act.command}")


async def _typed(run: Run, act: Act, commands: list[list[str]]) -> bool:
    """Type the commands that do the same, and compare whether it succeeded; nothing where there are none. Return
    whether it did for both.
    """
    if not commands:
        return True
    run.new_window()
    answers = [await run.cluster.forebay(*words, user=_typing(act)) for words in commands]
    got = " / ".join(line for answer in answers for line in (answer.out + answer.err).splitlines() if line.strip())
    if all(answer.code == 0 for answer in answers) == (act.exit_code == 0):
        run.matches(act.line, " / ".join(act.output) or "done", got)
        return True
    where = Situation(run.setting.provider, "administer", act.command)
    run.differs(Kind.ANSWER, where, act.line, " / ".join(act.output) or "done", got, f"$ {act.command}")
    return False


def _typing(act: Act) -> str:
    """Return who types: root administers Slurm; here operators do."""
    return "operator" if act.user in ("", "root") else act.user


def _unseen(run: Run, act: Act, command: str, why: str) -> None:
    where = Situation(run.setting.provider, "", command)
    if act.submitted is not None:
        run.refused.add(str(act.submitted))
    run.differs(Kind.UNSEEN, where, act.line, command, "", why)


async def _submit(run: Run, act: Act, parsed: Parsed) -> None:
    request = " / ".join(filter(None, (parsed.option("bb") or "", directives(act.script or ""))))
    where = Situation(run.setting.provider, "submit", act.command, request)
    files = {name for name, _ in run.setting.files}
    unknown = [name for name in re.findall(r"\$HERE/[^\s;]+", act.command) if name not in files]
    row = run.differences.find(Kind.UNSEEN, where, act.command, "") if unknown else None
    if row is not None:
        if act.submitted is not None:
            run.refused.add(str(act.submitted))
        run.note(Step(Outcome.DECLARED, act.line, act.command, "", row))
        return
    words, text = submission(act, parsed, run)
    run.new_window()
    by = act.user or "operator"
    if by != "operator" and any(word.startswith("--priority=") for word in words):
        # What an operator of Slurm made of it is given at submit here, by an operator too.
        words, by = [*words, f"--uid={by}"], "operator"
    answer = await run.cluster.forebay(*words, user=by, text=text)
    found = re.search(r"Submitted batch job (\d+)", answer.out)
    slurm_number = run.setting.number_of(act)
    # What runs at once says no number when it is done.
    accepted = slurm_number is not None or (parsed.program != "sbatch" and act.exit_code == 0)
    if found is not None and accepted:
        if slurm_number is not None:
            run.numbers[slurm_number] = int(found[1])
        run.matches(act.line, f"job {slurm_number}", f"job {found[1]}")
        if parsed.program != "sbatch":
            await _ended(run, int(found[1]))
            _compare_said(run, act, where)
        return
    expected = answer_lines(act.output) if not accepted or parsed.program == "sbatch" else []
    got = [line for line in (answer.out + answer.err).splitlines() if line.strip()]
    joined_expected, joined_got = " / ".join(expected), " / ".join(got)
    if not accepted and found is None and expected and says(expected[-1], got[-1:]):
        if all(says(line, got) for line in expected):
            run.matches(act.line, joined_expected, joined_got)
            return
    if slurm_number is not None:
        # Whether a row declares that or not: what is not there cannot be compared, and one failure says it once.
        run.refused.add(slurm_number)
    run.differs(Kind.ANSWER, where, act.line, joined_expected, joined_got, f"$ {act.command}  {request}")


async def _ended(run: Run, number: int) -> None:
    """Wait until an interactive job has ended: its command returns only then."""
    deadline = time.monotonic() + 4 * PATIENCE_S
    while time.monotonic() < deadline:
        run.mirror.poll()
        job = run.mirror.state.jobs.get(number)
        if job is not None and job.state.name not in ("PENDING", "CONFIGURING", "RUNNING"):
            return
        await asyncio.sleep(PERIOD_S)


def _compare_said(run: Run, act: Act, where: Situation) -> None:
    path = run.cluster.work / f"interactive.{act.line}"
    slurm = run.setting.number_of(act) or ""
    expected = [line for line in answer_lines(act.output) if not is_burst_line(line)]
    for line in expected:
        if re.fullmatch(r"\s*BurstBuffer(State)?=.*|vm|\S*hostname\S*", line):
            continue  # what a listing inside of the job said, or the name of the machine
        _compare_line(run, act, where, line, path, slurm)


def _compare_line(run: Run, act: Act, where: Situation, line: str, path: Path, slurm: str) -> None:
    """Compare a line with those of a file that a job wrote, in which the job has Forebay's number."""
    number = str(run.numbers.get(slurm, ""))
    got = path.read_text(errors="replace").splitlines() if path.exists() else []
    if any(line == one or line == re.sub(rf"(?<=/){number}(?=\b|_)", slurm, one) for one in got):
        run.matches(act.line, line, " / ".join(got))
        return
    run.differs(Kind.LINE, where, act.line, line, "", f"$ {act.command}: the file has {' / '.join(got) or 'nothing'}")


def _compare_file(run: Run, act: Act, parsed: Parsed) -> None:
    """Compare a file that a job wrote, as `cat` showed it; other harmless commands show nothing to compare."""
    if parsed.program != "cat":
        return
    for word in parsed.words:
        job = word.rpartition(".")[2]
        number = run.number(job)
        if number is None:
            continue
        path = Path(run.setting.local(word, run.cluster.work).removesuffix(job) + str(number))
        for line in [line for line in act.output if re.match(r"[A-Z_0-9]+=", line)]:
            _compare_line(run, act, Situation(run.setting.provider, "show", act.command), line, path, job)


async def _steer(run: Run, act: Act, parsed: Parsed) -> None:
    name = act_name(parsed)
    assert name is not None
    targets = jobs_named(parsed)
    where = Situation(run.setting.provider, name, act.command)
    row = run.differences.find(Kind.UNSEEN, where, act.command, "")
    if row is not None:
        run.note(Step(Outcome.DECLARED, act.line, act.command, "", row))
        return
    known = [job for job in targets if run.number(job) is not None]
    if targets and not known and all(job.partition("_")[0] in run.refused for job in targets):
        return  # the job was refused, which was counted there
    commands = steering(act, parsed, name, run)
    run.new_window()
    answers = [await run.cluster.forebay(*words, user=_typing(act)) for words in commands]
    code = max((answer.code for answer in answers), default=1 if targets else 0)
    got = " / ".join(line for answer in answers for line in (answer.out + answer.err).splitlines() if line.strip())
    expected = " / ".join(answer_lines(act.output))
    if (code == 0) == (act.exit_code == 0) and (code == 0 or says(expected, got.split(" / "))):
        run.matches(act.line, expected or "done", got)
        return
    run.differs(Kind.ANSWER, where, act.line, expected or "done", got, f"$ {act.command}")


async def _status(run: Run, act: Act, parsed: Parsed) -> None:
    """Compare what the site's status says; if the recorder's site had another program, with what this one says."""
    answer = await run.cluster.forebay("slurm", "bbstat", *parsed.words[2:], user=act.user or "operator")
    got = [line.rstrip() for line in (answer.out + answer.err).splitlines() if line.strip()]
    expected = [line.rstrip() for line in act.output if line.strip()]
    if got == expected or (len(expected) == 1 and says(expected[0], got)):
        run.matches(act.line, " / ".join(expected), " / ".join(got))
        return
    where = Situation(run.setting.provider, "show", act.command)
    if got == await _site_says(run, parsed.words[2:]):
        where = Situation(run.setting.provider, "show", act.command, fact="the site's own program says the same")
    run.differs(Kind.ANSWER, where, act.line, " / ".join(expected), " / ".join(got), f"$ {act.command}")


async def _site_says(run: Run, words: tuple[str, ...]) -> list[str] | None:
    """Return what the site's status program prints when it is asked without Forebay, or None if there is none."""
    program = run.cluster.run / "bin" / "dwstat"
    if run.setting.provider != "datawarp" or not program.exists():
        return None
    asked = await asyncio.create_subprocess_exec(
        str(program), *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=run.cluster.environment | {"PATH": run.setting.path(run.cluster.run)},
    )  # fmt: skip
    said, _ = await asyncio.wait_for(asked.communicate(), STATUS_S)
    return [line.rstrip() for line in said.decode(errors="replace").splitlines() if line.strip()]

"""Slurm's command lines, taken apart: pure functions over what a transcript says was typed."""

import re
import shlex
from typing import Final

import msgspec

SHELL_SEPARATORS: Final = (";", "&&", "||")

_JOB: Final = re.compile(r"\d+(?:_\d+)?")
_TASKS: Final = re.compile(r"(\d+)_\[([\d,-]+)\]")
_LIST: Final = re.compile(r",(?![^\[]*\])")
_NAMING: Final = re.compile(r"(?:job|jobs|jobid)(?:=|$)", re.IGNORECASE)
TASKS_MAX: Final = 1_000
"""Tasks of an array that one word may name, count: what is more is no range that somebody typed."""

_OF_JOBS: Final = frozenset("ontJNdpAqMcDeitwbaLFxCmG")
_OF_JOBS_LONG: Final = frozenset(
    "account array bb bbf begin chdir comment constraint cpus-per-task deadline dependency error exclude export gid"
    " gres input job-name licenses mail-type mail-user mem mem-per-cpu nodefile nodelist nodes ntasks ntasks-per-node"
    " open-mode output partition priority qos reservation signal time time-min uid wckey wrap".split()
)
_TAKES_VALUE: Final = {
    "sbatch": _OF_JOBS,
    "srun": _OF_JOBS,
    "salloc": _OF_JOBS,
    "squeue": frozenset("uotjnSlApqwM"),
    "scancel": frozenset("utnspAqwMR"),
}
_TAKES_VALUE_LONG: Final = {
    "sbatch": _OF_JOBS_LONG,
    "srun": _OF_JOBS_LONG,
    "salloc": _OF_JOBS_LONG,
    "squeue": frozenset(("format", "job", "jobs", "states", "user", "name", "sort", "account", "partition", "qos")),
    "scancel": frozenset(
        (
            "user",
            "state",
            "name",
            "jobname",
            "account",
            "partition",
            "qos",
            "nodelist",
            "reservation",
            "signal",
            "wckey",
        )
    ),
}
"""Options that take the next word if they have no `=`, as getopt_long does."""

_DIRECTIVE: Final = re.compile(r"#(?:DW|BB|BB_[A-Z]+|BB_LUA\S*)(?:\s|$)")


class NoSuchCommand(Exception):
    """Forebay has no command for this; the message names the word, and is shown with file and line."""


class Parsed(msgspec.Struct, frozen=True):
    """One command of a pipeline: its program, its options in order, and its other words."""

    program: str
    options: tuple[tuple[str, str], ...]
    words: tuple[str, ...]
    line: str

    def option(self, *names: str) -> str | None:
        """Return the value of the last option of one of these names, or None; an option without value has ""."""
        values = [value for name, value in self.options if name in names]
        return values[-1] if values else None


def split_commands(line: str) -> list[str]:
    """Split what was typed at `;` outside quotes and substitutions."""
    found, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == ";" and not depth:
            found.append(line[start:position].strip())
            start = position + 1
    found.append(line[start:].strip())
    return [one for one in found if one]


def split_filters(filters: str) -> list[str]:
    """Split the filters behind a command at `|` outside quotes."""
    found: list[str] = []
    while filters:
        one, filters = split_pipeline(filters)
        found.append(one)
    return found


def split_pipeline(command: str) -> tuple[str, str]:
    """Split a command at its first `|` outside quotes: what is run, and the filters behind it."""
    quote, depth = "", 0
    for position, character in enumerate(command):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "|" and not depth:
            return command[:position].strip(), command[position + 1 :].strip()
    return command.strip(), ""


def parse_command(command: str) -> Parsed:
    """Take one command apart as getopt does; ValueError for quotes that do not end."""
    tokens = shlex.split(command)
    program = tokens[0] if tokens else ""
    options: list[tuple[str, str]] = []
    words: list[str] = []
    rest = tokens[1:]
    takes = _TAKES_VALUE.get(program, frozenset())
    while rest:
        token = rest.pop(0)
        if program in ("srun", "salloc", "sbatch") and words:
            words.append(token)
        elif token.startswith("--"):
            name, equals, value = token[2:].partition("=")
            if not equals and name in _TAKES_VALUE_LONG.get(program, ()) and rest:
                value = rest.pop(0)
            options.append((name, value))
        elif token.startswith("-") and len(token) > 1:
            letter, value = token[1], token[2:]
            if letter in takes and not value and rest:
                value = rest.pop(0)
            options.append((letter, value))
        else:
            words.append(token)
    return Parsed(program, tuple(options), tuple(words), command)


def jobs_named(parsed: Parsed) -> list[str]:
    """Return the jobs that scancel or scontrol names (`5,6`, `4_[1-3]`, `JobId=5`), in order: `5`, `4_2`.

    ValueError for a range that is none.
    """
    skipped = {"scancel": 0, "scontrol": 1}.get(parsed.program)
    if skipped is None:
        return []
    found: list[str] = []
    for word in parsed.words[skipped:]:
        named = _NAMING.match(word)
        if "=" in word and named is None:
            continue
        for job in _LIST.split(word[named.end() :] if named else word):
            tasks = _TASKS.fullmatch(job)
            if tasks is not None:
                found += [f"{tasks[1]}_{task}" for task in _numbers(tasks[2])]
            elif _JOB.fullmatch(job):
                found.append(job)
    return list(dict.fromkeys(found))


def _numbers(ranges: str) -> list[int]:
    """Return the numbers of `1-3,7`; ValueError for what is no range."""
    found: list[int] = []
    for one in ranges.split(","):
        first, dash, last = one.partition("-")
        numbers = range(int(first), int(last if dash else first) + 1)
        if len(numbers) > TASKS_MAX:
            raise ValueError(f"{one} names {len(numbers)} tasks; at most {TASKS_MAX} are read")
        found += numbers
    return found


def directives(script: str) -> str:
    """Return the burst-buffer lines at the top of a script, joined by ` / `."""
    found = []
    for line in script.splitlines():
        if line and not line.startswith("#"):
            break
        if _DIRECTIVE.match(line):
            found.append(line.rstrip())
    return " / ".join(found)

"""What a transcript implies of the cluster it was recorded on, and how its commands are typed at Forebay.

Pure, but for the work directory: the provider, pools, flags and timeouts are read from the first `show burst` of the
transcript, nodes and users from its commands.
"""

import json
import re
from pathlib import Path
from typing import Final

import msgspec

from tests.conformance.replayer.cluster import Pool
from tests.conformance.replayer.compare import TRANSIENT_S
from tests.conformance.replayer.transcript import Act, Sample, Transcript
from tests.conformance.replayer.words import directives, parse_command, split_commands, split_pipeline

NODES: Final = 4
NODE_CPUS: Final = 8
"""Nodes and CPUs of each that the recorder's cluster had (start.sh)."""

UNSET_PRIORITY: Final = 1_000_000
"""Priority of a job for which the transcript sets none, if it sets any: in Slurm those are larger than all others."""

SET_PRIORITY_MAX: Final = UNSET_PRIORITY - 1
"""Largest priority in a listing that somebody must have set."""

USERS: Final = ("bbu1", "bbu2")
"""Users of the recorder's cluster; others are found in its commands."""

_DEFAULT: Final = re.compile(r"Name=(\w+) DefaultPool=(\S+) Granularity=(\S+) TotalSpace=(\S+) .*")
_POOL: Final = re.compile(r" {2}PoolName\[\d+\]=(\S+) Granularity=(\S+) TotalSpace=(\S+) .*")
_KEY: Final = re.compile(
    r"(Flags|PollInterval|StageInTimeout|StageOutTimeout|ValidateTimeout|OtherTimeout|GetSysState|GetSysStatus)=(\S+)"
)
_OPERATION: Final = re.compile(r"(\d\d):(\d\d):(\d\d\.\d+) +(start|end) +(.*)")
_SLEEP_NOTED_S: Final = 0.5
"""Seconds from which on an operation in a log was made slow on purpose."""


class Scripts(msgspec.Struct, frozen=True):
    """The site's own scripts that the recorder's cluster ran."""

    lua: Path
    dw_wlm_cli: Path
    dwstat: Path
    pools: Path


class Setting(msgspec.Struct, frozen=True):
    """How to found the cluster, and how fast to go."""

    provider: str
    pools: tuple[Pool, ...]
    conf: tuple[tuple[str, str], ...]
    nodes: int
    cpus: int
    users: tuple[str, ...]
    files: tuple[tuple[str, str], ...] = ()
    """Files that commands name and that the transcript lets one infer: (path, text)."""
    priorities: tuple[tuple[str, int], ...] = ()
    """What an operator made of jobs' priorities: (number of the transcript, priority). Given at submit here."""
    slow: tuple[tuple[str, float], ...] = ()
    """Operations that the recorder made slow from outside of the scripts: (name, seconds)."""
    speed: float = 1.0
    transient_s: float = TRANSIENT_S
    polls: bool = False
    """Whether the release prints PollInterval (24.11 and newer)."""

    def path(self, run: Path) -> str:
        """Return the search path on which `sleep` is faster by `speed`, and `scontrol show burst` is Forebay's."""
        return f"{run / 'faster'}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

    def number_of(self, act: Act) -> str | None:
        """Return Slurm's number of the job that a command made, or None."""
        if act.submitted is not None:
            return str(act.submitted)
        for line in act.output:
            found = re.match(
                r"(?:srun: job|srun: Pending job allocation|salloc: Pending job allocation"
                r"|salloc: Granted job allocation) (\d+)",
                line,
            )
            if found is not None:
                return found[1]
        return None

    def local(self, text: str, work: Path) -> str:
        """Return a text with the recorder's directories replaced by this run's."""
        return re.sub(r"\$HERE/|(?<![\w.])/tmp/", f"{work}/", text)

    def script(self, text: str, work: Path) -> str:
        """Return a script with the recorder's directories replaced, but for its directives."""
        return "".join(
            line if line.startswith("#") else self.local(line, work) for line in text.splitlines(keepends=True)
        )


def setting_of(transcript: Transcript, *, speed: float = 1.0, transient_s: float = TRANSIENT_S) -> Setting:
    """Return what the transcript implies."""
    listing = next((act.output for act in transcript.acts if any(_DEFAULT.fullmatch(one) for one in act.output)), ())
    listing = listing if not any("-o show" in act.command and act.output == listing for act in transcript.acts) else ()
    provider = _provider(transcript, listing)
    return Setting(
        provider=provider,
        pools=_pools(listing),
        conf=_conf(transcript, listing),
        nodes=1 if _is_wide(transcript) else NODES,
        cpus=NODES * NODE_CPUS if _is_wide(transcript) else NODE_CPUS,
        files=_files(transcript),
        priorities=_priorities(transcript),
        users=tuple(dict.fromkeys((*USERS, *(act.user for act in transcript.acts if act.user)))),
        slow=_slow(transcript),
        speed=speed,
        transient_s=transient_s,
        polls=any("PollInterval=" in line for act in transcript.acts for line in act.output),
    )


def _provider(transcript: Transcript, listing: tuple[str, ...]) -> str:
    for line in listing:
        if (found := _DEFAULT.fullmatch(line)) is not None:
            return found[1]
    for item in transcript.items:
        if isinstance(item, Sample) and (named := re.match(r"burst_buffer/(\w+):", item.reason)) is not None:
            return named[1]
    for act in transcript.acts:
        if act.script is not None and (text := directives(act.script)):
            return "lua" if text.startswith("#BB_") else "datawarp"
    return "lua"


def _pools(listing: tuple[str, ...]) -> tuple[Pool, ...]:
    found: list[Pool] = []
    for line in listing:
        if (first := _DEFAULT.fullmatch(line)) is not None and first[2] != "(null)":
            found.append(Pool(first[2], first[4], first[3], True, first[4].isdigit()))
        elif (further := _POOL.fullmatch(line)) is not None:
            found.append(Pool(further[1], further[3], further[2], False, further[3].isdigit()))
    return tuple(found)


def _conf(transcript: Transcript, listing: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    found = {}
    lines = listing or tuple(line for act in transcript.acts for line in act.output)
    for line in lines:
        if line.startswith("  "):
            found.update({key: value for key, value in _KEY.findall(line) if value != "(null)"})
    return tuple(found.items())


def _is_wide(transcript: Transcript) -> bool:
    """Say whether a job wants several nodes: Forebay's jobs have one, so one node stands for all of the cluster."""
    for act in transcript.acts:
        for command in split_commands(act.command):
            try:
                parsed = parse_command(split_pipeline(command)[0])
            except ValueError:
                continue
            if parsed.program in ("sbatch", "srun", "salloc"):
                nodes = parsed.option("N", "nodes")
                if nodes is not None and nodes.isdigit() and int(nodes) > 1:
                    return True
    return False


def _slow(transcript: Transcript) -> tuple[tuple[str, float], ...]:
    """Return the operations that took time though no directive says so, from the logs of DataWarp's program."""
    told = " ".join(directives(act.script) for act in transcript.acts if act.script)
    begun: dict[tuple[str, str], float] = {}
    found: dict[str, float] = {}
    for item in transcript.items:
        for line in getattr(item, "lines", ()):
            stamp = _OPERATION.match(line)
            if stamp is None:
                continue
            at_s = int(stamp[1]) * 3600 + int(stamp[2]) * 60 + float(stamp[3])
            words = stamp[5].split()
            if stamp[4] == "start" and "--function" in words:
                token = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-t", "--token")), "")
                begun[words[words.index("--function") + 1], token] = at_s
            elif stamp[4] == "end" and len(words) == 3 and (words[1], words[2]) in begun:
                lasted = at_s - begun.pop((words[1], words[2]))
                if lasted >= _SLEEP_NOTED_S and f"{words[1]}_sleep=" not in told:
                    found[words[1]] = float(round(lasted))
    return tuple(found.items())


_STAND_IN: Final = "#!/bin/bash\nsleep 1\n"
"""What stands for a script that a transcript names without showing it."""


def _files(transcript: Transcript) -> tuple[tuple[str, str], ...]:
    """Return the files in the recorder's directory that commands name, as far as later listings tell them."""
    found: dict[str, str] = {}
    for position, act in enumerate(transcript.acts):
        for command in split_commands(act.command):
            try:
                parsed = parse_command(split_pipeline(command)[0])
            except ValueError:
                continue
            if parsed.program not in ("sbatch", "srun", "salloc"):
                continue
            if parsed.program == "sbatch" and parsed.words and parsed.words[0].startswith("$HERE/"):
                found.setdefault(parsed.words[0], _STAND_IN)
            path = parsed.option("bbf") or ""
            if path.startswith("$HERE/") and path not in found:
                text = _request_shown(transcript.acts[position : position + 2])
                if text:
                    found[path] = text
    return tuple(found.items())


def _priorities(transcript: Transcript) -> tuple[tuple[str, int], ...]:
    """Return the priorities that were set: by commands of the transcript, or unseen, as its listings show."""
    found: dict[str, int] = {}
    for act in transcript.acts:
        told = re.fullmatch(r"scontrol update job(?:id)?[ =](\d+) Priority=(\d+)", act.command, re.IGNORECASE)
        if told is not None:
            found[told[1]] = int(told[2])
        form = re.match(r"squeue .*-o '(%i [^']*%Q[^']*)'", act.command)
        if form is None:
            continue
        column = form[1].split().index("%Q")
        for line in act.output:
            words = line.split()
            if len(words) > column and words[0].isdigit() and words[column].isdigit():
                value = int(words[column])
                if 0 < value <= SET_PRIORITY_MAX:
                    found.setdefault(words[0], value)
    return tuple(found.items())


def _request_shown(acts: tuple[Act, ...]) -> str:
    """Return the directives that the listing right after a submit shows of that job, or nothing."""
    number = acts[0].submitted if acts else None
    for act in acts[1:]:
        if number is None or not any(line.startswith(f"JobId={number} ") for line in act.output):
            continue
        for line in act.output:
            if line.strip().startswith("BurstBuffer="):
                return line.strip().removeprefix("BurstBuffer=") + "\n"
    return ""


def pools_in(text: str) -> tuple[Pool, ...]:
    """Return the pools of a site's pools.json, for a transcript that lists none; what is below a KiB counts units."""
    found = []
    for pool in json.loads(text).get("pools", []):
        counts = pool["granularity"] < 1024
        total = pool["quantity"] * pool["granularity"]
        found.append(Pool(pool["id"], str(total), str(pool["granularity"]), False, counts))
    return tuple(found)

"""What was typed at Slurm, as the commands of `forebay` that do the same. What has no such command is said by name."""

import re
import shlex
import signal
from datetime import datetime, timedelta
from typing import Final

from tests.conformance.replayer.reservations import named
from tests.conformance.replayer.run import Run
from tests.conformance.replayer.setting import UNSET_PRIORITY
from tests.conformance.replayer.sightings import STATES
from tests.conformance.replayer.transcript import Act
from tests.conformance.replayer.words import NoSuchCommand, Parsed, jobs_named

_NO_MATTER: Final = frozenset(
    "o output e error i input open-mode mem mem-per-cpu mem-per-gpu exclusive s oversubscribe C constraint gres gpus G"
    " ntasks-per-node v verbose Q quiet parsable W wait signal get-user-env x exclude w nodelist F nodefile w wckey"
    " gid k no-kill u unbuffered I immediate pty K kill-on-bad-exit no-shell".split()
)
"""Options that say nothing of burst buffers and change nothing that is compared; Forebay's jobs have one node."""

_SAME: Final = {
    "t": "time", "time": "time", "J": "name", "job-name": "name", "a": "array", "array": "array", "A": "account",
    "account": "account", "q": "qos", "qos": "qos", "L": "licenses", "licenses": "licenses", "p": "partition",
    "partition": "partition", "reservation": "reservation", "b": "begin", "begin": "begin", "deadline": "deadline",
    "bb": "bb",
    "mail-type": "mail-type", "mail-user": "mail-user", "comment": "comment", "uid": "uid", "priority": "priority",
}  # fmt: skip
"""Options with a value that both have, by Forebay's name."""

_FILTERS: Final = {"u": "user", "user": "user", "t": "state", "state": "state", "n": "name", "name": "name",
                   "jobname": "name"}  # fmt: skip
_ASIDE: Final = frozenset(("hurry", "H", "Q", "quiet", "v", "verbose", "ctld", "me"))

_STATE_WORDS: Final = {word: word for word in STATES.values()} | STATES


_DRAINED: Final = frozenset(("DRAIN", "DOWN", "FAIL"))
_UNDRAINED: Final = frozenset(("RESUME", "UNDRAIN", "IDLE"))


def submission(act: Act, parsed: Parsed, run: Run) -> tuple[list[str], str]:
    """Return the words of `forebay submit` and the script, for sbatch, srun and salloc."""
    setting, work = run.setting, run.cluster.work
    output = work / (f"interactive.{act.line}" if parsed.program != "sbatch" else "%j.out")
    words = ["submit", f"--output={output}", f"--export=PATH={setting.path(run.cluster.run)}"]
    nodes, tasks, cpus = "1", 1, 1
    text = act.script
    for name, value in parsed.options:
        match name:
            case "n" | "ntasks":
                tasks = _count(name, value)
            case "c" | "cpus-per-task":
                cpus = _count(name, value)
            case "N" | "nodes":
                nodes = value
            case "H" | "hold":
                words.append("--hold")
            case "requeue" | "no-requeue":
                words.append(f"--{name}")
            case "nice":
                words.append(f"--nice={value or 100}")
            case "wrap":
                text = f"#!/bin/sh\n{value}\n"
            case "d" | "dependency":
                words.append(f"--dependency={_renumbered(value, run)}")
            case "bbf" | "D" | "chdir":
                words.append(f"--{'bbf' if name == 'bbf' else 'chdir'}={setting.local(value, work)}")
            case "export":
                words += [f"--export={one}" for one in value.split(",") if one not in ("ALL", "NONE", "NIL", "")]
            case _ if name in _SAME:
                words.append(f"--{_SAME[name]}={value}")
            case _ if name in _NO_MATTER:
                pass
            case _:
                raise NoSuchCommand(f"the option {name!r} of {parsed.program} is not known here")
    if setting.priorities and parsed.option("priority") is None:
        # A job whose priority nobody set goes before those that have one, as in Slurm.
        number = setting.number_of(act)
        words.append(f"--priority={dict(setting.priorities).get(number or '', UNSET_PRIORITY)}")
    if re.fullmatch(r"0+", nodes):
        words.append("--nodes=0")
    elif not re.fullmatch(r"\d+(-\d+)?", nodes):
        words.append(f"--nodes={nodes}")
    if tasks * cpus > 1:
        words.append(f"--cpus={tasks * cpus}")
    if text is None and parsed.program in ("srun", "salloc"):
        text = "#!/bin/bash\n" + shlex.join(parsed.words) + "\n"
    if text is None:
        return [*words, setting.local(parsed.words[0], work) if parsed.words else "-"], ""
    return [*words, "-"], setting.script(text, work)


def _count(name: str, value: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", value):
        raise NoSuchCommand(f"{value!r} of the option {name!r} is no count")
    return int(value)


def _renumbered(dependency: str, run: Run) -> str:
    def number(found: re.Match[str]) -> str:
        known = run.number(found[0])
        return found[0] if known is None else str(known)

    return re.sub(r"(?<=:)\d+(?:_\d+)?", number, dependency)


def steering(act: Act, parsed: Parsed, name: str, run: Run) -> list[list[str]]:
    """Return the commands of `forebay` that do what scancel or scontrol did to these jobs: none if there are no jobs.

    NoSuchCommand if Forebay cannot do it.
    """
    if name in ("cancel", "cancel hurry"):
        targets = _cancelled(act, parsed, run)
        hurry = ["--hurry"] if name == "cancel hurry" else []
        return [["cancel", *hurry, *targets]] if targets else []
    named = jobs_named(parsed)
    if not named:
        raise NoSuchCommand(f"scontrol {name} names no job that is read here")
    targets = [str(number) for job in named if (number := run.number(job)) is not None]
    if not targets:
        return []
    match name:
        case "hold" | "release" | "requeue" | "suspend" | "resume":
            return [["job", name, *targets]]
        case "requeuehold":
            return [["job", "requeue", *targets], ["job", "hold", *targets]]
        case "update":
            fields = [word for word in parsed.words[1:] if "=" in word and not re.match(r"(?i)job(id)?=", word)]
            return [["job", "update", *targets, *(_changing(field, run) for field in fields)]]
        case _:
            raise NoSuchCommand(f"{name!r} has no counterpart")


_CHANGED: Final = {
    "account": "account",
    "burstbuffer": "bb",
    "comment": "comment",
    "deadline": "deadline",
    "dependency": "dependency",
    "jobname": "name",
    "licenses": "licenses",
    "name": "name",
    "nice": "nice",
    "partition": "partition",
    "priority": "priority",
    "qos": "qos",
    "reservationname": "reservation",
    "starttime": "begin",
    "timelimit": "time",
}
"""What `scontrol update` changes of a job -> the option of `forebay job update`."""


def _changing(field: str, run: Run) -> str:
    key, _, value = field.partition("=")
    option = _CHANGED.get(key.lower())
    if key.lower() == "requeue" and value in ("0", "1"):
        return "--requeue" if value == "1" else "--no-requeue"
    if option is None:
        raise NoSuchCommand(f"{key!r} of a job is not changed here")
    return f"--{option}={_renumbered(value, run) if option == 'dependency' else value}"


_CONTROLLER_PID: Final = r"(?:\$\(cat \S*slurmctld\.pid\)|`cat \S*slurmctld\.pid`|slurmctld)"
_KILLED: Final = re.compile(rf"(?:kill|pkill|killall)(?: -(?:s )?(\w+))? {_CONTROLLER_PID}")


def controlling(command: str) -> int | None:
    """Return the signal with which a command ends the controller, 0 if it starts one, None if it does neither."""
    if re.fullmatch(r"(systemctl (re)?start slurmctld|slurmctld( -\S+)*)", command):
        return 0
    if re.fullmatch(r"scontrol shutdown( slurmctld)?|systemctl stop slurmctld", command):
        return int(signal.SIGTERM)
    found = _KILLED.fullmatch(command)
    if found is None:
        return None
    name = (found[1] or "TERM").upper().removeprefix("SIG")
    if name.isdigit():
        return int(name)
    known = getattr(signal, f"SIG{name}", None)
    return int(known) if isinstance(known, signal.Signals) else None


def administering(act: Act, parsed: Parsed, now: datetime) -> list[str]:
    """Return the command of `forebay` for what scontrol does to nodes and reservations; NoSuchCommand if there is none.

    `now` is when it is typed: a reservation begins then.
    """
    fields = {key.lower(): value for key, equals, value in (word.partition("=") for word in parsed.words) if equals}
    verb = parsed.words[0] if parsed.words else ""
    if verb == "update" and "nodename" in fields:
        state = fields.get("state", "").upper()
        if state in _DRAINED:
            return ["node", "drain", fields["nodename"], f"--reason={fields.get('reason', 'as recorded')}"]
        if state in _UNDRAINED:
            return ["node", "resume", fields["nodename"]]
    if verb == "delete" and (name := named(parsed)):
        return ["policy", "reservation", "delete", name, "--yes"]
    if verb in ("create", "update") and "burstbuffer" in fields:
        created = re.match(r"Reservation created: (\S+)", "\n".join(act.output))
        name = fields.get("reservationname") or (created[1] if created else "")
        minutes = fields.get("duration", "")
        if name and minutes.isdigit() and fields.get("starttime", "now").lower() == "now":
            end = (now + timedelta(minutes=int(minutes))).isoformat(timespec="seconds")
            who = [f"--{key}={fields[key]}" for key in ("users", "accounts") if key in fields]
            return [
                "policy",
                "reservation",
                "set",
                name,
                f"--end={end}",
                *who,
                f"--burst-buffer={fields['burstbuffer']}",
            ]
    raise NoSuchCommand("this command cannot be repeated")


def _cancelled(act: Act, parsed: Parsed, run: Run) -> list[str]:
    """Return the jobs that scancel means: those named, or all that its filters let through."""
    wanted: dict[str, str] = {}
    for option, value in parsed.options:
        if option in _FILTERS:
            wanted[_FILTERS[option]] = value
        elif option not in _ASIDE:
            raise NoSuchCommand(f"the option {option!r} of scancel is not known here")
    if parsed.option("me") is not None:
        wanted["user"] = act.user or "root"
    named = [number for job in jobs_named(parsed) if (number := run.number(job)) is not None]
    if not wanted:
        return [str(number) for number in named]
    states = {_STATE_WORDS.get(word.upper(), word.upper()) for word in wanted.get("state", "").split(",") if word}
    state = run.mirror.state
    return [
        str(number)
        for number in (named or sorted(state.unfinished))
        if (job := state.jobs.get(number)) is not None
        and wanted.get("user", job.request.user) == job.request.user
        and wanted.get("name", job.request.name) == job.request.name
        and (not states or job.state.name in states)
    ]

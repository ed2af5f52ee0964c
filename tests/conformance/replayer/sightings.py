"""What a transcript saw of each job: the samples, and what listings and remarks tell besides."""

import re
from collections import defaultdict
from typing import Final

import msgspec

from tests.conformance.replayer.compare import Seen
from tests.conformance.replayer.differences import Situation
from tests.conformance.replayer.transcript import Act, Remark, Sample, Transcript
from tests.conformance.replayer.words import (
    Parsed,
    directives,
    jobs_named,
    parse_command,
    split_commands,
    split_pipeline,
)

STATES: Final = {
    "PD": "PENDING",
    "CF": "CONFIGURING",
    "R": "RUNNING",
    "S": "SUSPENDED",
    "SO": "STAGE_OUT",
    "CD": "COMPLETED",
    "F": "FAILED",
    "CA": "CANCELLED",
    "TO": "TIMEOUT",
    "NF": "NODE_FAIL",
}
"""squeue's letters. CG (completing) is a moment between two states and tells neither."""

STEERING: Final = frozenset(("hold", "release", "requeue", "requeuehold", "update", "suspend", "resume"))
"""What scontrol does to jobs."""

_FIELDS: Final = {"i": "id", "A": "number", "t": "code", "r": "reason", "Q": "priority", "j": "name"}
_DEFAULT_ROW: Final = re.compile(r" *(\S+) +(\S+) +(.+?) +(\S+) +([A-Z]{1,2}) +([\d:-]+) +(\d+) *(.*)")
_SHOW_STATE: Final = re.compile(r"\s*JobState=(\S+) Reason=(\S+) Dependency=")
_SHOW_BUFFER: Final = re.compile(r"\s*BurstBufferState=(\S+)")
_SHOW_JOB: Final = re.compile(r"JobId=(\d+) (?:ArrayJobId=(\d+) ArrayTaskId=(\d+) )?")
_ROW: Final = re.compile(r"(\d+_\d+) (\d+) [A-Z]{1,2} ")
_LISTED: Final = re.compile(r"\s+JobID=(\d+_\d+)\((\d+)\) ")


class Sightings(msgspec.Struct, frozen=True):
    """What was seen: by job (`5`, `4_2`), oldest first."""

    seen: dict[str, list[Seen]]
    names: dict[str, str]
    """Number -> `4_2` of a task of an array."""
    situations: dict[str, list[tuple[int, Situation]]]
    """What was done to each job, and with which request: from which line of the transcript on."""
    order: list[str]
    """Jobs in the order in which their space was reserved, where the recorder noted it."""


def situation_at(sightings: Sightings, job: str, line: int, default: Situation) -> Situation:
    """Return the situation of a job (or of its array) at a line of the transcript."""
    known = sightings.situations.get(job) or sightings.situations.get(job.partition("_")[0], [])
    return next((one for begun, one in reversed(known) if begun <= line), default)


def done_before(sightings: Sightings, line: int) -> str:
    """Return what was done last to any job before a line of the transcript: `act command request`."""
    known = [pair for pairs in sightings.situations.values() for pair in pairs if pair[0] < line]
    if not known:
        return ""
    last = max(known, key=lambda pair: pair[0])[1]
    return f"{last.act} {last.command} {last.request}".rstrip()


class _Looking:
    def __init__(self, transcript: Transcript, provider: str, flags: str) -> None:
        self.provider = provider
        self.flags = flags
        self.names = _task_names(transcript)
        self.seen: dict[str, list[Seen]] = defaultdict(list)
        self.requests: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        self.acts: dict[str, tuple[str, str]] = {}
        self.situations: dict[str, list[tuple[int, Situation]]] = defaultdict(list)
        self.last: str | None = None

    def where(self, job: str) -> Situation:
        act, command = self.acts.get(job, self.acts.get(job.partition("_")[0], ("submit", "")))
        request = self.requests.get(job, self.requests.get(job.partition("_")[0], ""))
        after = self.seen[job][-1].text if self.seen.get(job) else ""
        return Situation(self.provider, act, command, request, self.flags, after)

    def add(
        self, item: Act | Sample | Remark, job: str, state: str | None, reason: str | None, buffer: str | None,
        held: bool | None = None, torn: bool = False,
    ) -> None:  # fmt: skip
        job = self.names.get(job, job)
        listed = not isinstance(item, Sample)
        where = self.where(job)
        one = Seen(item.line, item.at_s, state, reason, buffer, held, torn, where, listed)
        last = self.seen[job][-1] if self.seen[job] else None
        if last is not None and last.text == one.text:
            # The same again: what stood before it is what stood before the first.
            one = msgspec.structs.replace(one, where=msgspec.structs.replace(where, after=last.where.after))
        self.seen[job].append(one)

    def take(self, act: Act) -> None:
        rest = list(act.output)
        for command in split_commands(act.command):
            head, filters = split_pipeline(command)
            try:
                parsed = parse_command(head)
            except ValueError:
                continue
            if parsed.program in ("sbatch", "srun", "salloc") and act.submitted is not None:
                self.last = str(act.submitted)
                bb = parsed.option("bb") or ""
                self.requests[self.last] = " / ".join(filter(None, (bb, directives(act.script or ""))))
                self.acts[self.last] = ("submit", command)
                self.owners[self.last] = act.user
                self.situations[self.last].append((act.line, self.where(self.last)))
            if (name := act_name(parsed)) is not None:
                for job in jobs_named(parsed) or self.owned(act, parsed):
                    named = job if "_" in job else self.names.get(job, job) if job not in self.requests else job
                    self.acts[named] = (name, command)
                    self.situations[named].append((act.line, self.where(named)))
                    for task in [task for task in self.acts if task.startswith(f"{named}_")]:
                        self.acts[task] = (name, command)
            if parsed.program == "squeue" and not _counts(filters):
                rest = self.listing(act, parsed, rest)
            if parsed.program == "scontrol" and _shows_jobs(parsed) and not _counts(filters):
                self.described(act, parsed, rest)

    def owned(self, act: Act, parsed: Parsed) -> list[str]:
        """Return the jobs so far of the user whose jobs `scancel --user` or `--me` means."""
        owner = act.user if parsed.option("me") is not None else parsed.option("user", "u")
        return [job for job, user in self.owners.items() if user == owner]

    def listing(self, act: Act, parsed: Parsed, lines: list[str]) -> list[str]:
        form = parsed.option("o", "format")
        unread = []
        for line in lines:
            found = _by_format(form, line) if form is not None else _by_default(line)
            if found is None or not re.fullmatch(r"\d+(_\d+)?", found.get("id", "")):
                unread.append(line)
                continue
            state = STATES.get(found.get("code", ""))
            if state is not None:
                self.add(act, found["id"], state, found.get("reason"), None)
        return unread

    def described(self, act: Act, parsed: Parsed, lines: list[str]) -> None:
        job = next(iter(jobs_named(parsed)), None)
        state = reason = buffer = None
        for line in lines:
            if (found := _SHOW_JOB.match(line)) is not None:
                if job is not None and state is not None:
                    self.add(act, job, state, reason, buffer)
                job = f"{found[2]}_{found[3]}" if found[2] else found[1]
                state = reason = buffer = None
            elif (found := _SHOW_STATE.match(line)) is not None:
                state, reason = found[1], found[2]
            elif (found := _SHOW_BUFFER.match(line)) is not None:
                buffer = found[1]
        if job is not None and (state is not None or buffer is not None):
            self.add(act, job, state, reason, buffer)


def look(transcript: Transcript, provider: str, flags: str = "") -> Sightings:
    """Return what the transcript saw of each job."""
    looking = _Looking(transcript, provider, flags)
    order: list[str] = []
    for item in transcript.items:
        if isinstance(item, Act):
            looking.take(item)
        elif isinstance(item, Sample) and item.answered:
            held = item.held if item.state == "PENDING" else None
            looking.add(item, str(item.job), item.state, item.reason, item.buffer, held, item.torn)
        elif isinstance(item, Remark):
            for line in item.lines:
                found = _SHOW_STATE.match(line)
                if found is not None and looking.last is not None:
                    looking.add(item, looking.last, found[1], found[2], None)
                if line.startswith("order of setup calls: ["):
                    order.extend(re.findall(r"'(\d+)'", line.partition("]")[0]))
    seen = {job: _lasting(all_of_it) for job, all_of_it in looking.seen.items()}
    return Sightings(seen, looking.names, dict(looking.situations), order)


def _lasting(seen: list[Seen]) -> list[Seen]:
    """Return what was seen of a job with how long each was shown."""
    found: list[Seen] = []
    until_s: float | None = None
    for position in range(len(seen) - 1, -1, -1):
        one = seen[position]
        if position + 1 < len(seen) and seen[position + 1].text != one.text:
            until_s = seen[position + 1].at_s
        found.append(msgspec.structs.replace(one, lasted_s=0.0 if until_s is None else until_s - one.at_s))
    return found[::-1]


def act_name(parsed: Parsed) -> str | None:
    """Return in a word what a command does to jobs, or None if it only looks."""
    if parsed.program == "scancel":
        if parsed.option("signal", "s") is not None:
            return "signal"
        return "cancel hurry" if parsed.option("hurry", "H") is not None else "cancel"
    if parsed.program == "scontrol" and parsed.words:
        verb = {"uhold": "hold"}.get(parsed.words[0], parsed.words[0])
        return verb if verb in STEERING else None
    return None


def _shows_jobs(parsed: Parsed) -> bool:
    """Say whether scontrol describes jobs: `show job 5`, `show jobid=5`."""
    return parsed.words[:1] == ("show",) and re.match(r"(?i)job(s|id)?(=|$)", "".join(parsed.words[1:2])) is not None


def _counts(filters: str) -> bool:
    """Say whether filters count or cut lines up, so that what is left is no listing."""
    return any(word in filters for word in ("uniq", "wc", "-c", "awk", "cut"))


def _by_format(form: str, line: str) -> dict[str, str] | None:
    names: list[str] = []
    pattern = ""
    for part in re.findall(r"%\.?\d*([A-Za-z])|([^%]+)", form):
        letter, literal = part
        if literal:
            pattern += re.escape(literal).replace(r"\ ", " +")
            continue
        name = _FIELDS.get(letter, f"x{len(names)}")
        names.append(name)
        pattern += "(.+?)" if letter == "r" else r"(\S+)"
    found = re.fullmatch(" *" + pattern + " *", line)
    return None if found is None else dict(zip(names, found.groups(), strict=True))


def _by_default(line: str) -> dict[str, str] | None:
    found = _DEFAULT_ROW.fullmatch(line)
    if found is None:
        return None
    values = {"id": found[1], "code": found[5]}
    where = found[8].strip()
    if where.startswith("(") and where.endswith(")") and where != "(null)":
        values["reason"] = where[1:-1]
    return values


def _task_names(transcript: Transcript) -> dict[str, str]:
    """Return number -> `4_2` for all tasks of arrays that a listing names with both."""
    names: dict[str, str] = {}
    for item in transcript.items:
        if not isinstance(item, Act):
            continue
        for line in item.output:
            if (found := _LISTED.match(line)) is not None:
                names[found[2]] = found[1]
            elif (found := _SHOW_JOB.match(line)) is not None and found[2]:
                names[found[1]] = f"{found[2]}_{found[3]}"
            elif (found := re.match(r"(\d+_\d+) (\d+) [A-Z]{1,2} ", line)) is not None and found[2] != found[1].split(
                "_"
            )[0]:
                names[found[2]] = found[1]
    return names

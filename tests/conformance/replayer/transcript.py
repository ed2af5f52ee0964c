"""Transcripts: what was typed at a real Slurm, and what it showed. A strict parser; every complaint has file and line.

A line that something happened on begins with its time, `[seconds] `; lines without one belong to what stands before
them. What is stamped: `# trace NAME  wall TIME` (first line of a file), `## text` (a part begins), `script:` (then the
script, indented by four spaces), `$ [user] command` (then its output, and `(exit N)` where it failed), `  job N: …` (an
observed change; `JobState=-`: nobody answered), `NAME.log…:` (then a log, indented), and remarks: anything else.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

TRANSCRIPT_BYTES_MAX: Final = 16 * 1024 * 1024
"""Bytes of one file: hours of recording are about a hundredth of this."""

INDENT: Final = "    "
"""What stands before each line of a script and of a log."""

SETTLING_S: Final = 0.5
"""Seconds by which a stamp may be earlier than the one before it: two recorders write into one file."""

_STAMPED: Final = re.compile(r"\[ *(\d{1,7}\.\d{3})\] ?(.*)", re.DOTALL)
_HEADER: Final = re.compile(r"# trace (\S+) +wall (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?)")
_COMMAND: Final = re.compile(r"\$ (?:\[([a-z_][a-z0-9_.-]*)\] )?(\S.*)")
_JOB: Final = re.compile(
    r" job (\d+): JobState=([A-Z_]+|-?) \(squeue ([A-Z_]*|-)/([A-Z]*|-)\) Reason=(\S*) BB=([a-z-]*)"
    r"(?: (prio0))?(?: sc: (.*))? *"
)
_EXIT: Final = re.compile(r"\(exit (\d{1,3})\)")
_LOG: Final = re.compile(r"[\w.]+\.log(?: \(.*\))?:")
_SUBMITTED: Final = re.compile(r"Submitted batch job (\d+)(?: on cluster \S+)?")
_PARSABLE: Final = re.compile(r"(\d+)(?:;\S+)?")


class TranscriptError(Exception):
    """A file is not a transcript; the message names file and line, and what would be right."""

    def __init__(self, file: str, line: int, sentence: str) -> None:
        super().__init__(f"{file}:{line}: {sentence}")
        self.file = file
        self.line = line
        self.sentence = sentence


class Part(msgspec.Struct, frozen=True):
    """A part of the transcript begins: what was tried, in words."""

    line: int
    at_s: float
    title: str


class Act(msgspec.Struct, frozen=True):
    """Somebody typed a command. `at_s` is when it had ended; `script` what it read from standard input."""

    line: int
    at_s: float
    user: str
    command: str
    script: str | None = None
    output: tuple[str, ...] = ()
    exit_code: int = 0

    @property
    def submitted(self) -> int | None:
        """The number that Slurm gave to the job, or None."""
        parsable = self.command.startswith("sbatch ") and " --parsable" in self.command
        for text in self.output:
            found = _SUBMITTED.fullmatch(text) or (_PARSABLE.fullmatch(text) if parsable else None)
            if found is not None:
                return int(found[1])
        return None


class Sample(msgspec.Struct, frozen=True):
    """One observed change of a job. `buffer` is empty where the job has none."""

    line: int
    at_s: float
    job: int
    state: str
    squeue: str
    reason: str
    buffer: str
    held: bool = False
    comment: str = ""

    @property
    def answered(self) -> bool:
        """Whether anybody answered: with no controller there is a sample, and nothing is known of the job."""
        return self.state not in ("", "-")

    @property
    def torn(self) -> bool:
        """Whether its two halves contradict each other: the job changed between the two questions."""
        return self.state != self.squeue


class Log(msgspec.Struct, frozen=True):
    """What a log of the provider or the controller said since the last time."""

    line: int
    at_s: float
    name: str
    lines: tuple[str, ...]


class Remark(msgspec.Struct, frozen=True):
    """What the recorder wrote between; `lines` with what follows it unstamped."""

    line: int
    at_s: float
    lines: tuple[str, ...]


Item = Part | Act | Sample | Log | Remark


class Transcript(msgspec.Struct, frozen=True):
    """One file: one cluster from its start on."""

    file: str
    name: str
    started: str
    items: tuple[Item, ...]

    @property
    def acts(self) -> tuple[Act, ...]:
        """What was typed, in order."""
        return tuple(item for item in self.items if isinstance(item, Act))

    @property
    def samples(self) -> tuple[Sample, ...]:
        """What was observed, in order."""
        return tuple(item for item in self.items if isinstance(item, Sample) and item.answered)


class _Stamped(msgspec.Struct):
    line: int
    at_s: float
    text: str
    body: list[str]


def read_transcript(path: Path) -> list[Transcript]:
    """Read one file: a transcript, or several after one another. TranscriptError says what is wrong and where."""
    try:
        size_bytes = path.stat().st_size
        if size_bytes > TRANSCRIPT_BYTES_MAX:
            raise TranscriptError(path.name, 1, f"it has {size_bytes} bytes; at most {TRANSCRIPT_BYTES_MAX} are read")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise TranscriptError(path.name, 1, f"it cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise TranscriptError(path.name, 1, f"byte {error.start} is not UTF-8") from error
    return parse(text, path.name)


def parse(text: str, file: str) -> list[Transcript]:
    """Parse the text of one file; TranscriptError says what is wrong and where."""
    found: list[Transcript] = []
    items: list[Item] = []
    header: tuple[str, str] | None = None
    script: str | None = None
    last_s = 0.0
    for stamped in _stamped(text, file):
        opening = _HEADER.fullmatch(stamped.text.strip())
        if opening is not None:
            if header is not None:
                found.append(Transcript(file, *header, tuple(items)))
            header, items, script, last_s = (opening[1], opening[2]), [], None, stamped.at_s
            _no_body(stamped, file)
            continue
        if header is None:
            raise TranscriptError(file, stamped.line, "it does not begin with `[seconds] # trace NAME  wall TIME`")
        if stamped.at_s < last_s - SETTLING_S:
            raise TranscriptError(
                file, stamped.line, f"time goes back from {last_s:.3f} to {stamped.at_s:.3f}; stamps must increase"
            )
        last_s = max(last_s, stamped.at_s)
        if stamped.text == "script:":
            script = _indented(stamped, file, "a script")
            continue
        item = _item(stamped, script, file)
        if isinstance(item, Act) and item.script is not None:
            script = None
        items.append(item)
    if header is None:
        raise TranscriptError(file, 1, "it is empty; a transcript begins with `[seconds] # trace NAME  wall TIME`")
    found.append(Transcript(file, *header, tuple(items)))
    return found


def _stamped(text: str, file: str) -> list[_Stamped]:
    found: list[_Stamped] = []
    for number, line in enumerate(text.split("\n"), start=1):
        stamp = _STAMPED.fullmatch(line)
        if stamp is not None:
            found.append(_Stamped(number, float(stamp[1]), stamp[2], []))
        elif found:
            found[-1].body.append(line)
        elif line.strip():
            raise TranscriptError(file, number, "its first line has no stamp; it must begin with `[seconds] `")
    for one in found:
        while one.body and not one.body[-1].strip():
            one.body.pop()
    return found


def _item(stamped: _Stamped, script: str | None, file: str) -> Item:
    line, at_s, text = stamped.line, stamped.at_s, stamped.text
    if text.startswith("## "):
        _no_body(stamped, file)
        return Part(line, at_s, text[3:].strip())
    if text.startswith("$"):
        return _act(stamped, script, file)
    if text.startswith(" job "):
        return _sample(stamped, file)
    if text.startswith("  job "):
        stamped.text = text[1:]
        return _sample(stamped, file)
    if _LOG.fullmatch(text):
        return Log(line, at_s, text.split(".log")[0] + ".log", tuple(_indented(stamped, file, "a log").splitlines()))
    return Remark(line, at_s, (text, *stamped.body))


def _act(stamped: _Stamped, script: str | None, file: str) -> Act:
    found = _COMMAND.fullmatch(stamped.text)
    if found is None:
        raise TranscriptError(file, stamped.line, "a command is written as `$ command` or `$ [user] command`")
    user, command = found[1] or "", found[2].strip()
    body, exit_code = list(stamped.body), 0
    if body:
        code = _EXIT.fullmatch(body[-1])
        if code is not None:
            exit_code = int(code[1])
            body.pop()
    while body and not body[-1].strip():
        body.pop()
    text: str | None = None
    if command.endswith("< script"):
        if script is None:
            raise TranscriptError(file, stamped.line, "the command reads `script`, but no `script:` stands before it")
        command, text = command.removesuffix("< script").strip(), script
    return Act(stamped.line, stamped.at_s, user, command, text, tuple(body), exit_code)


def _sample(stamped: _Stamped, file: str) -> Sample:
    found = _JOB.fullmatch(stamped.text)
    if found is None:
        raise TranscriptError(
            file,
            stamped.line,
            "an observation is written as `job N: JobState=S (squeue S/CODE) Reason=R BB=B`, and `prio0` if held",
        )
    _no_body(stamped, file)
    return Sample(
        line=stamped.line,
        at_s=stamped.at_s,
        job=int(found[1]),
        state=found[2],
        squeue=found[3],
        reason=found[5],
        buffer=found[6],
        held=found[7] is not None,
        comment=(found[8] or "").strip(),
    )


def _indented(stamped: _Stamped, file: str, what: str) -> str:
    lines = []
    for offset, line in enumerate(stamped.body, start=1):
        if line and not line.startswith(INDENT) and line.strip():
            raise TranscriptError(file, stamped.line + offset, f"a line of {what} is indented by four spaces")
        lines.append(line[len(INDENT) :])
    if not lines and what == "a script":
        raise TranscriptError(file, stamped.line, "`script:` is followed by no script")
    return "".join(f"{line}\n" for line in lines)


def _no_body(stamped: _Stamped, file: str) -> None:
    if stamped.body:
        raise TranscriptError(file, stamped.line + 1, "a line without a stamp follows what has no output")

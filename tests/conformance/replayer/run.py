"""One run of a transcript at a Forebay: what its parts share while it goes on, and what came of it."""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from tests.conformance.replayer.accounting import Accounting
from tests.conformance.replayer.cluster import Cluster
from tests.conformance.replayer.compare import Outcome, Step
from tests.conformance.replayer.differences import Differences, Kind, Situation
from tests.conformance.replayer.mirror import Mirror
from tests.conformance.replayer.setting import Setting
from tests.conformance.replayer.sightings import Sightings, look
from tests.conformance.replayer.transcript import Act, Remark, Transcript

PATIENCE_S: Final = 15.0
"""Seconds that Forebay may be later than Slurm before something is taken as not coming."""

PERIOD_S: Final = 0.05
"""Seconds between two looks at the ledger."""

Say = Callable[[str], None]


class Result(msgspec.Struct):
    """What became of one transcript."""

    name: str
    steps: list[Step] = []
    seconds: float = 0.0


class Window(msgspec.Struct):
    """A listing to compare, with the times of the run between which it must have been true: seconds of the wall clock,
    which is the leader's too. The ledger shows what has happened a moment later, so nothing is counted here."""

    item: Act | Remark
    command: str
    expected: list[str]
    first_s: float
    last_s: float | None = None


class Run:
    """What is known and done in one run."""

    def __init__(self, transcript: Transcript, setting: Setting, cluster: Cluster, differences: Differences) -> None:
        self.transcript = transcript
        self.setting = setting
        self.cluster = cluster
        self.differences = differences
        self.sightings: Sightings = look(transcript, setting.provider, dict(setting.conf).get("Flags", ""))
        self.steps: list[Step] = []
        self.numbers: dict[str, int] = {}
        """Slurm's number -> Forebay's."""
        self.refused: set[str] = set()
        """Slurm's numbers of jobs that Forebay refused by a declared difference, or that could not be repeated."""
        self.unreserved: set[str] = set()
        """Names of reservations that only Slurm made."""
        self.accounting = Accounting()
        self.windows: list[Window] = []
        self.cuts: dict[str, float] = {}
        """When the transcript went on to a part in which a job is not seen any more: seconds of the wall clock."""
        self.changed_s = 0.0
        """When something was done last."""

    @property
    def mirror(self) -> Mirror:
        """What Forebay showed so far."""
        return self.cluster.mirror

    def number(self, job: str) -> int | None:
        """Return Forebay's number of a job of the transcript, or None if there is none yet."""
        if job in self.numbers:
            return self.numbers[job]
        master, underscore, task = job.partition("_")
        if not underscore or master not in self.numbers:
            return None
        number = (self.mirror.state.arrays.get(self.numbers[master]) or {}).get(int(task))
        if number is not None:
            self.numbers[job] = number
        return number

    def note(self, step: Step) -> None:
        """Keep what came of one thing."""
        self.steps.append(step)

    def matches(self, line: int, expected: str, got: str) -> None:
        """Note that both did the same."""
        self.note(Step(Outcome.MATCHED, line, expected, got))

    def differs(self, kind: Kind, where: Situation, line: int, expected: str, got: str, note: str = "") -> bool:
        """Note that they did not: declared if a row says so, failed if none does. Say whether one does."""
        row = self.differences.find(kind, where, expected, got)
        self.note(Step(Outcome.FAILED if row is None else Outcome.DECLARED, line, expected, got, row, note))
        return row is not None

    def new_window(self) -> None:
        """Something is about to be done: what is listed from here on is of a later time."""
        self.changed_s = time.time()
        for window in self.windows:
            if window.last_s is None:
                window.last_s = self.changed_s

    def watch(self, item: Act | Remark, command: str, expected: list[str]) -> None:
        """Keep a listing, to be compared at the end."""
        self.windows.append(Window(item, command, expected, self.changed_s))

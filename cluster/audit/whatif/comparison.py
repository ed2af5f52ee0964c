"""Complete what-if: reads the window twice, and simulates the worlds in parallel."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import nlargest
from pathlib import Path
from statistics import median
from typing import Final

from forebay.cluster.audit.replay import Progress
from forebay.cluster.audit.report import Window
from forebay.cluster.audit.whatif.changes import ScenarioChanges
from forebay.cluster.audit.whatif.figures import ROUGH_SHARE, Calibration, Fit, MovedJob, WhatIf, WhatIfSource
from forebay.cluster.audit.whatif.observed import SAMPLES, ObservedJob, WindowFigures
from forebay.cluster.audit.whatif.recorded import Edge, Moment, end_of, read_services, repeat
from forebay.cluster.audit.whatif.replaying import FOREVER, PASS_LAG_US, Replaying
from forebay.cluster.audit.whatif.replaying import apply_changes as changed_here
from forebay.replica.state import State
from forebay.replica.values import Instant
from forebay.wal import Ledger

MOVED_MAX: Final = 20
"""Number of listed jobs with the largest gains, and of those with the largest losses."""

ASSUMPTIONS: Final = (
    "Users, operators and other schedulers send the recorded requests at the recorded times. The exception is a "
    "scheduler's next request about an external job, which follows the job's phase after the recorded delay.",
    "Rejected commands are not repeated: the ledger does not have them.",
    "A stage-in, run, stage-out or teardown has its recorded duration and result, regardless of the load; this "
    "includes transfers that would share a link.",
    "A run without a recorded end lasts until its time limit and times out. A run that was never recorded takes the "
    "median of its user's runs, otherwise of all runs, at most its limit. Another operation without a recorded end "
    "takes as long as the next operation of that kind of its job, otherwise the median of the kind. No operation ends "
    "before its recorded duration.",
    "A script takes the recorded time to end on request, otherwise a second.",
    "A scheduling cycle runs at once if the ledger has no cycle within a quarter of a second.",
    f"Waits by reason come from {SAMPLES} samples of the window: a job counts under its reason at the last sample.",
    "Recorded commands change settings, except the keys and pool sizes that this simulation changes.",
)
"""Assumptions printed above each result."""


def what_if(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    first: Edge,
    last: Edge,
    changes: ScenarioChanges,
    policy: str = "",
    progress: Progress | None = None,
    again: Progress | None = None,
) -> WhatIf:
    """Return the simulated figures beside the recorded ones.

    `progress` receives the position of the first reading, and `again` that of the second reading with the simulation.
    Exceptions of `replay` also propagate.

    Raises:
        WindowRefused: The window does not exist.
        ChangeRejected: A change is impossible at the start of the window.
        TooManyJobs: The window has too many jobs.
    """
    ledger = ledger.as_of_now()
    to_us = end_of(ledger, last)

    def begin(state: State, from_us: int) -> WindowFigures:
        changed_here(
            state, Instant(from_us), changes
        )  # impossible changes are reported before the whole window is read
        return WindowFigures(state, Window(from_us, to_us))

    reading = read_services(ledger, snapshots, first, last, begin, progress)
    recorded = reading.observed
    assert recorded is not None  # the window was not empty
    # The window may end after the ledger, and durations after the ledger's end are unknown.
    reading.services.ends(reading.state, min(to_us, reading.state.at))
    window, state = recorded.window, reading.start.state
    unchanged = Replaying(state, reading.services, window)
    changed = Replaying(state, reading.services, window, changes) if changes else None
    by_times = Replaying(state, reading.services, window, by_times=True)
    worlds = [unchanged, by_times] if changed is None else [unchanged, by_times, changed]

    showing = _Showing(worlds)
    repeating = repeat(ledger, reading, first, last, showing.take, again)
    showing.flush(FOREVER)
    for world in worlds:
        world.finish(to_us)
    moved = [] if changed is None else _moved(recorded, unchanged, changed)
    gaining = nlargest(MOVED_MAX, (one for one in moved if one.gain_us > 0), key=lambda one: (one.gain_us, -one.job))
    losing = nlargest(MOVED_MAX, (one for one in moved if one.gain_us < 0), key=lambda one: (-one.gain_us, -one.job))
    return WhatIf(
        source=WhatIfSource(
            cluster_id=ledger.cluster_id,
            cluster=state.name,
            from_us=window.from_us,
            to_us=to_us,
            first_revision=state.revision + 1,
            last_revision=reading.state.revision,
            last_index=reading.end[0],
            ledger_digest=reading.end[1].hex(),
        ),
        changes=changes.words(policy),
        assumptions=ASSUMPTIONS,
        calibration=_calibration(recorded, unchanged, by_times, reading.state.at),
        recorded=recorded.figures(to_us),
        unchanged=unchanged.observed.figures(to_us),
        changed=None if changed is None else changed.observed.figures(to_us),
        earlier=sum(one.gain_us > 0 for one in moved),
        later=sum(one.gain_us < 0 for one in moved),
        gaining=tuple(gaining),
        losing=tuple(losing),
        left_out=dict(sorted(repeating.left_out.items())),
        unproven=dict(sorted(repeating.unproven.items())),
    )


class _Showing:
    """Buffer that delays moments until the time of the ledger's next scheduling cycle is known."""

    def __init__(self, worlds: Sequence[Replaying]) -> None:
        self._worlds = worlds
        self._waiting: deque[Moment] = deque()

    def take(self, moment: Moment) -> None:
        """Accept the next moment."""
        self._waiting.append(moment)
        if moment.has_pass:
            self.flush(moment.at)
        while self._waiting and moment.at - self._waiting[0].at > PASS_LAG_US:
            self._show(FOREVER)

    def flush(self, pass_at: int) -> None:
        """Forward all buffered moments; the ledger's next scheduling cycle is at `pass_at`."""
        while self._waiting:
            self._show(pass_at)

    def _show(self, pass_at: int) -> None:
        moment = self._waiting.popleft()
        for world in self._worlds:
            world.show(moment, pass_at)


def _known_there(world: Replaying) -> Mapping[int, ObservedJob]:
    """Return the jobs of a world by their IDs in the ledger."""
    return {world.number_there(job): known for job, known in world.observed.jobs.items()}


def _fit(recorded: WindowFigures, replayed: Replaying, until_us: int) -> Fit:
    """Compare the job starts up to the end of the ledger."""
    found = _known_there(replayed)
    starts = identical = 0
    off: list[int] = []
    for job in recorded.jobs.keys() | found.keys():
        was, now = recorded.jobs.get(job), found.get(job)
        was_us, now_us = 0 if was is None else was.started_us, 0 if now is None else now.started_us
        if not was_us and (not now_us or now_us > until_us):
            continue
        starts += 1
        identical += was_us == now_us
        if was_us and now_us:
            off.append(abs(was_us - now_us))
    return Fit(starts, identical, identical / starts if starts else 1.0, int(median(off)) if off else 0)


def _calibration(recorded: WindowFigures, unchanged: Replaying, by_times: Replaying, until_us: int) -> Calibration:
    fits = _fit(recorded, unchanged, until_us), _fit(recorded, by_times, until_us)
    return Calibration(*fits, unchanged.decisions, unchanged.same, any(fit.share < ROUGH_SHARE for fit in fits))


def _moved(recorded: WindowFigures, unchanged: Replaying, changed: Replaying) -> list[MovedJob]:
    to_us = recorded.window.to_us
    before, after = _known_there(unchanged), _known_there(changed)
    found: list[MovedJob] = []
    for job in sorted(before.keys() | after.keys()):
        one, other = before.get(job), after.get(job)
        one_us, other_us = 0 if one is None else one.started_us, 0 if other is None else other.started_us
        known = one or other
        if one_us == other_us or known is None:
            continue
        was = recorded.jobs.get(job)
        found.append(
            MovedJob(
                job=job,
                name=known.name,
                user=known.user,
                submitted_us=known.submitted_us,
                recorded_us=(None if was is None else was.started_us) or None,
                unchanged_us=one_us or None,
                changed_us=other_us or None,
                gain_us=(one_us or to_us) - (other_us or to_us),
            )
        )
    return found

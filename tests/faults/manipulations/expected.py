"""Expected effects of each manipulation: detectors, delays, and reaction of the replica; source of a docs page."""

from __future__ import annotations

import textwrap
from typing import Final, NamedTuple

from forebay.cluster.api.history_service.tree import CHECK_PAUSE_S
from forebay.cluster.server.divergence import COMPARE_PERIOD_S
from forebay.cluster.server.history_fetch import POLL_PERIOD_S, SCRUB_ENTRIES, SCRUB_PAUSE_S
from forebay.cluster.server.tlog.derive import STEP_ENTRIES
from forebay.cluster.server.tlog.publish import PERIOD_S
from forebay.replica.state.digest import CHECKPOINT_S
from tests.faults.manipulations.detectors import Finder, Then
from tests.faults.manipulations.site import LAST, NAMES
from tests.faults.manipulations.table import KINDS, ROWS, Manipulation

SCRUB_S: Final = LAST / SCRUB_ENTRIES * SCRUB_PAUSE_S
TILES_S: Final = LAST / STEP_ENTRIES * CHECK_PAUSE_S
"""Seconds of one round over this ledger of small entries; proportional to their size."""


class Known(NamedTuple):
    """Description of a detector; `within_s`: seconds until it detects something here, None if a person runs it."""

    what: str
    when: str
    within_s: float | None


FINDERS: Final = {
    Finder.START: Known("the replica, at its start", "before it acknowledges anything", 0),
    Finder.HISTORY: Known(
        "the replica: its empty journal against the journals of its peers",
        "with the first request from a peer after its start",
        1,
    ),
    Finder.COMMITTED: Known(
        "a follower: the leader's entries against those it has committed; it stops if they differ",
        "with each request of a leader",
        1,
    ),
    Finder.KEYS: Known(
        "the replica: its key against the one in the configuration",
        "at its start, and with each configuration",
        1,
    ),
    Finder.LEADER: Known(
        "the leader to which the replica acknowledged entries",
        "when they connect again, while it still leads",
        1,
    ),
    Finder.LEDGERS: Known(
        "replicas compare digests of their ledgers; one that differs stops",
        f"at a start, every {COMPARE_PERIOD_S:g} s until all answered; with each state digest",
        COMPARE_PERIOD_S,
    ),
    Finder.SIGNING: Known(
        "the replica, when it signs or receives a checkpoint",
        f"at its start, and every {PERIOD_S:g} s with commits",
        PERIOD_S,
    ),
    Finder.STATES: Known(
        "replicas compare digests of their states; one that differs stops",
        f"every {CHECKPOINT_S} s with changes; with the first change after a start",
        CHECKPOINT_S,
    ),
    Finder.BACKFILL: Known(
        "the replica fetches entries that it lacks, and proves them",
        f"every {POLL_PERIOD_S:g} s",
        POLL_PERIOD_S,
    ),
    Finder.SCRUB: Known(
        "the replica reads its own ledger in rounds, and repairs it from its peers",
        f"{SCRUB_S:.1f} s for this ledger; half an hour for a million entries",
        SCRUB_S,
    ),
    Finder.TILES: Known(
        "the replica compares its tiles with its ledger in rounds",
        f"{TILES_S:.1f} s for this ledger; half an hour for a million entries",
        TILES_S,
    ),
    Finder.VERIFY: Known("`forebay audit verify --complete`, on a replica's directory", "when a person runs it", None),
    Finder.DEEP: Known("`forebay audit verify --deep`", "when a person runs it", None),
    Finder.NOTE: Known(
        "`forebay audit consistency --from NOTE` with a kept note, or a witness",
        "when a person runs it",
        None,
    ),
}
"""Detectors, the fastest first."""


class Expected(NamedTuple):
    """Expected effect of a manipulation."""

    found_by: str
    """Names of the detectors that find it, separated by blanks."""
    then: Then
    why: str = ""
    """Why no replica finds it; empty if one does."""

    @property
    def finders(self) -> tuple[Finder, ...]:
        """The detectors that find it, the fastest first."""
        return tuple(finder for finder in FINDERS if finder in self.found_by.split())

    @property
    def is_seen(self) -> bool:
        """Return whether a running or starting replica finds it."""
        return any(FINDERS[finder].within_s is not None for finder in self.finders)


EXPECTED: Final = {
    "A1": Expected("verify deep scrub", Then.MENDED),
    "A2": Expected("verify deep start", Then.REFUSED),
    "A3": Expected("verify deep start", Then.REFUSED),
    "A4": Expected("verify deep scrub", Then.MENDED),
    "A5": Expected("verify deep start", Then.REFUSED),
    "A6": Expected("verify deep scrub", Then.MENDED),
    "A7": Expected("verify deep start", Then.REFUSED),
    "A8": Expected("verify deep start", Then.REFUSED),
    "A9": Expected("verify deep start", Then.REFUSED),
    "A10": Expected("verify deep start", Then.REFUSED),
    "A11": Expected("verify deep start", Then.REFUSED),
    "A12": Expected("verify deep scrub", Then.MENDED),
    "A13": Expected("verify deep start", Then.REFUSED),
    "A14": Expected("verify deep start", Then.REFUSED),
    "A15": Expected("deep", Then.HARMLESS, "the replica uses the snapshot before it, and folds more entries"),
    "A16": Expected("deep", Then.HARMLESS, "as A15"),
    "A17": Expected("deep", Then.HARMLESS, "as A15"),
    "A18": Expected("", Then.HARMLESS, "it is derived again from the ledger when it is read"),
    "A19": Expected("deep", Then.HARMLESS, "it is derived: remove it as `verify --deep` says, and it is made again"),
    "A20": Expected("start", Then.REFUSED),
    "B1": Expected(
        "verify deep",
        Then.HARMLESS,
        "nothing was there: LMDB may leave files that end before their last page, and a start extends them",
    ),
    "B2": Expected("verify deep start", Then.REFUSED),
    "B3": Expected("verify deep start", Then.REFUSED),
    "B4": Expected("verify deep start", Then.REFUSED),
    "B5": Expected("verify deep start", Then.REFUSED),
    "B6": Expected("verify deep start", Then.REFUSED),
    "B7": Expected("verify deep start", Then.REFUSED),
    "B8": Expected("verify deep start", Then.REFUSED),
    "B9": Expected("", Then.HARMLESS, "the whole ledger is folded"),
    "B10": Expected("deep", Then.HARMLESS, "as A15"),
    "B11": Expected("deep", Then.HARMLESS, "as A15"),
    "B12": Expected("", Then.HARMLESS, "LMDB makes it again"),
    "B13": Expected("", Then.HARMLESS, "it is derived again"),
    "B14": Expected("", Then.HARMLESS, "it is derived again"),
    "B15": Expected("start", Then.REFUSED),
    "B16": Expected("signing", Then.STOPS),
    "B17": Expected("deep start", Then.REFUSED),
    "B18": Expected("start", Then.REFUSED),
    "C1": Expected("verify deep scrub", Then.MENDED),
    "C2": Expected("verify deep start", Then.REFUSED),
    "C3": Expected("verify deep scrub", Then.MENDED),
    "C4": Expected("verify deep scrub", Then.MENDED),
    "C5": Expected("verify deep start", Then.REFUSED),
    "C6": Expected("verify deep scrub", Then.MENDED),
    "C7": Expected("verify deep scrub", Then.MENDED),
    "C8": Expected("verify deep scrub", Then.MENDED),
    "C9": Expected("verify deep scrub", Then.MENDED),
    "C10": Expected("verify deep scrub", Then.MENDED),
    "C11": Expected("verify deep scrub", Then.NAMED),
    "C12": Expected("verify deep start", Then.REFUSED),
    "C13": Expected("verify deep start", Then.REFUSED),
    "C14": Expected("verify deep start", Then.REFUSED),
    "C15": Expected(
        "",
        Then.HARMLESS,
        "the start checks less, and the scrub all of it; a replica far behind receives a snapshot",
    ),
    "C16": Expected("verify deep scrub", Then.NAMED),
    "C17": Expected("verify deep start", Then.REFUSED),
    "C18": Expected("verify deep start", Then.REFUSED),
    "C19": Expected("", Then.HARMLESS, "a leader exists in this term already, so no replica campaigns in it again"),
    "C20": Expected("", Then.HARMLESS, "as C19"),
    "C21": Expected("", Then.HARMLESS, "the others follow to the higher term"),
    "C22": Expected("start", Then.REFUSED),
    "C23": Expected("", Then.HARMLESS, "the log was empty"),
    "C24": Expected("verify deep start", Then.REFUSED),
    "C25": Expected("deep", Then.HARMLESS, "it is not trusted, and the next one replaces it"),
    "D1": Expected("verify deep scrub", Then.MENDED),
    "D2": Expected("verify deep start", Then.REFUSED),
    "D3": Expected("verify deep start", Then.REFUSED),
    "D4": Expected("verify deep scrub", Then.MENDED),
    "D5": Expected("verify deep scrub", Then.MENDED),
    "D6": Expected("verify deep backfill", Then.MENDED),
    "D7": Expected("verify deep backfill", Then.MENDED),
    "E1": Expected("deep start", Then.REFUSED),
    "E2": Expected("deep start", Then.REFUSED),
    "E3": Expected("deep start", Then.REFUSED),
    "E4": Expected("signing", Then.STOPS),
    "E5": Expected("deep start", Then.REFUSED),
    "E6": Expected("verify deep start", Then.REFUSED),
    "E7": Expected(
        "",
        Then.GOES_ON,
        "with all replicas stopped, none remembers what was acknowledged and not signed yet; the entries "
        "come from the others again. If the leader still leads, as E12",
    ),
    "E8": Expected("", Then.HARMLESS, "as B9"),
    "E9": Expected("signing", Then.STOPS),
    "E10": Expected("signing", Then.STOPS),
    "E11": Expected("", Then.GOES_ON, "as E7"),
    "E12": Expected("leader start", Then.STOPS),
    "E13": Expected("leader signing", Then.STOPS),
    "E14": Expected("start", Then.REFUSED),
    "F1": Expected("start", Then.REFUSED),
    "F2": Expected("verify deep start", Then.REFUSED),
    "F3": Expected("verify deep start", Then.REFUSED),
    "F4": Expected("", Then.HARMLESS, "the ledgers are the same, and it signs with its own key; for votes see C19"),
    "G1": Expected("deep ledgers tiles signing", Then.STOPS),
    "G2": Expected("deep ledgers tiles signing", Then.STOPS),
    "G3": Expected("deep ledgers tiles signing", Then.STOPS),
    "G4": Expected("deep ledgers tiles signing", Then.STOPS),
    "G5": Expected("deep ledgers tiles signing", Then.STOPS),
    "G6": Expected("deep ledgers tiles signing", Then.STOPS),
    "G7": Expected("deep ledgers tiles signing", Then.STOPS),
    "G8": Expected("deep ledgers tiles signing", Then.STOPS),
    "G9": Expected("deep ledgers tiles signing", Then.STOPS),
    "G10": Expected("deep ledgers tiles signing", Then.STOPS),
    "G11": Expected("deep ledgers tiles signing", Then.STOPS),
    "G12": Expected("verify deep ledgers scrub", Then.STOPS),
    "G13": Expected("deep states ledgers tiles signing", Then.STOPS),
    "G14": Expected("deep ledgers tiles signing", Then.STOPS),
    "G15": Expected("deep ledgers tiles signing", Then.STOPS),
    "G16": Expected("deep states ledgers signing", Then.STOPS),
    "G17": Expected("deep states ledgers tiles signing", Then.STOPS),
    "G18": Expected("states ledgers signing", Then.STOPS),
    "H1": Expected("deep states", Then.STOPS),
    "H2": Expected("deep states", Then.STOPS),
    "H3": Expected("deep states", Then.STOPS),
    "H4": Expected("deep states", Then.STOPS),
    "H5": Expected("deep start", Then.REFUSED),
    "I1": Expected("deep ledgers tiles signing", Then.ALL_STOP),
    "I2": Expected("states ledgers signing note", Then.OTHERS_STOP),
    "I3": Expected("states ledgers signing", Then.OTHERS_STOP),
    "I4": Expected("note", Then.GOES_ON, "a note from before shows it"),
    "I5": Expected("", Then.GOES_ON, "no note was kept outside"),
    "I6": Expected("deep states", Then.OTHERS_STOP),
    "I7": Expected(
        "deep",
        Then.GOES_ON,
        "the ledger does not lead to the state; `verify --deep` reports it from then on",
    ),
    "I8": Expected("note", Then.GOES_ON, "a later note shows it"),
    "I9": Expected("", Then.GOES_ON, "no note from later was kept outside"),
    "I10": Expected("committed signing", Then.STOPS),
    "I11": Expected("verify deep scrub", Then.NAMED),
    "I12": Expected("verify deep backfill", Then.MENDED),
    "I13": Expected("verify deep", Then.GOES_ON, "no replica has the entries any more; `verify --complete` names them"),
    "I14": Expected("deep tiles signing", Then.STOPS),
    "J1": Expected("verify deep history keys", Then.STOPS),
    "J2": Expected("history", Then.STOPS),
    "J3": Expected("start", Then.REFUSED),
    "J4": Expected("start", Then.REFUSED),
    "K1": Expected("start", Then.REFUSED),
    "K2": Expected("start", Then.REFUSED),
    "K3": Expected("start", Then.REFUSED),
    "K4": Expected(
        "",
        Then.GOES_ON,
        "it looks as if the replica had accepted it; `forebay audit dump` shows the alleged caller",
    ),
}


def after(expected: Expected) -> str:
    """Return the delay until running replicas detect it, at most."""
    if not expected.finders:
        return ""
    within_s = FINDERS[expected.finders[0]].within_s
    if within_s is None:
        return "when asked"
    return "at the start" if not within_s else f"{within_s:.2g} s"


def markdown() -> str:
    """Return the tables of docs/audit/detected.md: the detectors, and the effect of each manipulation."""
    lines = ["| detector | who looks | when |", "|---|---|---|"]
    lines += [f"| {finder} | {known.what} | {known.when} |" for finder, known in FINDERS.items()]
    for kind, title in KINDS.items():
        rows = [row for row in ROWS if row.kind == kind]
        lines += [
            "",
            f"### {kind}: {title}",
            "",
            "| | replicas | change | found by | within | the replica |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            expected = EXPECTED[row.id]
            found = ", ".join(expected.finders) or "none"
            lines.append(f"| {row.id} | {_on(row)} | {row.what} | {found} | {after(expected)} | {expected.then} |")
        notes = [f"- {row.id}: {EXPECTED[row.id].why}." for row in rows if EXPECTED[row.id].why]
        lines += ["", *(textwrap.fill(note, 100, subsequent_indent="  ") for note in notes)] if notes else []
    return "\n".join(lines)


def _on(row: Manipulation) -> str:
    return "one" if len(row.on) == 1 else "all" if len(row.on) == len(NAMES) else "two"

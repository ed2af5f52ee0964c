"""What each manipulation leads to: who finds it, after how long, and what becomes of the replica; as a page says it."""

from __future__ import annotations

from typing import Final, NamedTuple

from cluster.api.history_service.tree import CHECK_PAUSE_S
from cluster.server.divergence import COMPARE_PERIOD_S
from cluster.server.history_fetch import POLL_PERIOD_S, SCRUB_ENTRIES, SCRUB_PAUSE_S
from cluster.server.tlog.derive import STEP_ENTRIES
from cluster.server.tlog.publish import PERIOD_S
from replica.state.digest import CHECKPOINT_S
from tests.faults.manipulations.detectors import Finder, Then
from tests.faults.manipulations.site import LAST, NAMES
from tests.faults.manipulations.table import KINDS, ROWS, Manipulation

SCRUB_S: Final = LAST / SCRUB_ENTRIES * SCRUB_PAUSE_S
TILES_S: Final = LAST / STEP_ENTRIES * CHECK_PAUSE_S
"""How long a round takes over this ledger, seconds, where entries are small: for larger ones in proportion."""


class Known(NamedTuple):
    """What is to be said of a finder; `within_s`: after how long it finds something here, None where somebody asks."""

    what: str
    when: str
    within_s: float | None


FINDERS: Final = {
    Finder.START: Known("the replica, at its start", "before it promises anything", 0),
    Finder.KEYS: Known(
        "a replica compares its key with the one that the configuration has for it",
        "when it starts, and with each configuration that it receives",
        1,
    ),
    Finder.LEADER: Known(
        "the leader to whom the replica acknowledged entries",
        "when they hear each other again, while it leads on",
        1,
    ),
    Finder.LEDGERS: Known(
        "replicas compare the digests of their ledgers; who is alone with its own stops",
        f"when one starts, every {COMPARE_PERIOD_S:g} s until all have answered, and with each digest of states",
        COMPARE_PERIOD_S,
    ),
    Finder.SIGNING: Known(
        "a replica signs only what goes on from what it signed, knows its own signatures in its peers' checkpoints, "
        "and a majority's checkpoint that it cannot confirm stops it",
        f"when it starts, and every {PERIOD_S:g} s in which something was committed",
        PERIOD_S,
    ),
    Finder.STATES: Known(
        "replicas compare the digests of their states; who is alone with its own stops",
        f"every {CHECKPOINT_S} s in which something changed, and with the first change after a start",
        CHECKPOINT_S,
    ),
    Finder.BACKFILL: Known(
        "the replica asks its peers for entries that it lacks, and proves them",
        f"every {POLL_PERIOD_S:g} s",
        POLL_PERIOD_S,
    ),
    Finder.SCRUB: Known(
        "the replica reads its own ledger over and over, and mends it from its peers",
        f"{SCRUB_S:.1f} s for this ledger; half an hour for a million entries of one command each",
        SCRUB_S,
    ),
    Finder.TILES: Known(
        "the replica holds its tiles against its ledger over and over; what it signs next is of the ledger",
        f"{TILES_S:.1f} s for this ledger; half an hour for a million entries of one command each",
        TILES_S,
    ),
    Finder.VERIFY: Known("`forebay audit verify --complete`, on a replica's directory", "when somebody runs it", None),
    Finder.DEEP: Known("`forebay audit verify --deep`", "when somebody runs it", None),
    Finder.NOTE: Known(
        "`forebay audit consistency --from NOTE`, by somebody outside who kept a note, or a witness",
        "when somebody runs it",
        None,
    ),
}
"""Who finds something, the fastest first."""


class Expected(NamedTuple):
    """What a manipulation leads to."""

    found_by: str
    """Names of all who find it, with blanks between them."""
    then: Then
    why: str = ""
    """Why no replica finds it; there is something for each of those, and for nothing else."""

    @property
    def finders(self) -> tuple[Finder, ...]:
        """All who find it, the fastest first."""
        return tuple(finder for finder in FINDERS if finder in self.found_by.split())

    @property
    def is_seen(self) -> bool:
        """Whether replicas that run find it, or one that is to start."""
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
    "A15": Expected("deep", Then.HARMLESS, "it is passed over: the one before it serves, and more is folded"),
    "A16": Expected("deep", Then.HARMLESS, "as A15"),
    "A17": Expected("deep", Then.HARMLESS, "as A15"),
    "A18": Expected("", Then.HARMLESS, "derived anew from the ledger when it is read"),
    "A19": Expected("deep", Then.HARMLESS, "derived: `verify --deep` says to remove it, and it is made anew"),
    "A20": Expected("start", Then.REFUSED),
    "B1": Expected(
        "verify deep",
        Then.HARMLESS,
        "nothing was there: LMDB lawfully leaves files that end before their last page, and a start makes them as long",
    ),
    "B2": Expected("verify deep start", Then.REFUSED),
    "B3": Expected("verify deep start", Then.REFUSED),
    "B4": Expected("verify deep start", Then.REFUSED),
    "B5": Expected("verify deep start", Then.REFUSED),
    "B6": Expected("verify deep start", Then.REFUSED),
    "B7": Expected("verify deep start", Then.REFUSED),
    "B8": Expected("verify deep start", Then.REFUSED),
    "B9": Expected("", Then.HARMLESS, "all of the ledger is folded"),
    "B10": Expected("deep", Then.HARMLESS, "as A15"),
    "B11": Expected("deep", Then.HARMLESS, "as A15"),
    "B12": Expected("", Then.HARMLESS, "LMDB makes it anew"),
    "B13": Expected("", Then.HARMLESS, "derived anew"),
    "B14": Expected("", Then.HARMLESS, "derived anew"),
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
        "the start checks less, the scrub all of it as before; who is far behind is sent a snapshot",
    ),
    "C16": Expected("verify deep scrub", Then.NAMED),
    "C17": Expected("verify deep start", Then.REFUSED),
    "C18": Expected("verify deep start", Then.REFUSED),
    "C19": Expected("", Then.HARMLESS, "somebody has led in this term, so nobody stands in it again"),
    "C20": Expected("", Then.HARMLESS, "as C19"),
    "C21": Expected("", Then.HARMLESS, "the others follow to the higher term"),
    "C22": Expected("start", Then.REFUSED),
    "C23": Expected("", Then.HARMLESS, "the log was empty"),
    "C24": Expected("verify deep start", Then.REFUSED),
    "C25": Expected("deep", Then.HARMLESS, "it is not believed, and the next one takes its place"),
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
        "with all stopped nobody remembers what was acknowledged and not signed yet; it comes from the "
        "others again. As E12 where the leader leads on",
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
    "F4": Expected("", Then.HARMLESS, "the ledgers are the same; it signs with its own key; of votes as C19"),
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
    "I4": Expected("note", Then.GOES_ON, "a note from before shows it to whoever kept one"),
    "I5": Expected("", Then.GOES_ON, "nobody outside kept anything"),
    "I6": Expected("deep states", Then.OTHERS_STOP),
    "I7": Expected(
        "deep",
        Then.GOES_ON,
        "the ledger does not lead to the state, which `verify --deep` says from then on",
    ),
    "I8": Expected("note", Then.GOES_ON, "a later note shows it to whoever kept one"),
    "I9": Expected("", Then.GOES_ON, "nobody outside kept anything later"),
    "I10": Expected("signing", Then.STOPS),
    "I11": Expected("verify deep scrub", Then.NAMED),
    "I12": Expected("verify deep backfill", Then.MENDED),
    "I13": Expected("verify deep", Then.GOES_ON, "nobody has the entries any more; `verify --complete` says which"),
    "I14": Expected("deep tiles signing", Then.STOPS),
    "J1": Expected("verify deep keys", Then.STOPS),
    "J2": Expected("keys leader", Then.STOPS),
    "J3": Expected("start", Then.REFUSED),
    "J4": Expected("start", Then.REFUSED),
    "K1": Expected("start", Then.REFUSED),
    "K2": Expected("start", Then.REFUSED),
    "K3": Expected("start", Then.REFUSED),
    "K4": Expected(
        "",
        Then.GOES_ON,
        "it looks as if its replica had accepted it; `forebay audit dump` shows who is said to have asked",
    ),
}


def after(expected: Expected) -> str:
    """Return after how long it is found, at the latest, by replicas that run."""
    if not expected.finders:
        return ""
    within_s = FINDERS[expected.finders[0]].within_s
    if within_s is None:
        return "when asked"
    return "at the start" if not within_s else f"{within_s:.2g} s"


def markdown() -> str:
    """Return the tables of docs/audit/auditors.md: who looks, and what each manipulation leads to."""
    lines = ["| name | who looks | when |", "|---|---|---|"]
    lines += [f"| {finder} | {known.what} | {known.when} |" for finder, known in FINDERS.items()]
    lines += [
        "",
        "| | on | what was done | found by | at the latest after | what becomes of the replica |",
        "|---|---|---|---|---|---|",
    ]
    kind = ""
    for row in ROWS:
        if row.kind != kind:
            kind = row.kind
            lines.append(f"| **{kind}** | | **{KINDS[kind]}** | | | |")
        expected = EXPECTED[row.id]
        then = expected.then + (f": {expected.why}" if expected.why else "")
        found = ", ".join(expected.finders) or "nobody"
        lines.append(f"| {row.id} | {_on(row)} | {row.what} | {found} | {after(expected)} | {then} |")
    return "\n".join(lines)


def _on(row: Manipulation) -> str:
    return "one" if len(row.on) == 1 else "all" if len(row.on) == len(NAMES) else "two"

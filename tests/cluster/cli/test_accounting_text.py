"""Output of the commands for accounts, QOS, licences and reservations."""

from __future__ import annotations

from forebay.cluster.schemas.accounts import ReservationsAnswer, ReservationView
from tests.cluster.cli.double import Double, forebay

NIGHT = ReservationView(
    name="night", state="ACTIVE", start="2026-11-21T08:00:00Z", end="2026-11-22T00:00:00Z", users=("alan",),
    accounts=(), burst_buffer="fast:256MiB", held_bytes=0,
)  # fmt: skip

TEXT = """\
ReservationName=night StartTime=2026-11-21T08:00:00Z EndTime=2026-11-22T00:00:00Z State=ACTIVE
   Users=alan Accounts=(null) BurstBuffer=fast:256MiB Held=0
"""


def test_a_reservation_is_printed_on_two_lines(double: Double) -> None:
    double.answer("GET", "/v1/reservations", ReservationsAnswer(revision=9, reservations=(NIGHT,)))
    result = forebay(double.config, "policy", "reservation", "list")
    assert (result.exit_code, result.stdout) == (0, TEXT)

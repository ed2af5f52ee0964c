"""Text of `forebay status`: ten lines, and one line for each item that needs attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from forebay.cluster.cli.text.tables import format_time, unit_in
from forebay.cluster.cli.text.transfer import meter
from forebay.cluster.system import readable_size
from forebay.replica.model import format_amount
from forebay.replica.values import plain

if TYPE_CHECKING:
    from forebay.cluster.schemas import OverviewAnswer, PoolView

POOLS_MAX: Final = 4
"""Maximum number of pools shown, the fullest ones, so that the status has ten lines."""

LABEL_WIDTH: Final = 10


def status_lines(overview: OverviewAnswer, pools: tuple[PoolView, ...]) -> Iterator[str]:
    """Yield the lines of the status, with the items that need attention last."""
    reachable = sum(member.reachable for member in overview.members)
    leader = f"leader {plain(overview.leader)}, term {overview.term}" if overview.leader else "no leader"
    yield _field("Cluster", f"{plain(overview.cluster)} at revision {overview.revision}, {format_time(overview.at)}")
    yield _field("Replicas", f"{leader}; {reachable} of {len(overview.members)} reachable")
    yield _field("Nodes", _counts(overview.nodes))
    waiting = f" (pending for {_counts(overview.waiting)})" if overview.waiting else ""
    yield _field("Jobs", _counts(overview.jobs) + waiting)
    moved = overview.transfers
    named = {"active": moved.moving, "queued": moved.queued, "retrying": moved.retrying, "failed": moved.failed}
    shown = _counts({word: count for word, count in named.items() if count})
    rate = f", {readable_size(moved.rate_bytes_s)}/s" if moved.moving else ""
    yield _field("Transfers", shown + rate)
    fullest = sorted(pools, key=lambda pool: -pool.held_bytes / (pool.quantity_bytes or 1))
    for pool in sorted(fullest[:POOLS_MAX], key=lambda pool: pool.name):
        held, total = (format_amount(number, unit_in(pool)) for number in (pool.held_bytes, pool.quantity_bytes))
        yield _field("Pool", f"{meter(pool.held_bytes, pool.quantity_bytes)} {plain(pool.name)}: {held} of {total}")
    if len(pools) > POOLS_MAX:
        yield _field("", f"{len(pools) - POOLS_MAX} more pools: forebay pool list")
    if not overview.needs_count:
        yield _field("Attention", "no action needed")
        return
    yield _field("Attention", f"{overview.needs_count} item{'' if overview.needs_count == 1 else 's'}")
    for need in overview.needs:
        since = f" since {format_time(need.since)}" if need.since else ""
        remedy = f" ({plain(need.remedy)})" if need.remedy else ""
        yield f"  {plain(need.subject)}: {plain(need.sentence)}{since}{remedy}"
    if overview.needs_count > len(overview.needs):
        yield f"  and {overview.needs_count - len(overview.needs)} more"


def _field(label: str, text: str) -> str:
    return f"{label:<{LABEL_WIDTH}} {text}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {plain(name)}" for name, count in counts.items()) or "none"

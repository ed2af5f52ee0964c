"""Live view of jobs, transfers, pools and replicas, drawn several times a second."""

import asyncio
import time
from collections.abc import Callable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import JobView, MemberView, PoolView
from forebay.cluster.schemas.transfers import TransferView
from forebay.replica.values.units import format_size

PERIOD_S = 0.25
STATE_STYLES = {
    "PENDING": "yellow",
    "CONFIGURING": "cyan",
    "RUNNING": "bold green",
    "STAGE_OUT": "magenta",
    "COMPLETED": "dim",
}


class Picture:
    """What is known of the cluster; keeps the last picture while nobody leads, and says so."""

    def __init__(self, client: Client, console: Console, *, live: bool) -> None:
        self.client = client
        self.console = console
        self.live = live
        self.jobs: dict[int, JobView] = {}
        self.transfers: tuple[TransferView, ...] = ()
        self.pools: tuple[PoolView, ...] = ()
        self.members: tuple[MemberView, ...] = ()
        self.leader: str | None = None
        self.revision = 0
        self.headline = ""
        self.reasons: dict[tuple[int, int], str] = {}
        self.reasons_seen: set[str] = set()
        self.changed = asyncio.Condition()
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line above the live picture."""
        self.console.print(f"[dim]{time.monotonic() - self.started:6.1f} s[/dim]  {text}", highlight=False)

    async def run(self) -> None:
        """Refresh for ever."""
        if not self.live:
            while True:
                await self.refresh()
                await asyncio.sleep(PERIOD_S)
        with Live(console=self.console, auto_refresh=False, transient=True) as view:
            while True:
                await self.refresh()
                view.update(self.draw(), refresh=True)
                await asyncio.sleep(PERIOD_S)

    async def refresh(self) -> None:
        """Ask the cluster; what cannot be asked stays as it was."""
        try:
            jobs = await self.client.call(ops.LIST_JOBS, deadline_s=1.0)
            self.transfers = (await self.client.call(ops.LIST_TRANSFERS, deadline_s=1.0)).transfers
            self.pools = (await self.client.call(ops.LIST_POOLS, deadline_s=1.0)).pools
            members = await self.client.call(ops.LIST_MEMBERS, deadline_s=1.0)
        except ApiError:
            self.leader = None
            return
        self.members, self.leader, self.revision = members.members, members.leader, jobs.revision
        for job in jobs.jobs:
            before = self.jobs.get(job.job_id)
            now = (job.state, job.reason, job.burst_buffer_state)
            if before is None or now != (before.state, before.reason, before.burst_buffer_state):
                self.reasons[job.job_id, job.revision] = job.reason
                self.reasons_seen.add(job.reason)
                if not self.live:
                    buffer = job.burst_buffer_state or "-"
                    self.say(f"job {job.job_id:2} {job.name:10} {job.state:11} {buffer:11} {job.reason}")
            self.jobs[job.job_id] = job
        async with self.changed:
            self.changed.notify_all()

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `condition()` holds after a refresh; TimeoutError names `what`."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self.changed:
                    while not condition():
                        await self.changed.wait()
        except TimeoutError:
            raise TimeoutError(f"not within {timeout_s:.0f} s: {what}") from None

    def draw(self) -> Group:
        """Return the picture as tables."""
        # At 80 columns all but the reason keep their width; the reason is folded.
        jobs = Table(title=self.headline, title_justify="left", box=None, padding=(0, 1, 0, 0), expand=False)
        widths = {"JOB": 3, "NAME": 9, "STATE": 9, "BUFFER": 11, "POOL": 4, "CAPACITY": 8, "NODE": 4}
        for column, width in widths.items():
            jobs.add_column(column, no_wrap=True, min_width=width, max_width=max(width, 10))
        jobs.add_column("REASON", overflow="fold")
        for job in self.jobs.values():
            style = STATE_STYLES.get(job.state, "red")
            capacity = format_size(job.capacity_bytes) if job.capacity_bytes else "-"
            jobs.add_row(
                str(job.job_id), job.name, job.state, job.burst_buffer_state or "-", job.pool or "-", capacity,
                job.node or "-", "" if job.reason == "None" else job.reason, style=style,
            )  # fmt: skip
        transfers = Table(box=None)
        for column in ("TRANSFER", "", "BYTES", "RATE"):
            transfers.add_column(column, no_wrap=True, min_width=10)
        for transfer in self.transfers:
            bar = ProgressBar(total=max(1, transfer.bytes_total), completed=transfer.bytes_done, width=30)
            moved = f"{transfer.bytes_done / 1e6:.1f} of {transfer.bytes_total / 1e6:.1f} MB"
            rate = f"{transfer.rate_bytes_s / 1e6:.1f} MB/s"
            transfers.add_row(f"job {transfer.job_id} {transfer.stage}", bar, moved, rate)
        pools = Table(box=None)
        for column in ("POOL", "", "FREE", "OF"):
            pools.add_column(column, no_wrap=True, min_width=10)
        for pool in self.pools:
            bar = ProgressBar(total=pool.quantity_bytes, completed=pool.quantity_bytes - pool.free_bytes, width=30)
            pools.add_row(pool.name, bar, format_size(pool.free_bytes), format_size(pool.quantity_bytes))
        members = Table(box=None)
        for column in ("REPLICA", "ROLE", "TERM", "APPLIED", "LAG"):
            members.add_column(column, no_wrap=True, min_width=10)
        for member in self.members:
            role = member.role if self.leader else "?"
            style = "bold green" if role == "leader" else ("red" if not member.reachable else "")
            lag = "-" if member.lag_entries is None else str(member.lag_entries)
            shown = role if member.reachable else "unreachable"
            members.add_row(
                member.name, shown, str(member.term or "-"), str(member.applied_index or "-"), lag, style=style
            )
        lead = Text(
            f"leader {self.leader}, revision {self.revision}" if self.leader else "nobody leads",
            style="bold" if self.leader else "bold red",
        )
        return Group(jobs, transfers, pools, members, lead)

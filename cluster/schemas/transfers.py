"""Schemas of transfers: running transfers, receipts, and unexported files."""

from typing import Literal

from forebay.cluster.schemas.base import Answer, View

TransferState = Literal["queued", "moving", "retrying", "failed"]


class TransferView(View, frozen=True, kw_only=True):
    """Operation: its replicated `state`, and its agent's last reported progress, which only the leader knows.

    Counts are 0 before the first report.
    """

    job_id: int
    task: str | None = None
    """Display name of an array task, for example `10_3`."""
    attempt: int
    node: str
    stage: str
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    rate_bytes_s: float = 0.0
    updated_time: str | None = None
    """Time of the agent's report; null if none reached this leader."""
    user: str = ""
    state: TransferState = "moving"
    """queued: waits for its turn. retrying: failed, will be retried. failed: waits for a release."""
    message: str = ""
    """Message of the last failed attempt."""
    directories_done: int = 0
    retries: int = 0
    resumed_files: int = 0
    resumed_bytes: int = 0
    phase: str = ""
    """Current phase: planning, copying, verifying, committing."""
    file: str = ""
    """File being moved; shown to its user and to operators only."""
    waiting: bool = False
    """True if a rate limit delays it."""
    paused: bool = False
    """True if a rate of 0 pauses it."""
    time_left_s: float | None = None
    """Remaining time at the current rate, seconds; null if unknown."""
    order_time: str | None = None
    """Start of its attempt; null if queued."""
    transfer_limit_bytes_s: int | None = None
    user_limit_bytes_s: int | None = None
    node_limit_bytes_s: int | None = None
    """Rate limits of this transfer, of its user on the node, and of the node; null: no limit."""


class TransfersAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/transfers: running, queued and stuck transfers, by job."""

    transfers: tuple[TransferView, ...]
    truncated: bool = False
    matching: int | None = None
    """Transfers, listed or not."""
    skipped: int = 0
    """Transfers before the first listed one."""


class LeftOutView(View, frozen=True, kw_only=True):
    """File or directory that was not moved."""

    path: str
    reason: str


class ReceiptView(View, frozen=True, kw_only=True):
    """Result of one transfer attempt, as reported by the agent. Times are of the agent's clock."""

    job_id: int
    node: str
    stage: str
    attempt: int
    complete: bool
    """True if every file is in place; a failed attempt has a receipt too."""
    backends: tuple[str, ...]
    files: int
    directories: int
    links: int
    size_bytes: int
    written_bytes: int
    resumed_files: int
    resumed_bytes: int
    retries: int
    removed_files: int
    left_out: int
    left_out_first: tuple[LeftOutView, ...]
    stripped: int
    dangling: int = 0
    """Links whose target does not exist at the destination."""
    verify: str
    algorithm: str
    digest: str
    """Digest of the agent's per-file lines."""
    manifest_digest: str
    start_time: str | None
    end_time: str | None
    revision: int | None = None
    """Revision that recorded it in the ledger; null if read from the state."""


class ReceiptsAnswer(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/transfers/{id}/receipts, oldest first.

    `complete` is false if this replica lacks the beginning of the job.
    """

    job_id: int
    receipts: tuple[ReceiptView, ...]
    complete: bool = True


class CheckpointView(View, frozen=True, kw_only=True):
    """Durable part of a transfer, from which a later attempt continues."""

    stage: str
    attempt: int
    files: int
    size_bytes: int
    files_total: int
    total_bytes: int
    manifest_digest: str
    time: str | None


class NotExportedView(View, frozen=True, kw_only=True):
    """Output that was not staged out."""

    path: str
    why: str
    lost: bool
    """True if its buffer no longer exists."""


class JobTransfersView(Answer, frozen=True, kw_only=True):
    """Response of GET /v1/transfers/{id}, also part of a job's details."""

    job_id: int
    task: str | None = None
    """Display name of an array task, for example `10_3`."""
    transfer: TransferView | None = None
    """Current transfer; null for none."""
    checkpoint: CheckpointView | None = None
    receipts: tuple[ReceiptView, ...] = ()
    """Newest receipts; the ledger has all of them."""
    not_exported: tuple[NotExportedView, ...] = ()

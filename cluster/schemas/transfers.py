"""What is moved, and what was: transfers under way, receipts, what was not exported."""

from typing import Literal

from cluster.schemas.base import Answer, View

TransferState = Literal["queued", "moving", "retrying", "failed"]


class TransferView(View, frozen=True, kw_only=True):
    """One operation: as the replicas agree on it (`state`), and how far its agent last said it is, which is soft and
    known to the leader only. Counts are 0 while nobody has said anything.
    """

    job_id: int
    task: str | None = None
    """What people call the job if it is a task of an array, such as `10_3`."""
    attempt: int
    node: str
    stage: str
    files_done: int = 0
    files_total: int = 0
    bytes_done: int = 0
    bytes_total: int = 0
    rate_bytes_s: float = 0.0
    updated_time: str | None = None
    """When the agent said so; null if it has not, or not to this leader."""
    user: str = ""
    state: TransferState = "moving"
    """queued: it waits for its turn. retrying: it failed and is tried again. failed: it waits for a release."""
    message: str = ""
    """What the last failed attempt said."""
    directories_done: int = 0
    retries: int = 0
    resumed_files: int = 0
    resumed_bytes: int = 0
    phase: str = ""
    """What it is busy with: planning, copying, verifying, committing."""
    file: str = ""
    """The file that is being moved; shown to its user and to operators."""
    waiting: bool = False
    """Whether a rate holds it back."""
    paused: bool = False
    """Whether a rate of 0 has it stand still."""
    time_left_s: float | None = None
    """At its present rate, seconds; null where that cannot be said."""
    order_time: str | None = None
    """When its attempt was ordered; null for one that waits for its turn."""
    transfer_limit_bytes_s: int | None = None
    user_limit_bytes_s: int | None = None
    node_limit_bytes_s: int | None = None
    """How fast this transfer, all of its user on its node, and all on its node may go; null: without limit."""


class TransfersAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/transfers: what is under way, queued or waiting for somebody, by job."""

    transfers: tuple[TransferView, ...]
    truncated: bool = False


class LeftOutView(View, frozen=True, kw_only=True):
    """One thing that was not moved."""

    path: str
    reason: str


class ReceiptView(View, frozen=True, kw_only=True):
    """What one attempt of a transfer did, as its agent said. Times are of the agent's clock."""

    job_id: int
    node: str
    stage: str
    attempt: int
    complete: bool
    """Whether everything is where it should be; an attempt that failed has a receipt, too."""
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
    """Of `links`, those that lead to nothing at the destination."""
    verify: str
    algorithm: str
    digest: str
    """Over the lines that the agent wrote, one per file."""
    manifest_digest: str
    start_time: str | None
    end_time: str | None
    revision: int | None = None
    """Where in the ledger it stands; null where it was read from the state."""


class ReceiptsAnswer(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/transfers/{id}/receipts, oldest first.

    `complete` is false where this replica does not hold the beginning of the job.
    """

    job_id: int
    receipts: tuple[ReceiptView, ...]
    complete: bool = True


class CheckpointView(View, frozen=True, kw_only=True):
    """How much of a transfer is durable: a later attempt goes on from there."""

    stage: str
    attempt: int
    files: int
    size_bytes: int
    files_total: int
    total_bytes: int
    manifest_digest: str
    time: str | None


class NotExportedView(View, frozen=True, kw_only=True):
    """Something that the job was to stage out and has not."""

    path: str
    why: str
    lost: bool
    """Whether the buffer that held it is gone."""


class JobTransfersView(Answer, frozen=True, kw_only=True):
    """Answer of GET /v1/transfers/{id}, and part of the answer about one job."""

    job_id: int
    task: str | None = None
    """What people call the job if it is a task of an array, such as `10_3`."""
    transfer: TransferView | None = None
    """What is under way; null for nothing."""
    checkpoint: CheckpointView | None = None
    receipts: tuple[ReceiptView, ...] = ()
    """The newest of them; the ledger has all."""
    not_exported: tuple[NotExportedView, ...] = ()

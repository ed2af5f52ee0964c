"""receipt."""

from __future__ import annotations

import msgspec

from cluster.agent.transfer.options import Algorithm


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer did, in sum. What an earlier attempt had moved is in the counts, and again in `resumed`."""

    complete: bool
    """Whether everything is at its destination."""
    files: int
    directories: int
    size_bytes: int
    written_bytes: int
    """Bytes that were written, or shared by reflink: less than `size_bytes` where files have holes."""
    resumed_files: int
    resumed_bytes: int
    retries: int
    """Files that were read again because they changed or did not compare."""
    removed_files: int
    """Sources removed."""
    left_out: int
    left_out_first: tuple[tuple[str, str], ...]
    """Name, and why."""
    stripped: int
    """Files whose set-id bits were taken away."""
    verify: str
    algorithm: Algorithm
    digest: str
    """Digest over the lines, `ALGORITHM:HEX`; of what was done so far if it is not complete."""
    manifest_digest: str
    started_at: int
    """Microseconds since the epoch, by the agent's clock; so is `ended_at`."""
    ended_at: int
    lines_kept: bool
    """Whether the lines are on the agent's disk: where it was full, only their digest was taken."""

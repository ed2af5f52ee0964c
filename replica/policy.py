"""The settings that change a decision: replicated state, changed by events only (law 3)."""

from __future__ import annotations

import msgspec

from replica.values.errors import Refusal, RefusalCode
from replica.values.limits import TIME_LIMIT_S_MAX


class Policy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Site policy. Times are whole seconds; names follow burst_buffer.conf where it has one."""

    stage_in_timeout_s: int = 86_400
    stage_out_timeout_s: int = 86_400
    other_timeout_s: int = 300
    stage_retries: int = 3
    """Automatic retries of a failed stage-in, stage-out or teardown before the job is held (Slurm: none, or for
    ever).
    """
    retry_backoff_s: int = 2
    """Wait before the first retry, seconds; doubled each time up to `retry_backoff_max_s`."""
    retry_backoff_max_s: int = 300
    max_passes: int = 10
    """How often smaller requests may pass the first one that does not fit (SPUR.md, 3)."""
    staged_hold_time_s: int = 0
    """A held job's staged buffer is torn down after this many seconds; 0 never."""
    finished_jobs_kept: int = 10_000
    """Finished jobs kept in the state, newest first; the ledger keeps all."""
    allow_root: bool = False
    """Whether the user root may submit (Slurm: `User root can not allocate burst buffers`)."""
    operations_per_stage_max: int = 128
    """Stage-ins, stage-outs and teardowns at once, each (Slurm's documented limit per stage)."""
    sources: tuple[str, ...] = ()
    """Directories that jobs may stage in from; `%u` is the job's user. None: nothing may."""
    destinations: tuple[str, ...] = ()
    """Directories that jobs may stage out to and have as working directory; `%u` is the job's user."""


_BOUNDS: dict[str, tuple[int, int]] = {
    "stage_in_timeout_s": (1, TIME_LIMIT_S_MAX),
    "stage_out_timeout_s": (1, TIME_LIMIT_S_MAX),
    "other_timeout_s": (1, TIME_LIMIT_S_MAX),
    "stage_retries": (0, 1_000),
    "retry_backoff_s": (0, 86_400),
    "retry_backoff_max_s": (0, 86_400),
    "max_passes": (0, 1_000_000),
    "staged_hold_time_s": (0, TIME_LIMIT_S_MAX),
    "finished_jobs_kept": (0, 1_000_000),
    "operations_per_stage_max": (1, 10_000),
}


def check_policy(policy: Policy) -> Refusal | None:
    """Return why the policy cannot be used, or None."""
    for field, (least, most) in _BOUNDS.items():
        value = getattr(policy, field)
        if not least <= value <= most:
            return Refusal(
                RefusalCode.INVALID_FIELD,
                f"{field} is {value}",
                f"use a number from {least} to {most}",
                f"policy.{field}",
            )
    for field in ("sources", "destinations"):
        for root in getattr(policy, field):
            if not root.startswith("/") or "/../" in root + "/":
                return Refusal(
                    RefusalCode.INVALID_FIELD,
                    f"{root!r} is not an absolute directory",
                    "start it with /",
                    f"policy.{field}",
                )
    return None

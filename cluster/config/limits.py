"""Table `[limits]` of a replica's configuration: request limits per user, with defaults.

The leader counts in memory, so the limits are not replicated: write the same for each replica.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, field

from forebay.cluster.config.toml import Bytes, InvalidValue, Size
from forebay.replica.values import JOBS_UNFINISHED_MAX, SCRIPT_BYTES_MAX

COMMANDS_PER_MINUTE_MAX = 10_000_000
"""Maximum of commands_per_minute: several times the rate that all users together can reach."""

COMMAND_BYTES_MIN = 8 * 1024 * 1024
"""Minimum limit of a user's bytes per minute: the size of the largest request."""


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits per user; operators and agents are exempt.

    A request beyond a limit gets status 429 with the time of the next attempt.
    """

    commands_per_minute: Annotated[int, Meta(ge=1, le=COMMANDS_PER_MINUTE_MAX)] = 30_000
    """Commands per minute that change state, including rejected ones.

    After a pause, the same number may come at once.
    """
    bytes_per_minute: Bytes = field(default=Size(64 * 1024 * 1024), name="command_bytes_per_minute")
    """Size of these commands per minute, as sent; the ledger grows by this size."""
    jobs: Annotated[int, Meta(ge=1, le=JOBS_UNFINISHED_MAX)] = JOBS_UNFINISHED_MAX // 2
    """Unfinished jobs, counting each array task.

    The default is half of the total limit, so that no user can exclude others.
    """
    script_bytes: Bytes = field(default=Size(512 * 1024 * 1024), name="scripts")
    """Total size of the scripts of unfinished jobs, which every replica keeps in memory."""

    def __post_init__(self) -> None:
        """Check the limits.

        Raises:
            InvalidValue: A limit is below the size of one request or one script.
        """
        if self.bytes_per_minute < COMMAND_BYTES_MIN:
            remedy = f"write at least {COMMAND_BYTES_MIN // 1024**2}MiB, the maximum size of one request"
            raise InvalidValue(f"found {self.bytes_per_minute} bytes", remedy, "command_bytes_per_minute")
        if self.script_bytes < SCRIPT_BYTES_MAX:
            remedy = f"write at least {SCRIPT_BYTES_MAX // 1024}KiB, the maximum size of one script"
            raise InvalidValue(f"found {self.script_bytes} bytes", remedy, "scripts")


DEFAULT_LIMITS = LimitsConfig()

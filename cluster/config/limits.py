"""The table `[limits]` of a replica's configuration: how much one user may ask of the cluster. On unless it says more.

The replica that leads counts, in memory, so it is no part of what replicas agree on: write the same for each of them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, field

from cluster.config.toml import Bytes, InvalidValue, Size
from replica.values import JOBS_UNFINISHED_MAX, SCRIPT_BYTES_MAX

COMMANDS_PER_MINUTE_MAX = 10_000_000
"""Commands of one user in a minute, count: several times as many as all together can have settled."""

COMMAND_BYTES_MIN = 8 * 1024 * 1024
"""The least that a user may send in a minute, bytes: one request of the largest size."""


class LimitsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one user may ask for; operators and agents are not counted. Beyond it: 429, with when to come again."""

    commands_per_minute: Annotated[int, Meta(ge=1, le=COMMANDS_PER_MINUTE_MAX)] = 30_000
    """Commands that change something, whatever becomes of them; as many at once where none came before."""
    bytes_per_minute: Bytes = field(default=Size(64 * 1024 * 1024), name="command_bytes_per_minute")
    """What those take as they are sent: the ledger grows by as much."""
    jobs: Annotated[int, Meta(ge=1, le=JOBS_UNFINISHED_MAX)] = JOBS_UNFINISHED_MAX // 2
    """Jobs that are not over, each task of an array one; half of all, so that nobody keeps the others out."""
    script_bytes: Bytes = field(default=Size(512 * 1024 * 1024), name="scripts")
    """Scripts of those jobs, which every replica keeps in memory."""

    def __post_init__(self) -> None:
        """Refuse bounds that one request or one script exceeds; InvalidValue."""
        if self.bytes_per_minute < COMMAND_BYTES_MIN:
            remedy = f"write at least {COMMAND_BYTES_MIN // 1024**2}MiB, which one request may have"
            raise InvalidValue(f"found {self.bytes_per_minute} bytes", remedy, "command_bytes_per_minute")
        if self.script_bytes < SCRIPT_BYTES_MAX:
            remedy = f"write at least {SCRIPT_BYTES_MAX // 1024}KiB, which one script may have"
            raise InvalidValue(f"found {self.script_bytes} bytes", remedy, "scripts")


DEFAULT_LIMITS = LimitsConfig()

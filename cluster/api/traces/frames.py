"""Frames between a replica and its trace exporter."""

from __future__ import annotations

from typing import Final

import msgspec

from forebay.cluster.ipc import FrameCodec

_BYTES_MAX: Final = 1024

EXIT_NOT_INSTALLED: Final = 78
"""Exit code without OpenTelemetry; the process is then not restarted."""


class Leadership(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Role of the replica: the leader's exporter sends traces, the others keep them for a while."""

    leads: bool


class TraceCounts(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Traces since the start of the process, counts."""

    sent: int
    dropped: int
    waiting: int


REPLICA_CODEC: Final = FrameCodec[Leadership, TraceCounts](TraceCounts, bytes_max=_BYTES_MAX)
"""The replica's end."""

EXPORTER_CODEC: Final = FrameCodec[TraceCounts, Leadership](Leadership, bytes_max=_BYTES_MAX)
"""The exporter's end."""

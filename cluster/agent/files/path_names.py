"""Names of what an agent's directory holds (`cluster.agent.home` says what each is)."""

from __future__ import annotations

from typing import Final

BUFFERS: Final = "buffers"
OPERATIONS: Final = "operations"
STEPS: Final = "steps"
OUTBOX: Final = "outbox"
SPARE: Final = "spare"
LEFTOVERS: Final = "leftovers"
CALLS: Final = "calls"
PERSISTENT: Final = "persistent"

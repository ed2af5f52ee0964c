"""A job's script on its node: its durable record, and the supervisor that runs it, a process that outlives the agent.

No event loop is imported here, and not the supervisor: that is started as a module of this room, and starts fast."""

from cluster.agent.scripts.record import (
    OVERRUN,
    RESUME,
    SUSPEND,
    ProcessName,
    ScriptOrder,
    ScriptRecord,
    create_record,
    recorded_jobs,
    remove_record,
)

"""Job script on its node: its durable record, and the supervisor that runs it and outlives the agent.

Neither an event loop nor the supervisor is imported here: the supervisor starts as a module of its own and must start
fast.
"""

from forebay.cluster.agent.scripts.record import (
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

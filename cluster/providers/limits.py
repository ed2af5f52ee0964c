"""Limits of the providers, each with its unit and reason."""

from __future__ import annotations

from typing import Final

from forebay.replica.values import ENVIRONMENT_BYTES_MAX, ENVIRONMENT_VARIABLES_MAX

SCRIPT_BYTES_MAX: Final = 1024 * 1024
"""Size of a site's burst_buffer.lua, bytes: it is read for each call; Slurm's example has 10 KiB."""

OUTPUT_BYTES_MAX: Final = 256 * 1024
"""Output kept of one call, bytes: four times the size of a cluster's 256 pools. The rest is read and dropped, so that
it neither fills memory nor blocks the call.
"""

RETURNED_BYTES_MAX: Final = 256 * 1024
"""Result of one Lua function, bytes: the pools as JSON are the longest."""

LOGGED_BYTES_MAX: Final = 4 * 1024
"""Output of a call written to the log, bytes."""

REQUEST_BYTES_MAX: Final = 2 * 1024 * 1024
"""Request to a worker, bytes: a script (256 KiB) and an environment (64 KiB), escaped."""

ANSWER_BYTES_MAX: Final = 2 * RETURNED_BYTES_MAX
"""Answer of a worker, bytes: the result of one function, escaped."""

PATH_FILE_BYTES_MAX: Final = ENVIRONMENT_BYTES_MAX
PATH_VARIABLES_MAX: Final = ENVIRONMENT_VARIABLES_MAX
"""Variables that `paths` may add to a job's environment, bytes and count: as much as the job itself may set."""

LUA_MEMORY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Memory of one Lua script, bytes: runaway growth ends with a message instead of exhausting the node."""

TERM_GRACE_S: Final = 0.01
"""Seconds between SIGTERM and SIGKILL of a call, as in Slurm."""

KILL_ROUNDS_MAX: Final = 100
"""Rounds of finding and killing a call's processes, count: those that survive hang in the kernel."""

KILL_PAUSE_S: Final = 0.02
"""Seconds between two such rounds: the time a process needs to end."""

STATUS_ARGUMENTS_MAX: Final = 64
STATUS_ARGUMENT_BYTES_MAX: Final = 1024
"""Arguments of `bbstat`, count and bytes of each: they are typed by hand."""

LOCAL_PROGRAMS_MAX: Final = 64
"""Programs that one machine's configuration permits the site to name, count: a provider has eight, a transfer one."""

LOCAL_VARIABLES_MAX: Final = 64
"""Variables in [provider].environment for the site's programs, count."""

POOL_POLL_S: Final = 30.0
"""Seconds between two pool requests, as in Slurm."""

CALLS_IDLE_MAX: Final = 2
"""Idle workers that a replica keeps, count."""

CALLS_MAX: Final = 8
"""Concurrent calls of a replica (validation, pools, status), count: each is a process of about 20 MB."""

CALLS_WAITING_MAX: Final = 256
"""Calls waiting for a worker, count; further ones are rejected at once (law 5)."""

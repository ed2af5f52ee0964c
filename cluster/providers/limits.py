"""Limits of the providers, each with its unit and reason."""

from __future__ import annotations

from typing import Final

from forebay.replica.values import ENVIRONMENT_BYTES_MAX, ENVIRONMENT_VARIABLES_MAX

SCRIPT_BYTES_MAX: Final = 1024 * 1024
"""Size of a site's burst_buffer.lua, bytes: it is read for each call; Slurm's example has 10 KiB."""

OUTPUT_BYTES_MAX: Final = 256 * 1024
"""Output kept of one call, bytes: four times the size of a cluster's 256 pools.

Further output is read and dropped, so that it neither fills the memory nor blocks the call.
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
"""Limits of the variables that `paths` adds to a job's environment, bytes and count: those of the job itself."""

LUA_MEMORY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Memory limit of one Lua script, bytes: a runaway script fails with a message instead of exhausting the node."""

TERM_GRACE_S: Final = 0.01
"""Seconds between SIGTERM and SIGKILL of a call, as in Slurm."""

KILL_ROUNDS_MAX: Final = 100
"""Maximum number of rounds of finding and killing a call's processes; processes that survive hang in the kernel."""

KILL_PAUSE_S: Final = 0.02
"""Seconds between two rounds: the time a process needs to end."""

STATUS_ARGUMENTS_MAX: Final = 64
STATUS_ARGUMENT_BYTES_MAX: Final = 1024
"""Limits of the arguments of `bbstat`, count and bytes of each: users type them by hand."""

LOCAL_PROGRAMS_MAX: Final = 64
"""Maximum number of programs that a machine permits the site to name: a provider has eight, a transfer one."""

LOCAL_VARIABLES_MAX: Final = 64
"""Maximum number of variables in [provider].environment for the site's programs."""

POOL_POLL_S: Final = 30.0
"""Seconds between two pool requests, as in Slurm."""

CALLS_IDLE_MAX: Final = 2
"""Maximum number of idle workers that a replica keeps."""

CALLS_MAX: Final = 8
"""Maximum number of concurrent calls of a replica (validation, pools, status): each is a process of about 20 MB."""

CALLS_WAITING_MAX: Final = 256
"""Maximum number of calls that wait for a worker; further calls are rejected at once (law 5)."""

"""Every bound of the providers, with its unit and its reason."""

from __future__ import annotations

from typing import Final

from replica.values import ENVIRONMENT_BYTES_MAX, ENVIRONMENT_VARIABLES_MAX

SCRIPT_BYTES_MAX: Final = 1024 * 1024
"""A site's burst_buffer.lua, bytes: it is read anew for each call; Slurm's example has 10 KiB."""

OUTPUT_BYTES_MAX: Final = 256 * 1024
"""What is kept of what one call prints, bytes: the 256 pools that a cluster may have, four times over. The rest is read
and dropped, so that a flood neither fills memory nor stops the call."""

RETURNED_BYTES_MAX: Final = 256 * 1024
"""What one Lua function may return, bytes: the pools as JSON are the longest."""

LOGGED_BYTES_MAX: Final = 4 * 1024
"""What of a call's output goes to the log, bytes."""

REQUEST_BYTES_MAX: Final = 2 * 1024 * 1024
"""What a worker reads about its call, bytes: a script (256 KiB) and an environment (64 KiB), escaped."""

ANSWER_BYTES_MAX: Final = 2 * RETURNED_BYTES_MAX
"""What a worker answers, bytes: what one function may return, escaped."""

PATH_FILE_BYTES_MAX: Final = ENVIRONMENT_BYTES_MAX
PATH_VARIABLES_MAX: Final = ENVIRONMENT_VARIABLES_MAX
"""What `paths` may add to a job's environment, bytes and count: as much as the job itself may bring."""

LUA_MEMORY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Memory of one Lua script, bytes: a script that grows for ever ends with a message and not with the node."""

TERM_GRACE_S: Final = 0.01
"""Seconds between SIGTERM and SIGKILL of a call, as in Slurm."""

KILL_ROUNDS_MAX: Final = 100
"""How often what is left of a call is looked for and killed, count: what survives that hangs in the kernel."""

KILL_PAUSE_S: Final = 0.02
"""Seconds between two such rounds: what a process needs to be gone."""

STATUS_ARGUMENTS_MAX: Final = 64
STATUS_ARGUMENT_BYTES_MAX: Final = 1024
"""Arguments of `bbstat`, count and bytes of each: they are typed by hand."""

LOCAL_PROGRAMS_MAX: Final = 64
"""Programs that one machine's configuration lets the site's name, count: a provider has eight, a transfer one."""

LOCAL_VARIABLES_MAX: Final = 64
"""Variables that [provider].environment may set for the site's programs, count."""

POOL_POLL_S: Final = 30.0
"""Seconds between two questions for the pools, as in Slurm."""

CALLS_IDLE_MAX: Final = 2
"""Workers that a replica keeps for the next call, count."""

CALLS_MAX: Final = 8
"""Calls that a replica has under way at once (validation, pools, status), count: each is a process of about 20 MB."""

CALLS_WAITING_MAX: Final = 256
"""Calls that may wait for their turn, count; further ones are refused at once (law 5)."""

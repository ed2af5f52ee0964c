"""Every bound of the state machine, with its unit, its reason and its precedent."""

from __future__ import annotations

SCRIPT_BYTES_MAX = 256 * 1024
"""A batch script, bytes. Slurm's default is 4 MiB; scripts live in replicated memory here, and real ones stay under
64 KiB.
"""

DIRECTIVE_TEXT_BYTES_MAX = 64 * 1024
"""The text of `--bb` or a `--bbf` file, bytes: thousands of directives, far more than any job stages."""

DIRECTIVES_MAX = 1024
"""Directives in one job: one per transfer plus a few."""

TRANSFERS_PER_STAGE_MAX = 512
"""Files or directories named by one job for one stage; more belong into a directory or a list file."""

PATH_BYTES_MAX = 4095
"""A path, bytes: PATH_MAX of Linux without its terminating zero."""

NAME_CHARACTERS_MAX = 64
"""Names of pools, nodes, users, jobs and replicas, characters: what a table column and a file name still hold."""

MESSAGE_CHARACTERS_MAX = 1024
"""A message of an operation kept in the state, characters. Slurm caps SystemComment at the same length."""

ENVIRONMENT_VARIABLES_MAX = 256
ENVIRONMENT_BYTES_MAX = 64 * 1024
"""What a job may bring of its own environment: count, and bytes of names and values together."""

DEPENDENCIES_MAX = 64
"""Jobs that one job may wait for."""

RECEIPTS_MAX = 65_536
"""Answers kept for retries, count: more than a minute of retries at 1,000 commands/s; about 10 MiB of state."""

COMMANDS_PER_BATCH_MAX = 512
"""Commands in one Raft entry, count: while one is written and sent, the next is decided. Measured with 1,000 clients:
larger ones leave the leader waiting for the disk, smaller ones cost more syncs and messages than they save."""

BATCH_BYTES_MAX = 1024 * 1024
"""A batch, bytes: entries are kept under 1 MiB so that one never stalls heartbeats (hazard H26)."""

TIME_LIMIT_S_MAX = 365 * 86_400
"""A job's time limit, seconds: one year, Slurm's own horizon for starts that are not known."""

CPUS_MAX = 65_536
"""CPUs of a node or a job, count."""

PRIORITY_MAX = 2**32 - 1
"""Priority: an unsigned 32-bit number as in Slurm."""

POOLS_MAX = 256
NODES_MAX = 10_000
"""Pools and nodes known to a cluster, count: explaining why jobs wait looks at each."""

EVENTS_PER_PASS_MAX = 512
"""Events of one scheduling pass, count: with messages of full length they stay well below BATCH_BYTES_MAX. What is left
over is done by the next pass, which follows at once."""

JOBS_UNFINISHED_MAX = 100_000
"""Jobs that are not over, count; a further submit is refused. The first release is measured up to this."""

CANDIDATES_BEHIND_MAX = 500
"""Candidates behind the first in line for a pool that one pass looks at, count: whether one of them fits and may pass
is asked one by one, and with a long queue those far behind would be asked in vain (Slurm's bf_max_job_test)."""

"""Limits of the agent, each with its unit and reason."""

from __future__ import annotations

from typing import Final

DIRECTORY_DEPTH_MAX: Final = 200
"""Depth of directories in one transfer: each level costs two descriptors, and 1,024 descriptors are a common limit."""

DIRECTORY_ENTRIES_MAX: Final = 1_000_000
"""Entries of one directory, count: their names are sorted in memory, about 100 MB at this limit."""

COPY_TRIES_MAX: Final = 2
"""Attempts to read a source that changes during the copy, before the transfer fails."""

WORKERS_MAX: Final = 32
"""Concurrent operations on a node, count: each is a process with about 5 MiB of private memory. Others wait."""

PROVIDER_WORKERS_MAX: Final = 256
"""Concurrent provider operations on a node, count: they mostly wait for other systems. The leader allows 128 per stage
in the cluster, as Slurm does; only an agent that serves all nodes comes near this limit.
"""

RESULT_BYTES_MAX: Final = 64 * 1024
"""Size of a worker's result, bytes: a message has at most 1,024 characters."""

DESCRIPTORS: Final = 4_096
"""Open files of a worker, count, if the machine permits: two for each of 512 destinations, and a chain of directories
for each thread of its helpers.
"""

FILE_BYTES_MAX: Final = 2 * 1024 * 1024
"""Size of an agent's own file (order, status, report), bytes: an order has a script (256 KiB) and an environment (64
KiB), escaped.
"""

WORKER_GRACE_S: Final = 0.4
"""Seconds between SIGTERM and SIGKILL of a worker: it only removes its temporary files, and a cancellation should take
at most a second.
"""

PROVIDER_GRACE_S: Final = 5.0
"""The same for a worker that runs provider programs, which it ends first."""

KILL_WAIT_S: Final = 0.4
"""Seconds after SIGKILL until a process is considered hung in the kernel: normally it ends within milliseconds."""

ORDER_AGE_S_MAX: Final = 20.0
"""Seconds for which an order is current after the agent requested it: less than the 30 s of silence after which the
node's work may go to another one. While data moves, the agent polls twice a second.
"""

ORDER_AGE_S_MIN: Final = 2.0
"""Lower limit if that time is configured shorter: a few polls."""

HUNG_MAX: Final = 64
"""Hung workers before the node stops moving data, count: about 5 MiB each. Scripts, post-run and teardown continue."""

POLLS_PER_STALL: Final = 8
"""Checks of a transfer within its stall timeout, count: a stall is noticed at most an eighth of that time late."""

LOCK_WAIT_S: Final = 20.0
"""Seconds an operation waits for a lock held by an earlier one of its job before it fails and is ordered again. A
killed process ends sooner; one that hangs in the kernel may never end.
"""

CHECKPOINT_S: Final = 60.0
CHECKPOINT_BYTES: Final = 64 * 1024**3
"""Interval of checkpoint reports to the controller, seconds or bytes, whichever comes first: each is a ledger entry."""

ORPHAN_S: Final = 3_600.0
"""Seconds without an order after which leftovers of a transfer are removed although the job's buffer exists: longer
than any pause between two attempts. The transfer then starts over.
"""

CHECKPOINT_POLL_S: Final = 1.0
"""Seconds between two checks whether a checkpoint is due."""

KILL_ROUNDS_MAX: Final = 200
"""Rounds of finding and killing a job's processes before post-run reports one as unkillable, count."""

KILL_PAUSE_S: Final = 0.05
"""Seconds between two such rounds: the time a process needs to end."""

CGROUP_BYTES_MAX: Final = 1024 * 1024
"""Bytes read from a cgroup file: the IDs of 130,000 processes, each of which the kernel kills anyway."""

FREEZE_WAIT_S: Final = 0.4
"""Seconds a cgroup may take to freeze before its processes are killed regardless: only for kernels without cgroup.kill.
A process that hangs in the kernel never freezes.
"""

BUFFER_DEPTH_MAX: Final = 500
"""Depth of directories counted in a buffer: each level costs two descriptors. A deeper one ends the job, because files
could be hidden there.
"""

BUFFER_NICE: Final = 10
"""Niceness of the process that counts buffer usage."""

WATCH_S: Final = 1.0
WATCH_REST_TIMES: Final = 20
"""Minimum seconds between two counts of a buffer, and pause as a multiple of the last count's duration, so that
counting uses a small part of a processor (`capacity_watch.rest_s`).
"""

WATCH_TIMEOUT_S: Final = 300.0
"""Seconds after which a count is abandoned because the filesystem hangs: 10,000,000 files take a minute."""

FORK_WAIT_S: Final = 5.0
"""Seconds a fork server may take to fork before it is killed and processes are started without it: a fork takes
milliseconds, so a machine this slow hardly works.
"""

FORK_AGAIN_S: Final = 1.0
"""Minimum seconds between two starts of the fork server: one that always fails must not use up a processor."""

FORK_REQUEST_BYTES_MAX: Final = 16 * 1024
"""Size of a fork request, bytes: a module, a path (at most 4,096) and a marker. The task comes in a file of its own."""

FORK_DESCRIPTORS_MAX: Final = 16
"""Descriptors in a request, count: an operation has seven."""

SUPERVISOR_LAUNCHES_MAX: Final = 3
"""Launches of a supervisor that dies before starting the script, count."""

SYNC_WAIT_S: Final = 1.0
"""Seconds post-run waits for the script's supervisor to sync the buffer, before a worker does it."""

SUPERVISOR_POLL_S: Final = 0.05
"""Seconds between two checks for the record of a started script, while its supervisor starts."""

LOCK_RETRY_S: Final = 0.05
"""Seconds between two attempts at a lock that a dying worker still holds."""

POLL_WAIT_S: Final = 10.0
"""Seconds of a poll while no data moves: well below the 30 s of silence after which a node is marked down, even if the
polled replica hangs.
"""

POLL_WAIT_S_MAX: Final = 20.0
"""Upper limit if the replica requests longer polls because it serves many agents; it restarts the silence timeout if
that replica hangs.
"""

POLL_WHILE_MOVING_S: Final = 0.5
"""Seconds of a poll while data moves, so that progress is visible."""

FILESYSTEMS_LOOK_S: Final = 5.0
"""Seconds between two checks of the shared filesystems by a mover: a few movers request a few rows from one replica."""

GATHER_FROM: Final = 4
GATHER_S: Final = 0.01
"""Number of activities from which reports and polls wait for more of their kind, and seconds they wait: each request
costs agent and leader milliseconds of processor time. A single job never waits.
"""

START_GATHER_S: Final = 0.05
"""Seconds a script's start waits for another result: most short scripts end sooner, and both then share a request and a
ledger entry.
"""

BACK_OFF_S: Final = 0.2
BACK_OFF_S_MAX: Final = 5.0
"""First and longest wait after a failed request, seconds: short against a failover, long against a busy loop."""

REPORTS_PER_REQUEST_MAX: Final = 256
"""Reports per request, count: half a batch (replica.values.limits.COMMANDS_PER_BATCH_MAX)."""

COMMAND_AGE_S_MAX: Final = 200
"""Seconds after which a report gets a new command ID: the controller rejects IDs more than 300 s off its clock."""

RESERVE_BYTES: Final = 8 * 1024
"""Size of a reserve file for a full disk, bytes: a report has at most 1,024 characters of message, six bytes each if
escaped, and its numbers.
"""

RESERVE_FILES: Final = 64
"""Reserve files for results and locks, count: enough for 32 operations and their scripts. Acknowledged files are
reused, so a disk may stay full for any time.
"""

DISK_FULL_RETRY_S: Final = 0.2
DISK_FULL_RETRY_S_MAX: Final = 5.0
"""First and longest wait for space on a full disk, seconds: each try costs a file that cannot be written."""

DISK_FULL_WARNING_S: Final = 60.0
"""Seconds between two warnings about a full disk, which affects the whole node anyway."""

SWEEP_TIMEOUT_S: Final = 60
"""Seconds to remove leftovers of a killed stage-out, one or two directories: a hanging file server must not delay the
teardown.
"""

"""Every bound of the agent, with its unit and its reason."""

from __future__ import annotations

from typing import Final

DIRECTORY_DEPTH_MAX: Final = 200
"""Directories below each other in one transfer: each costs two descriptors, and 1,024 descriptors are a common
limit."""

DIRECTORY_ENTRIES_MAX: Final = 1_000_000
"""Entries of one directory, count: their names are sorted in memory, about 100 MB at this bound."""

COPY_TRIES_MAX: Final = 2
"""How often a source that changes under the copy is read before the transfer fails by name."""

WORKERS_MAX: Final = 32
"""Operations at once on one node, count: each is a process of about 5 MiB that it does not share; further ones
wait their turn."""

PROVIDER_WORKERS_MAX: Final = 256
"""Operations of a site's provider at once on one node, count: most of their time they wait for others. The leader
allows 128 of each stage in the whole cluster, as Slurm does: only an agent that stands for all nodes comes near it."""

RESULT_BYTES_MAX: Final = 64 * 1024
"""What a worker may say about its result, bytes: a message is at most 1,024 characters."""

DESCRIPTORS: Final = 4_096
"""Files that a worker may have open, count, if the machine lets it: two for each of 512 destinations of an order, and a
chain of directories for each of its helpers' threads."""

FILE_BYTES_MAX: Final = 2 * 1024 * 1024
"""A file of the agent's own (order, status, report), bytes: an order carries a script (256 KiB) and an environment (64
KiB), escaped."""

WORKER_GRACE_S: Final = 0.4
"""Seconds that a worker has between SIGTERM and SIGKILL: it only removes its temporary files, and cancelling is to take
no more than a second."""

PROVIDER_GRACE_S: Final = 5.0
"""The same for a worker that runs a site's programs: it ends them first."""

KILL_WAIT_S: Final = 0.4
"""Seconds after SIGKILL until a process is taken to hang in the kernel: an ordinary one is gone within milliseconds."""

ORDER_AGE_S_MAX: Final = 20.0
"""Seconds for which an order counts as standing since the agent asked for it: less than the 30 s of silence after which
a node's work may be given to another one. While data is moved the agent asks twice a second."""

ORDER_AGE_S_MIN: Final = 2.0
"""The same where that time is configured shorter: a few polls' worth."""

HUNG_MAX: Final = 64
"""Workers that hang in the kernel before no more data is moved on the node, count: about 5 MiB each. Scripts, post-run
and teardown go on."""

POLLS_PER_STALL: Final = 8
"""How often a transfer is looked at within the time that it may stand still, count: so it is late by an eighth of that
time at most."""

LOCK_WAIT_S: Final = 20.0
"""Seconds that an operation waits for what an earlier one of its job still holds, before it fails and says so: it is
ordered again. A process that was killed is gone in less, one that hangs in the kernel may never be."""

CHECKPOINT_S: Final = 60.0
CHECKPOINT_BYTES: Final = 64 * 1024**3
"""How often the controller is told what of a transfer is durable, seconds or bytes, whichever comes first: each is an
entry of the ledger."""

ORPHAN_S: Final = 3_600.0
"""Seconds after which what a transfer left is removed though the job's buffer is still there and nobody ordered
anything: longer than any pause between two tries. Then the transfer begins again instead of going on."""

CHECKPOINT_POLL_S: Final = 1.0
"""Seconds between two polls at what is moving, for that."""

KILL_ROUNDS_MAX: Final = 200
"""How often processes of a job are looked for and killed before post-run says that one cannot be killed, count."""

KILL_PAUSE_S: Final = 0.05
"""Seconds between two such rounds: what a process needs to be gone."""

CGROUP_BYTES_MAX: Final = 1024 * 1024
"""What is read of a file of a cgroup, bytes: the ids of 130,000 processes, of which each is killed in the kernel
anyway."""

FREEZE_WAIT_S: Final = 0.4
"""Seconds that a cgroup may take to stand still before its processes are killed nevertheless: only for kernels that
cannot kill one at once, and one that hangs in the kernel never stands still."""

BUFFER_DEPTH_MAX: Final = 500
"""Directories below each other in a buffer, as far as they are counted: each costs two descriptors while it is looked
into. Deeper ones, in which things could be hidden from the watch, end their job."""

BUFFER_NICE: Final = 10
"""By how much the process that counts what buffers hold gives way to others."""

WATCH_S: Final = 1.0
WATCH_REST_TIMES: Final = 20
"""Seconds between two counts of what a buffer holds, at least, and how often as long as the count before: so that
counting takes a small part of a processor (`capacity_watch.rest_s`)."""

WATCH_TIMEOUT_S: Final = 300.0
"""Seconds after which a count is given up, since the file system hangs: 10,000,000 files take a minute."""

FORK_WAIT_S: Final = 5.0
"""Seconds that a fork server may take for one process before it is killed and processes are started without it: a
fork takes milliseconds, and a machine on which it takes so long is hardly one that works."""

FORK_AGAIN_S: Final = 1.0
"""Seconds between two starts of the fork server, at least: one that cannot live must not cost a processor."""

FORK_REQUEST_BYTES_MAX: Final = 16 * 1024
"""One request to the fork server, bytes: a module, a path (4,096 at most), the mark of an operation. What is to be done
comes in a file of its own."""

FORK_DESCRIPTORS_MAX: Final = 16
"""Descriptors that come with a request, count: an operation has seven."""

SUPERVISOR_LAUNCHES_MAX: Final = 3
"""How often a supervisor that died before it started the script is launched again, count."""

SYNC_WAIT_S: Final = 1.0
"""How long post-run waits for the supervisor of the script to sync the buffer, seconds: then it has a worker do it."""

SUPERVISOR_POLL_S: Final = 0.05
"""Seconds between two polls for the record that a script was started; only while its supervisor starts up."""

LOCK_RETRY_S: Final = 0.05
"""Seconds between two tries for a lock that a dying worker of an earlier agent still holds."""

POLL_WAIT_S: Final = 10.0
"""Seconds that a poll waits while nothing is moved: well inside the 30 s after which a silent node is marked down, even
if the replica that is asked hangs."""

POLL_WAIT_S_MAX: Final = 20.0
"""The same, where the replica says that many agents ask it: then silence counts anew when that one hangs."""

POLL_WHILE_MOVING_S: Final = 0.5
"""Seconds that a poll waits while data is moved, so that progress is seen."""

PLACES_LOOK_S: Final = 5.0
"""Seconds between two looks of a mover at the places: a few movers ask one replica for a few rows."""

GATHER_FROM: Final = 4
GATHER_S: Final = 0.01
"""From how many activities on a report, and the next poll, wait for more of the kind, count, and how long, seconds:
each request costs the agent and the leader milliseconds of processor, whatever it holds. A single job waits for
none."""

START_GATHER_S: Final = 0.05
"""Seconds that the start of a script waits for another result before it is reported by itself: most short scripts end
within that, and both go in one request, and one entry of the ledger."""

BACK_OFF_S: Final = 0.2
BACK_OFF_S_MAX: Final = 5.0
"""First and longest wait after a request that failed, seconds: short against a take-over, long against a busy loop."""

REPORTS_PER_REQUEST_MAX: Final = 256
"""Reports sent at once, count: half a batch (replica.values.limits.COMMANDS_PER_BATCH_MAX)."""

COMMAND_AGE_S_MAX: Final = 200
"""Seconds after which a report gets a new command id: the controller refuses ids that are 300 s off its clock."""

RESERVE_BYTES: Final = 8 * 1024
"""Bytes of a file that is made in advance for a full disk: a report is at most 1,024 characters of message, six bytes
each where they are escaped, and its numbers."""

RESERVE_FILES: Final = 64
"""Such files that an agent keeps for results and locks, count: as many results as 32 operations and their scripts have
at once. Acknowledged ones come back, so a disk may stay full as long as it likes."""

DISK_FULL_RETRY_S: Final = 0.2
DISK_FULL_RETRY_S_MAX: Final = 5.0
"""First and longest wait for room on a full disk, seconds: a try costs a file that cannot be written."""

DISK_FULL_WARNING_S: Final = 60.0
"""Seconds between two warnings that the disk is full: what everybody on the node suffers from needs no repetition."""

SWEEP_TIMEOUT_S: Final = 60
"""Seconds for removing what a killed stage-out left in a destination: one directory or two; a file server that hangs
must not hold the teardown up."""

"""Every bound of the state machine, with its unit, its reason and its precedent."""

from __future__ import annotations

SCRIPT_BYTES_MAX = 256 * 1024
"""A batch script, bytes. Slurm's default is 4 MiB; scripts live in replicated memory here, and real ones stay under
64 KiB.
"""

SUBMITTED_SCRIPT_BYTES_MAX = 4 * 1024 * 1024
"""A batch script as submitted, bytes: Slurm's default. Scripts above SCRIPT_BYTES_MAX are packed."""

PACKED_SCRIPT_BYTES_MAX = 576 * 1024
"""A packed script, bytes: its entry stays below BATCH_BYTES_MAX with an environment and directives of full length."""

PACKED_HEAD_BYTES_MAX = 64 * 1024
"""Bytes of a packed script that stay unpacked: its first lines, which hold all directives."""

DIRECTIVE_TEXT_BYTES_MAX = 64 * 1024
"""The text of `--bb` or a `--bbf` file, bytes: thousands of directives, far more than any job stages."""

DISCLOSURE_KEY_BYTES = 32
"""Salt of a ledger's proofs, bytes: as long as the hashes that include it."""

DIRECTIVES_MAX = 1024
"""Directives in one job: one per transfer plus a few."""

DIRECTIVE_WORDS_MAX = 16 * 1024
"""Words of all directives of a text, count, with the word that begins each line: sixteen for each directive."""

TRANSFERS_PER_STAGE_MAX = 512
"""Files or directories named by one job for one stage; more belong into a directory or a list file."""

PATH_VARIABLES_MAX = 32
"""Variables that paths in directives may contain, count: a site has few directories that all jobs use."""

PATH_BYTES_MAX = 4095
"""A path, bytes: PATH_MAX of Linux without its terminating zero."""

NAME_CHARACTERS_MAX = 64
"""Names of pools, nodes, users and replicas, characters: they fit into table columns and file names."""

JOB_NAME_CHARACTERS_MAX = 255
"""The name of a job, characters: workflow managers build names from those of their processes and samples. A file name
of Linux has at most as many bytes.
"""

MESSAGE_CHARACTERS_MAX = 1024
"""A message of an operation kept in the state, characters. Slurm caps SystemComment at the same length."""

ENVIRONMENT_VARIABLES_MAX = 256
ENVIRONMENT_BYTES_MAX = 64 * 1024
"""Limits of a job's own environment: number of variables, and bytes of names and values together."""

ARGUMENTS_MAX = 256
ARGUMENTS_BYTES_MAX = 16 * 1024
"""Limits of a job script's arguments: number and total bytes. Longer lists belong in a file."""

DEPENDENCIES_MAX = 64
"""Jobs that one job may wait for."""

WHOLE_ARRAYS_MAX = 8
"""Whole arrays among the dependencies of one job: a check of all tasks of one takes a millisecond."""

RECEIPTS_KEPT_S = 600
"""Retention of the cached reply to a single command, seconds of the replicated clock: twice as long as the API accepts
the command's ID, so that every client that can still repeat the command gets its reply.
"""

RECEIPTS_PER_ACTOR_MAX = 131_072
"""Cached replies of one actor, count: 200 single commands a second for RECEIPTS_KEPT_S.

Busier clients use a session.
"""

RECEIPTS_MAX = 524_288
"""Cached replies of all actors, count: about 150 MiB of memory. Beyond RECEIPTS_LEAST, no actor may use more than a
quarter of the free entries.
"""

RECEIPTS_LEAST = 256
"""Cached replies guaranteed to each actor, count: ten minutes of interactive commands."""

RECEIPTS_STORED_MAX = 16 * RECEIPTS_MAX
"""Cached replies that a snapshot may hold, count: RECEIPTS_MAX, and RECEIPTS_LEAST for each of 30,000 users."""

RECEIPTS_DROPPED_MAX = 4_096
"""Cached replies that one batch deletes, count: eight times as many as it adds, in a few milliseconds."""

SESSIONS_MAX = 4_096
SESSIONS_PER_ACTOR_MAX = 64
SESSIONS_LEAST = 2
"""Sessions, count: of all actors, of one actor, and guaranteed to each actor."""

SESSION_IDLE_S_MAX = 3_600
"""Seconds of the replicated clock without a command after which a session ends: its program has exited, or was cut off
for longer than any client waits.
"""

SESSION_USE_STEP_S = 10
"""Precision of a session's last-use time, seconds: it is recorded once per interval, not for each command."""

SESSION_WINDOW_MAX = 2_048
"""Outstanding commands of a session, count: two bulk requests, or twice the limit of one connection."""

SESSION_OUTSTANDING_LEAST = 64
"""Outstanding commands guaranteed to each session, count, regardless of how many replies are cached."""

SESSIONS_EXPIRED_MAX = 256
"""Sessions that one command ends, count; fewer where more than RECEIPTS_DROPPED_MAX numbers are outstanding in them."""

COMMANDS_PER_BATCH_MAX = 512
"""Commands in one Raft entry, count: while one is written and sent, the next is decided. Measured with 1,000 clients:
larger entries leave the leader waiting for the disk, smaller ones cost more syncs and messages than they save. Array
tasks, and events of a command, count one by one; a single command may exceed the bound.
"""

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
"""Pools and nodes of a cluster, count: explaining why jobs wait examines each."""

FILESYSTEMS_MAX = 16
MOVERS_PER_FILESYSTEM_MAX = 64
"""Shared filesystems of a cluster and movers of one, count: each choice of a mover examines all of its filesystem's."""

EVENTS_PER_CYCLE_MAX = 64
"""Events of one scheduling cycle, count: finding and folding them takes some milliseconds, in which the leader does
nothing else. The next cycle follows at once and does the rest.
"""

JOBS_UNFINISHED_MAX = 100_000
"""Unfinished jobs, count; further submits are rejected. The first release is measured up to this."""

JOBS_IN_STATE_MAX = JOBS_UNFINISHED_MAX + 1_000_000
"""Jobs in one state, count: the unfinished ones, and the maximum of finished ones that a site may keep."""

PERSISTENT_BUFFERS_MAX = 10_000
"""Persistent buffers, count: the maximum number of nodes; sites have a few for each project."""

PERSISTENT_PER_JOB_MAX = 64
"""Persistent buffers that one job creates, destroys or uses, count of each."""

ARRAY_SIZE_MAX = 1_001
"""Task numbers of an array, count, from 0: Slurm's MaxArraySize. One entry creates all its tasks."""

ARRAY_ENTRY_BYTES_MAX = BATCH_BYTES_MAX // 2
"""The event that creates an array, bytes: values that tasks do not share, such as paths with %a, are written for each.
"""

RESTARTED_MAX = 128
"""Jobs whose operations one command restarts, count: three events each stay well below BATCH_BYTES_MAX."""

CANDIDATES_BEHIND_MAX = 500
"""Candidates behind the first in a pool's queue that one scheduling cycle examines, count: each is checked by itself,
and those far behind in a long queue seldom fit (Slurm's bf_max_job_test).
"""

SITE_USERS_MAX = 1_000
"""Users in AllowUsers or DenyUsers, count: larger groups are better expressed by accounts."""

ACCOUNTS_MAX = 4_096
QOS_MAX = 256
LICENSES_MAX = 256
RESERVATIONS_MAX = 256
"""Accounts, QOS, licences and reservations, count: sums of group limits or space examine each."""

REVOCATIONS_MAX = 4_096
"""Revoked certificates, count: those of a large site's users over some years; expired ones are deleted."""

REVOCATIONS_DROPPED_MAX = 256
"""Expired revocations that one command deletes, count: its event stays small."""

SCHEDULERS_MAX = 64
"""Other schedulers that have external jobs, count: a center has a few clusters."""

DRILLS_KEPT = 256
"""Drills in the state, count: some years of monthly ones of each kind; the ledger has all."""

RECOVERIES_KEPT = 64
"""Incarnations of a cluster in the state, count: each is a lost majority; the ledger has all."""

MEMBERS_MAX = 13
"""Members of one configuration, count: nine voters and four learners (`wal.configuration`)."""

DRILL_S_MAX = 600
"""Duration of one drill, seconds."""

DRILL_LEASE_S_LEAST = 5
"""Minimum lease of a drill, seconds: a change of leader must not end the drill."""

DRILL_FIGURES_MAX = 64
"""Measured figures of one drill, count."""

DRILL_LOCKS_MAX = 64
"""Operators who ban drills, count."""

ACCOUNT_DEPTH_MAX = 16
"""Levels of accounts, count: a site has organisation, department, group and project."""

ACCOUNT_USERS_MAX = 2_000
"""Users of one account, QOS or reservation, count: their names stay well below BATCH_BYTES_MAX."""

LIMITS_PER_RECORD_MAX = 64
"""Limits of one account, user or QOS, count: every kind for some pools."""

LICENSES_PER_JOB_MAX = 32
"""Licences of one job, count."""

NICE_MAX = 2**31 - 3
"""The largest nice value, as in Slurm."""

SKIPPED_MAX = 500
"""Blocked candidates of one queue that one scheduling cycle checks, count: limits or an upcoming reservation usually
block those behind them, too (compare CANDIDATES_BEHIND_MAX).
"""

REVOKED_PER_CYCLE_MAX = 32
"""Buffers that one scheduling cycle revokes for the first in a pool's queue, count: revoking more does not help soon.
"""

SETTINGS_MAX = 256
"""Settings in one change of the configuration, count: several times the number of keys."""

SETTING_CHARACTERS_MAX = 64 * 1024
"""Length of a configuration value, characters: SITE_USERS_MAX names of full length."""

MAIL_USER_CHARACTERS_MAX = 254
"""A mail address, characters: the limit of SMTP (RFC 5321)."""

MAILBOX_CHARACTERS_MAX = 64
"""Local part of a mail address, characters (RFC 5321)."""

MAILS_OWED_MAX = 10_000
"""Unsent mails, count: enough for a mailer outage of hours. Further mails are dropped."""

SINKS_MAX = 8
"""Event sinks, count: each is a connection of the leader, and a site has an audit store and a few monitors."""

SINK_MARKS_MAX = 2 * SINKS_MAX
"""Marks of event sinks, count: all sinks can be replaced while the marks of the former ones are still kept."""

PARTITIONS_MAX = 256
"""Partitions, count: a scheduling cycle has a queue for each, and a site has a dozen."""

PARTITION_NODES_CHARACTERS_MAX = 256 * 1024
"""Names of one partition's nodes, users or accounts, characters: the maximum number with short names, well below
BATCH_BYTES_MAX.
"""

CONSUMED_MAX = 1_000_000
"""Records of burst-buffer consumption, count: of accounts, their users and QOS in each pool."""

DEPENDENCY_CHAIN_MAX = 1_000
"""Jobs examined for a dependency cycle when the dependencies of a waiting job change, count."""

MAILS_SETTLED_MAX = 256
"""Mails that one command settles, count: a batch stays small."""

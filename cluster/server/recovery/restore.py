"""Restore of a snapshot on a new host: a replica of a new incarnation of the cluster, whose history begins with it.

For the loss of all directories, or to move a cluster. The replica is created in a directory inside its own, where a
disk may be mounted, and its parts are moved into place when complete, the data last. A crash thus leaves nothing that
could start, and the next restore begins again.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from forebay.cluster.config import FIRST_START_NAME, Config
from forebay.cluster.consensus import Seals
from forebay.cluster.server.recovery.new_incarnation import (
    MARK_BYTES,
    PLAN_DIGITS,
    RecoveryNotPossible,
    RecoveryPlan,
    begin,
)
from forebay.cluster.server.recovery.start_checks import ask_replicas
from forebay.cluster.server.storage import MEMBER_NAME
from forebay.cluster.server.tlog import SIGNING_DIRECTORY, private_key
from forebay.cluster.system import Clock, make_private_directory, replace_private
from forebay.replica.messages import RecoverCluster
from forebay.replica.model import JobState, Recovery
from forebay.replica.values import Instant
from forebay.snapshots import Image, SnapshotRefused, load_snapshot, write_snapshot
from forebay.wal import ConfigurationAt, Environment, Incarnation, Journal, Member, identity_of
from forebay.wal import directory as directories

RESTORING_NAME: Final = ".restoring"
"""Directory in which a replica is created, inside its own."""

LOST_AND_FOUND: Final = "lost+found"
"""Directory created by ext4 at the top of a disk; it is ignored."""

_SNAPSHOTS: Final = "snapshots"
_DATA: Final = "wal"

_MOVED: Final = (_SNAPSHOTS, SIGNING_DIRECTORY, MEMBER_NAME, _DATA)
"""Parts in the order in which they are moved. Without data a replica cannot start."""


async def plan_restore(config: Config, name: str, file: Path, *, clock: Clock) -> RecoveryPlan:
    """Return the restore plan of replica `name`, which has no data.

    Raises:
        RecoveryNotPossible: The replica has data, or another replica has a history.
        SnapshotRefused: The snapshot is unusable or belongs to another cluster.
    """
    return (await _looked_at(config, name, file, clock))[0]


async def restore_snapshot(
    config: Config,
    name: str,
    file: Path,
    plan_id: str,
    *,
    by: str,
    clock: Clock,
    draw: Callable[[int], bytes] = secrets.token_bytes,
) -> tuple[RecoveryPlan, Recovery]:
    """Turn a snapshot into replica `name`, a cluster of one member, by the plan with this ID.

    Also raises the exceptions of `plan_restore`, and errors of storage.

    Raises:
        RecoveryNotPossible: The plan has changed.
        OSError: The replica's files cannot be written.
    """
    plan, image, placed = await _looked_at(config, name, file, clock)
    if plan.id != plan_id:
        raise RecoveryNotPossible(
            f"the plan changed: it is {plan.id} now, but {plan_id} was confirmed; review it again"
        )
    home = config.storage.directory / name
    scratch = home / RESTORING_NAME
    directories.make(home)
    for left in (RESTORING_NAME, _SNAPSHOTS, SIGNING_DIRECTORY):
        shutil.rmtree(home / left, ignore_errors=True)
    for name_of_file in (MEMBER_NAME, FIRST_START_NAME):
        (home / name_of_file).unlink(missing_ok=True)
    make_private_directory(scratch / _SNAPSHOTS)
    write_snapshot(scratch / _SNAPSHOTS, image)
    with Environment.open(
        scratch / _DATA,
        cluster_id=config.cluster.id,
        replica=plan.member,
        map_size_bytes=config.storage.map_size_bytes,
        create=True,
    ) as environment:
        journal = Journal(environment)
        journal.set_term(image.term, None)
        journal.reset_to(image.index, image.term, image.chain_digest, image.state.revision)
        replica = config.replica(name)
        recovery = begin(
            journal,
            image.state,
            placed.configuration,
            Member(plan.member, str(replica.peer), str(replica.api)),
            RecoverCluster(draw(MARK_BYTES).hex(), plan.member, plan.members, image.index, image.index, True),
            by=by,
            at=Instant(max(clock.now(), image.state.at)),
            seals=Seals(config.cluster.id, plan.member, private_key(scratch / SIGNING_DIRECTORY)),
        )
    _write(scratch / MEMBER_NAME, f"{plan.member} {Incarnation(recovery.incarnation, recovery.mark)}\n")
    for moved in _MOVED:
        directories.sync(home)
        (scratch / moved).rename(home / moved)
    directories.sync(home)
    scratch.rmdir()
    return plan, recovery


async def _looked_at(
    config: Config, name: str, file: Path, clock: Clock
) -> tuple[RecoveryPlan, Image, ConfigurationAt]:
    home = config.storage.directory / name
    found = _in_the_way(home)
    if found:
        raise RecoveryNotPossible(
            f"{found[0]} exists: a snapshot can only be restored where {name} has no data. If it is the remaining "
            f"data of {name}, `forebay cluster recover --name {name}` keeps more than a snapshot; otherwise move "
            f"{home} away"
        )
    others = [replica for replica in config.replicas if replica.name != name]
    answers = await ask_replicas(config, name, others, clock=clock)
    for other, answer in answers.items():
        if answer.last_index:
            raise RecoveryNotPossible(
                f"{other} has a history of {answer.last_index} entries (incarnation {answer.incarnation}): let {name} "
                f"join its cluster (`{config.replica(name).add_command}`), or recover its data (`forebay cluster "
                f"recover --name {other}`)"
            )
    image = load_snapshot(file)
    if image.state.cluster_id != config.cluster.id:
        raise SnapshotRefused(
            file, f"the snapshot belongs to cluster {image.state.cluster_id}, {config.file} to {config.cluster.id}"
        )
    placed = image.configuration
    if placed is None:
        raise SnapshotRefused(file, "the snapshot does not list the members of the cluster")
    state = image.state
    jobs = dict.fromkeys((one.name for one in JobState), 0)
    for job in state.jobs.values():
        jobs[job.state.name] += 1
    member = identity_of(name, placed.configuration.version + 1)
    identity = hashlib.sha256(f"{member} {image.index} {image.chain_digest.hex()} {sorted(answers)}".encode())
    incarnation = state.recoveries[max(state.recoveries)] if state.recoveries else None
    plan = RecoveryPlan(
        id=identity.hexdigest()[:PLAN_DIGITS],
        replica=name,
        member=member,
        incarnation="1" if incarnation is None else f"{incarnation.incarnation}-{incarnation.mark}",
        members=tuple(one.id for one in placed.configuration.members()),
        known_index=image.index,
        known_revision=state.revision,
        known_at=state.at,
        kept_index=image.index,
        kept_revision=state.revision,
        kept_at=state.at,
        void_entries=0,
        jobs={word: count for word, count in jobs.items() if count},
        last_job=state.next_job - 1,
        reachable={other: answer.last_index for other, answer in answers.items()},
    )
    return plan, image, placed


def _in_the_way(home: Path) -> list[Path]:
    """Return the files in a replica's directory that prevent a restore.

    The first-start mark, files of the file system, and leftovers of an unfinished restore do not prevent it.
    """
    if not home.exists():
        return []
    allowed = {FIRST_START_NAME, LOST_AND_FOUND}
    if (home / RESTORING_NAME).exists() and not (home / _DATA).exists():
        allowed |= {RESTORING_NAME, *_MOVED}
    return [one for one in home.iterdir() if one.name not in allowed]


def _write(path: Path, text: str) -> None:
    replace_private(path, text.encode("ascii"))

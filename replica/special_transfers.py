"""What the agent moves beside files and directories: lists, Spur's commands, and what is special about one transfer.

A query over the state, part of the order of a stage-in or a stage-out of the native provider.
"""

from __future__ import annotations

import msgspec

from replica.model.buffers import Buffer
from replica.model.job_options import ListTransfer
from replica.model.jobs import Job
from replica.model.operations import Stage
from replica.model.pools import PoolUnit
from replica.model.provider import NATIVE
from replica.model.transfers import TransferChoice, choices_of
from replica.state.state import State


class SpecialTransfers(msgspec.Struct, frozen=True, kw_only=True):
    """What one order has beside its `transfers` (JSON object)."""

    lists: tuple[ListTransfer, ...] = ()
    """Transfers of what a file lists."""
    list_roots: tuple[str, ...] = ()
    """Directories that those files, and what they name outside, must lie beneath."""
    commands: tuple[str, ...] = ()
    """What the job's user has a shell do after the transfers."""
    environment: tuple[tuple[str, str], ...] = ()
    """With `commands`: what the job brought."""
    workdir_roots: tuple[str, ...] = ()
    """With `commands`: directories that the working directory must lie beneath."""
    choices: tuple[TransferChoice, ...] = ()
    """What is special about each of the order's transfers; empty: nothing about any."""
    list_choices: tuple[TransferChoice, ...] = ()
    granted: tuple[tuple[str, int], ...] = ()
    """What each persistent buffer that the job works with may hold, bytes, where its pool counts those."""


NOTHING_SPECIAL = SpecialTransfers()


def special_transfers(state: State, job: Job, buffer: Buffer | None, stage: Stage) -> SpecialTransfers | None:
    """Return what the order of this stage has beside its transfers; None for most."""
    options = state.options.get(job.id)
    asked = None if options is None else options.buffer
    moving = stage in (Stage.STAGE_IN, Stage.STAGE_OUT)
    if asked is None or buffer is None or not moving or state.site.provider != NATIVE:
        return None
    outgoing = stage is Stage.STAGE_OUT
    lists = tuple(transfer for transfer in asked.lists if transfer.outgoing == outgoing)
    commands = tuple((asked.stage_out_command if outgoing else asked.stage_in_command).splitlines())
    transfers = buffer.request.stage_out if outgoing else buffer.request.stage_in
    known = ((name, state.persistent.get(name)) for name in asked.uses)
    special = SpecialTransfers(
        lists=lists,
        list_roots=_expanded(state.policy.sources, job) if lists else (),
        commands=commands,
        environment=job.spec.environment if commands else (),
        workdir_roots=_expanded(state.policy.destinations, job) if commands else (),
        choices=choices_of(asked, stage.word, len(transfers), listed=False),
        list_choices=choices_of(asked, stage.word, len(lists), listed=True),
        granted=tuple(
            (name, found.granted_bytes)
            for name, found in known
            if found is not None and state.pool_units.get(found.pool, PoolUnit.BYTES) is PoolUnit.BYTES
        ),
    )
    return None if special == NOTHING_SPECIAL else special


def _expanded(roots: tuple[str, ...], job: Job) -> tuple[str, ...]:
    return tuple(root.replace("%u", job.spec.user) for root in roots)

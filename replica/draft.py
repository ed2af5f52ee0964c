"""A State being changed: what a batch is folded into, on mutations of the maps that it touches."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from replica import consumption, name_groups
from replica import events as e
from replica.buffers import HOLDING, Buffer, BufferInput, IllegalTransition, step
from replica.commit import Receipt
from replica.failures import LedgerViolation
from replica.features import TRANSFERS_AND_PARTITIONS
from replica.governing import TRANSFERS, counted_under
from replica.jobs import ENDED, Job
from replica.nodes import Node
from replica.options import JobOptions
from replica.policy import Policy
from replica.sites import DEFAULT_SITE, SITE_KEY, Site
from replica.state import State
from replica.state_index import Groups, is_finished
from replica.turns import takes_turn
from replica.units import Instant, Revision
from replica.use import UseKey, standing_of, use_of

_DERIVED_FROM = frozenset({"state", "node", "order_at", "stuck"})
"""Fields of a job that the derived maps depend on."""


class Draft:
    """A State being changed: mutations of its maps, folded on in place, finished into the next State in O(changes)."""

    def __init__(self, state: State) -> None:
        self._base = state
        self.cluster_id = state.cluster_id
        self.name = state.name
        self.feature_level = state.feature_level
        self.revision: int = state.revision
        self.at: int = state.at
        self.policy: Policy = state.policy
        self.next_job = state.next_job
        self.oldest_receipt = state.oldest_receipt
        self.receipts_horizon_ms = state.receipts_horizon_ms
        # Few and seldom changed: persistent maps, which can be walked while a batch is decided.
        self.pools = state.pools
        self.nodes = state.nodes
        self.sites = state.sites
        self.pool_units = state.pool_units
        self.accounts = state.accounts
        self.qos = state.qos
        self.licenses = state.licenses
        self.reservations = state.reservations
        self.scheduling_rules = state.scheduling_rules
        self.rates = state.rates
        self.revocations = state.revocations
        self.jobs = state.jobs.mutate()
        self.buffers = state.buffers.mutate()
        self.receipts = state.receipts.mutate()
        self._receipts_max: int | None = None
        self.options = state.options.mutate()
        self.persistent = state.persistent
        self.extras = state.extras.mutate()
        self.mails = state.mails
        self.partitions = state.partitions
        self.consumed = state.consumed
        self.terms = state.terms.mutate()
        self.transfer_rules = state.transfer_rules
        self.transfers = state.transfers.mutate()
        self._using = Groups(state.using)
        self.using = self._using.groups
        self.held_bytes = state.held_bytes.mutate()
        self.unfinished = state.unfinished.mutate()
        self.finished = state.finished.mutate()
        self._on_node = Groups(state.on_node)
        self.on_node = self._on_node.groups
        self._holders = Groups(state.holders)
        self.operations = state.operations.mutate()
        self.arrays = state.arrays.mutate()
        self.named = state.named.mutate()
        self.use = state.use.mutate()
        self.moving = state.moving.mutate()

    def finish(self) -> State:
        """Return the next State; the draft must not be used afterwards."""
        self._drop_receipts()
        return State(
            cluster_id=self.cluster_id,
            name=self.name,
            feature_level=self.feature_level,
            revision=Revision(self.revision),
            at=Instant(self.at),
            policy=self.policy,
            next_job=self.next_job,
            oldest_receipt=self.oldest_receipt,
            receipts_horizon_ms=self.receipts_horizon_ms,
            pools=self.pools,
            nodes=self.nodes,
            jobs=self.jobs.finish(),
            buffers=self.buffers.finish(),
            receipts=self.receipts.finish(),
            options=self.options.finish(),
            persistent=self.persistent,
            extras=self.extras.finish(),
            mails=self.mails,
            partitions=self.partitions,
            consumed=self.consumed,
            terms=self.terms.finish(),
            transfer_rules=self.transfer_rules,
            transfers=self.transfers.finish(),
            using=self.using.finish(),
            sites=self.sites,
            pool_units=self.pool_units,
            accounts=self.accounts,
            qos=self.qos,
            licenses=self.licenses,
            reservations=self.reservations,
            scheduling_rules=self.scheduling_rules,
            rates=self.rates,
            revocations=self.revocations,
            held_bytes=self.held_bytes.finish(),
            unfinished=self.unfinished.finish(),
            finished=self.finished.finish(),
            on_node=self.on_node.finish(),
            holders=self._holders.groups.finish(),
            operations=self.operations.finish(),
            arrays=self.arrays.finish(),
            named=self.named.finish(),
            use=self.use.finish(),
            moving=self.moving.finish(),
        )

    @property
    def site(self) -> Site:
        """The site's configuration, the defaults where nobody configured anything."""
        return self.sites.get(SITE_KEY, DEFAULT_SITE)

    def job(self, job_id: int) -> Job:
        """Return a job that an event names."""
        try:
            return self.jobs[job_id]
        except KeyError:
            raise LedgerViolation(f"an event names job {job_id}, which does not exist") from None

    def node(self, name: str) -> Node:
        """Return a node that an event names."""
        try:
            return self.nodes[name]
        except KeyError:
            raise LedgerViolation(f"an event names node {name!r}, which does not exist") from None

    def put(self, job: Job, buffer: Buffer | None) -> None:
        """Store a job and its buffer, and keep the derived maps true."""
        former = self.jobs.get(job.id)
        options = self.options.get(job.id)
        if options is not None:
            used = {} if former is None else use_of(former, self.buffers.get(job.id), options)
            self.count(used, use_of(job, buffer, options))
        was_on = former.node if former is not None and job.id in self.unfinished else ""
        former_stage = None if former is None else takes_turn(former, self.buffers.get(job.id))
        self.jobs[job.id] = job
        stage = takes_turn(job, buffer)
        self._count_turn(former_stage, stage)
        moved, moves = former_stage in TRANSFERS, stage in TRANSFERS
        if moved or moves:
            self._count_moving(
                job.spec.user, former.node if moved and former is not None else "", job.node if moves else ""
            )
        self._keep_name(job, former is not None and former.state not in ENDED, job.state not in ENDED)
        if buffer is not None and buffer is not (before := self.buffers.get(job.id)):
            difference = buffer.held_bytes - (0 if before is None else before.held_bytes)
            if difference:
                self.hold(buffer.pool, difference)
                self._holders.move(
                    job.id,
                    before.pool if before is not None and before.held_bytes else "",
                    buffer.pool if buffer.held_bytes else "",
                )
                if options is not None and before is not None and not buffer.held_bytes:
                    self._consume(job, before, options)
            self._count_use(before, buffer)
            self.buffers[job.id] = buffer
        over = is_finished(job, buffer)
        self._on_node.move(job.id, was_on, "" if over else job.node)
        into, out_of = (self.finished, self.unfinished) if over else (self.unfinished, self.finished)
        if job.id not in into:
            into[job.id] = True
            if job.id in out_of:
                del out_of[job.id]

    def _count_turn(self, before: e.Stage | None, after: e.Stage | None) -> None:
        if before is after:
            return
        for stage, difference in ((before, -1), (after, 1)):
            if stage is not None:
                count = self.operations.get(int(stage), 0) + difference
                if count:
                    self.operations[int(stage)] = count
                else:
                    del self.operations[int(stage)]

    def _count_moving(self, user: str, before: str, after: str) -> None:
        """Have a transfer of the user count on the node `after` instead of `before`; "" is nowhere."""
        if before == after:
            return
        for node, difference in ((before, -1), (after, 1)):
            for key in counted_under(user, node) if node else ():
                count = self.moving.get(key, 0) + difference
                if count:
                    self.moving[key] = count
                else:
                    del self.moving[key]

    def _keep_name(self, job: Job, was_there: bool, is_there: bool) -> None:
        if was_there == is_there:
            return
        user = job.spec.user
        names = self.named.get(user)
        if is_there:
            self.named[user] = name_groups.joined(names, job.spec.name, job.id)
        elif names is not None:
            names = name_groups.left(names, job.spec.name, job.id)
            if names:
                self.named[user] = names
            else:
                del self.named[user]

    def rename(self, job: Job, name: str) -> None:
        """Have a job that is not over stand under another name; its record is for the caller to change."""
        user = job.spec.user
        self.named[user] = name_groups.joined(name_groups.left(self.named[user], job.spec.name, job.id), name, job.id)

    def _consume(self, job: Job, given_back: Buffer, options: JobOptions) -> None:
        """Add what a buffer that has just given back its space has used of it."""
        standing = standing_of(job, options)
        # Not below the level that knows of it: members of an earlier release must have the same state.
        if standing is not None and self.feature_level >= TRANSFERS_AND_PARTITIONS:
            self.consumed = consumption.with_given_back(self.consumed, standing, given_back, self.at)

    def hold(self, pool: str, difference_bytes: int) -> None:
        """Have more or less of a pool held."""
        held = self.held_bytes.get(pool, 0) + difference_bytes
        if held < 0:
            raise LedgerViolation(f"pool {pool!r} would hold {held} bytes")
        if held:
            self.held_bytes[pool] = held
        elif pool in self.held_bytes:
            del self.held_bytes[pool]

    def change(self, job_id: int, happening: BufferInput | None, **changes: Any) -> None:
        """Change fields of a job; with `happening`, take its buffer through the transition table."""
        job = replace(self.job(job_id), **changes)
        if happening is None and _DERIVED_FROM.isdisjoint(changes):
            self.jobs[job_id] = job  # nothing derived depends on it
            return
        buffer = self.buffers.get(job_id)
        if happening is not None and buffer is not None:
            buffer = self.moved(buffer, happening)
        self.put(job, buffer)

    def give_options(self, job_id: int, options: JobOptions) -> None:
        """Store what a job asked for beyond its JobSpec."""
        job, buffer = self.job(job_id), self.buffers.get(job_id)
        self.count(use_of(job, buffer, self.options.get(job_id)), use_of(job, buffer, options))
        self.options[job_id] = options

    def _count_use(self, before: Buffer | None, buffer: Buffer) -> None:
        """Note that the job works with its persistent buffers from now on, or no longer."""
        options = self.options.get(buffer.job)
        was, uses = before is not None and before.state in HOLDING, buffer.state in HOLDING
        if was == uses or options is None or options.buffer is None:
            return
        for name in dict.fromkeys(options.buffer.uses):
            self._using.move(buffer.job, name if was else "", name if uses else "")

    def moved(self, buffer: Buffer, happening: BufferInput) -> Buffer:
        """Return the buffer after `happening`."""
        try:
            return replace(buffer, state=step(buffer.state, happening), changed_at=Instant(self.at))
        except IllegalTransition as error:
            raise LedgerViolation(f"job {buffer.job}: {error}") from None

    def count(self, before: dict[UseKey, int], after: dict[UseKey, int]) -> None:
        """Have the index of what counts against limits say `after` where it said `before`."""
        if before == after:
            return
        for key in before.keys() | after.keys():
            amount = self.use.get(key, 0) + after.get(key, 0) - before.get(key, 0)
            if amount:
                self.use[key] = amount
            elif key in self.use:
                del self.use[key]

    def settle(self, command_id: bytes, receipt: Receipt, receipts_max: int) -> None:
        """Keep the first answer to a command id; at the end, the oldest beyond `receipts_max` are dropped (law 6)."""
        self.receipts.add(command_id, receipt)
        self._receipts_max = receipts_max

    def _drop_receipts(self) -> None:
        dropped = None if self._receipts_max is None else self.receipts.drop_beyond(self._receipts_max)
        if dropped is not None:
            self.oldest_receipt = dropped.revision + 1
            self.receipts_horizon_ms = max(self.receipts_horizon_ms, int.from_bytes(dropped.greatest_id[:6], "big"))

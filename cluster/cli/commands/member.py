"""Commands for the cluster's replicas: members, probe, add, remove, replace, update, transfer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from enum import StrEnum

import click
import msgspec

from forebay.cluster.cli.commands.options import NAME
from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import Cell, members_table, note, present, show, show_json, table
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import ReplicaConfig
from forebay.cluster.schemas import DigestsAnswer, MembersAnswer, MemberView, StatusView, group_by_point
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import (
    Address,
    AddressError,
    start_command,
)
from forebay.replica.values import plain

DIGEST_DIGITS_SHOWN = 16
"""Digits of a digest in a table: enough to see a difference; `--json` has all 64."""


UNWITNESSED_NOTICE_S = 60.0
"""Time without cosignatures after which `probe` prints a line, seconds: longer than a witness takes to restart."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Status that one replica reported, or the error."""

    name: str
    api: str
    reachable: bool
    status: StatusView | None = None
    checkpoints: DigestsAnswer | None = None
    """Recent state digests, with --digest only; the replicas themselves compare them as well."""
    error: str | None = None


class Agreement(StrEnum):
    """Result of comparing state digests."""

    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"
    """No two replicas gave a digest of the same state."""


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Comparison of the digests of all replicas that answered."""

    agreement: Agreement
    sentence: str


def compare(answers: Iterable[ReplicaStatus]) -> Comparison:
    """Compare the replicas' digests: states at a revision or after an entry, and ledgers up to an entry."""
    answers = tuple(answers)
    stated = [(one.name, one.status) for one in answers if one.status is not None]
    kept = [(one.name, one.checkpoints) for one in answers if one.checkpoints is not None]
    of_revision = group_by_point(
        (name, {status.revision: status.state_digest}) for name, status in stated if status.state_digest is not None
    )
    after_entry = group_by_point((name, one.digests) for name, one in kept)
    of_ledger = group_by_point((name, one.ledgers) for name, one in kept)
    points = [(f"at revision {number}", of_revision[number]) for number in sorted(of_revision, reverse=True)]
    points += [(f"after entry {number}", after_entry[number]) for number in sorted(after_entry, reverse=True)]
    ledgers = [(f"up to entry {number}", of_ledger[number]) for number in sorted(of_ledger)]
    for what, (where, digests) in (*(("states", one) for one in points), *(("ledgers", one) for one in ledgers)):
        if len(set(digests.values())) > 1:
            shown = ", ".join(f"{name} {digest[:DIGEST_DIGITS_SHOWN]}" for name, digest in sorted(digests.items()))
            return Comparison(agreement=Agreement.DIFFERENT, sentence=f"the replicas' {what} differ {where}: {shown}")
    # Prefer the point with the most replicas, then the newest.
    where, digests = max(points, key=lambda point: len(point[1]), default=("", {}))
    if len(digests) > 1:
        names = ", ".join(sorted(digests))
        return Comparison(agreement=Agreement.SAME, sentence=f"{names} hold the same state {where}")
    return Comparison(
        agreement=Agreement.UNKNOWN,
        sentence="no two replicas have a digest of the same state; try again, or try when there are fewer changes",
    )


MEMBER_ANSWER_S = 2.0
"""Seconds that `cluster members` waits for a replica's own report before it shows the row without it."""


_OWN_WORD = (
    *("term", "commit_index", "applied_index", "revision"),
    *("room_bytes", "journal_fill", "sync_s", "certificate_until", "authority_until"),
)
"""Fields of a row that the replica itself reports."""


class StatusAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `cluster probe --json`."""

    replicas: tuple[ReplicaStatus, ...]
    comparison: Comparison | None = None
    """With --digest, if several replicas are probed."""


@click.command("members")
@JSON_OPTION
def list_members(as_json: bool) -> None:
    """List the replicas: role, term, commit index, lag.

    Membership and lag are as the leader sees them; each replica reports the other columns itself.
    """
    current = session()

    async def ask(client: Client) -> MembersAnswer:
        answer = await client.call(ops.LIST_MEMBERS, stale=current.stale)
        rows = await asyncio.gather(*(_add_own_report(client, member) for member in answer.members))
        return msgspec.structs.replace(answer, members=tuple(rows))

    answer = current.ask(ask, on_a_loop=True)
    if as_json:
        show_json(answer)
    else:
        _show_table(answer)


def _show_table(answer: MembersAnswer) -> None:
    show(members_table(answer.members))
    for member in answer.members:
        if member.addresses_differ:
            note(f"{member.name}: {plain(member.addresses_differ)}")


async def _add_own_report(client: Client, member: MemberView) -> MemberView:
    """Return the row with the fields that the replica itself reports, if it answers in time."""
    if not member.reachable or None not in (getattr(member, field) for field in _OWN_WORD):
        return member
    try:
        found = await client.call(ops.SHOW_STATUS, replica=Address.parse(member.api), deadline_s=MEMBER_ANSWER_S)
    except (ApiError, AddressError):
        return member
    return msgspec.structs.replace(member, **{field: getattr(found, field) for field in _OWN_WORD})


@click.command("add")
@NAME
@click.option("--peer", required=True, metavar="HOST:PORT", help="Set the address at which other replicas reach it.")
@click.option("--api", required=True, metavar="HOST:PORT", help="Set the address for clients and agents.")
@JSON_OPTION
def add(name: str, peer: str, api: str, as_json: bool) -> None:
    """Add a replica (operators).

    The new replica votes once it has caught up. After this command, add the replica to the configuration on its
    machine, with `joins = true`, and start it.
    """
    places = [str(_address("--peer", peer)), str(_address("--api", api))]
    answer = session().write(ops.ADD_MEMBER, name=name, peer=places[0], api=places[1])
    _show_members(answer, as_json, f"start it: {start_command('replica', name)}")


@click.command("remove")
@NAME
@JSON_OPTION
@confirm_first("Remove replica {name} from the cluster for good?")
def remove(name: str, as_json: bool) -> None:
    """Remove a replica for good (operators).

    A leader transfers its leadership first. The removed replica stops by itself.
    """
    answer = session().write(ops.REMOVE_MEMBER, name=name)
    _show_members(answer, as_json, f"{name} stops by itself; its directory can be deleted")


@click.command("replace")
@NAME
@JSON_OPTION
@confirm_first("Give up the data of replica {name}, which rejoins with a new ID?")
def replace(name: str, as_json: bool) -> None:
    """Let a replica that lost its data rejoin (operators).

    The replica gets a new ID, so votes and entries that it lost do not count. It votes again once it has caught up.
    """
    answer = session().write(ops.REPLACE_MEMBER, name=name)
    _show_members(answer, as_json, f"move its old directory away, then start it: {start_command('replica', name)}")


@click.command("update")
@NAME
@click.option(
    "--peer", "--raft", metavar="HOST:PORT", help="Change the address at which other replicas reach this one."
)
@click.option("--api", metavar="HOST:PORT", help="Change the address for clients and agents.")
@JSON_OPTION
def update(name: str, peer: str | None, api: str | None, as_json: bool) -> None:
    """Change a replica's addresses (operators).

    The replica keeps its ID, data and vote, and may be up or down. First issue a certificate for the new host:
    `forebay cert issue NAME --role replica --host HOST --replace`.
    """
    given = {"--peer": peer, "--api": api}
    if not any(given.values()):
        raise bad_input("no address is given", "use --peer, --api or both")
    places = {option[2:]: str(_address(option, text)) for option, text in given.items() if text is not None}
    answer = session().write(ops.UPDATE_MEMBER, name=name, **places)
    _show_members(
        answer,
        as_json,
        f"change forebay.toml as well: on {name}'s machine, then restart {name}; on the other machines, then "
        "`systemctl reload forebay-controller@REPLICA` or SIGHUP",
    )


@click.command("transfer")
@click.argument("name", required=False)
@JSON_OPTION
def transfer(name: str | None, as_json: bool) -> None:
    """Transfer the leadership (operators).

    The target is NAME, or the replica that is least behind.
    """
    answer = session().write(ops.TRANSFER_LEADERSHIP, name=name)
    present(answer, as_json, lambda: plain(f"{answer.leader or 'another replica'} leads in term {answer.term}"))


def _show_members(answer: MembersAnswer, as_json: bool, hint: str) -> None:
    if as_json:
        show_json(answer)
    else:
        _show_table(answer)
        note(hint)


def _address(option: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except AddressError as error:
        raise bad_input(f"{option}: {error.sentence}", error.remedy) from error


@click.command("probe")
@click.argument("name", required=False)
@click.option("--digest", is_flag=True, help="Also compare the digests of states and ledgers.")
@JSON_OPTION
def probe(name: str | None, digest: bool, as_json: bool) -> None:
    """Ask each replica directly for its status.

    With --digest, the digests of the replicas' ledgers and states are compared as well. States can be compared if two
    replicas have a digest of the same revision or entry. The exit code is 7 if ledgers or states differ.
    """
    current = session()
    config = current.config()
    replicas = config.replicas if name is None else (config.replica(name),)

    async def ask_all(client: Client) -> list[ReplicaStatus]:
        return await asyncio.gather(*(_ask(client, replica, digest) for replica in replicas))

    answers = current.ask(ask_all, on_a_loop=True)
    comparison = compare(answers) if digest and len(answers) > 1 else None
    if as_json:
        show_json(StatusAnswer(replicas=tuple(answers), comparison=comparison))
    else:
        columns = (
            "REPLICA",
            "ROLE",
            "READY",
            "TERM",
            "LEADER",
            "COMMIT",
            "APPLIED",
            "REVISION",
            "SNAPSHOT",
            "STATE-DIGEST",
        )
        show(
            table(
                columns,
                (_row(answer) for answer in answers),
                right=frozenset({"TERM", "COMMIT", "APPLIED", "REVISION", "SNAPSHOT"}),
            )
        )
        for answer in answers:
            if answer.status is not None and not answer.status.ready and answer.status.not_ready:
                note(f"{answer.name} is not ready: {answer.status.not_ready}")
            if answer.status is not None and answer.status.damaged_entries:
                note(f"{answer.name} has {answer.status.damaged_entries} damaged entries in its ledger; see its log")
            if answer.status is not None:
                _show_witnesses(answer.name, answer.status)
            if answer.error is not None:
                note(f"{answer.name} did not answer: {answer.error}")
            if answer.checkpoints is not None and answer.checkpoints.verdict != "agrees":
                note(f"last comparison of {answer.name} with its peers: {answer.checkpoints.verdict}")
        if comparison is not None and comparison.agreement is not Agreement.DIFFERENT:
            note(comparison.sentence)
    if comparison is not None and comparison.agreement is Agreement.DIFFERENT:
        raise Failure(
            ExitCode.VERIFICATION_FAILED,
            comparison.sentence,
            "keep the directory of the replica that differs from the majority as evidence, and bring that "
            "replica back with `forebay cluster replace`",
        )
    if not any(answer.reachable for answer in answers):
        start = ", ".join(f"`{start_command('replica', answer.name)}`" for answer in answers)
        raise Failure(
            ExitCode.UNREACHABLE, "no replica answered", f"start them with {start}, or check their api addresses"
        )


def _show_witnesses(name: str, status: StatusView) -> None:
    for witness, sentence in status.witness_disputes.items():
        note(f"THE LEDGER CONTRADICTS WHAT THE WITNESS {plain(witness)} HAS COSIGNED ({name}): {plain(sentence)}")
    for witness, sentence in status.witness_errors.items():
        note(f"{name} has no cosignature of the witness {plain(witness)}: {plain(sentence)}")
    if status.unwitnessed_s is not None and status.unwitnessed_s > UNWITNESSED_NOTICE_S:
        note(f"{name}: checkpoints have lacked the required cosignatures for {status.unwitnessed_s:.0f} s")


async def _ask(client: Client, replica: ReplicaConfig, digest: bool) -> ReplicaStatus:
    try:
        found = await client.call(ops.SHOW_STATUS, replica=replica.api, digest=digest)
    except ApiError as error:
        return ReplicaStatus(name=replica.name, api=str(replica.api), reachable=False, error=str(error))
    checkpoints = None
    if digest:
        with suppress(ApiError):
            checkpoints = await client.call(ops.LIST_DIGESTS, replica=replica.api)
    return ReplicaStatus(name=replica.name, api=str(replica.api), reachable=True, status=found, checkpoints=checkpoints)


def _row(answer: ReplicaStatus) -> tuple[Cell, ...]:
    found = answer.status
    if found is None:
        return (answer.name, "unreachable", "no", *[None] * 7)
    ready, digest = "yes" if found.ready else "no", (found.state_digest or "")[:DIGEST_DIGITS_SHOWN]
    indexes = (found.commit_index, found.applied_index, found.revision, found.snapshot_index)
    return (answer.name, found.role, ready, found.term, found.leader, *indexes, digest)

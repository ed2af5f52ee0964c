"""Operators add, remove and replace replicas: real processes, TLS and disks."""

import asyncio
import contextlib
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import API_PORT_OFFSET
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.jobs import MembersAnswer
from forebay.cluster.schemas.requests import AddMemberRequest, TransferRequest, UpdateMemberRequest
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.serve import founding_of
from forebay.cluster.server import joining
from forebay.cluster.server.storage import StorageRefused, first_start_mark, identity_of, member_note, open_storage
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.replica.state.state import EMPTY
from forebay.snapshots import Image, write_snapshot
from forebay.wal import Entry
from forebay.wal.configuration import Configuration, ConfigurationAt, Member, encode_configuration
from tests.cluster.consensus.harness import Harness
from tests.cluster.harness import PATIENCE_S, story
from tests.cluster.test_serve import ROOT, make, ready, request
from tests.ports import free_ports

ADDED = '\n[[replica]]\nname = "r4"\npeer = "{peer}"\napi = "{api}"\njoins = true\n'


class Site:
    """Cluster of three, and the actions of its operators."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = make(directory, 3)
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.said: dict[str, list[str]] = {}
        self.reading: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, *words: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "forebay.cluster.serve", "--config", str(self.config.file), "--name", name, *words,
            cwd=ROOT, stderr=asyncio.subprocess.PIPE, stdin=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.processes[name], self.said[name] = process, []
        self.reading[name] = asyncio.create_task(self._read(process, self.said[name]))

    async def _read(self, process: asyncio.subprocess.Process, lines: list[str]) -> None:
        assert process.stderr is not None
        async for line in process.stderr:
            lines.append(line.decode().rstrip())

    async def ends(self, name: str) -> tuple[int, str]:
        """Wait until a process has ended; return its exit code and its last message."""
        async with asyncio.timeout(PATIENCE_S):
            code = await self.processes[name].wait()
        await self.reading[name]
        return code, self.said[name][-1] if self.said[name] else ""

    async def kill(self, name: str) -> None:
        self.processes[name].kill()
        await self.processes[name].wait()

    def admit(self, name: str) -> tuple[Address, Address]:
        """Add the new replica to the file, and issue its certificate."""
        last = self.config.replicas[-1]
        peer, api = Address("127.0.0.1", last.peer.port + 1), Address("127.0.0.1", last.api.port + 1)
        assert api.port - peer.port == API_PORT_OFFSET
        text = self.config.file.read_text() + ADDED.format(peer=peer, api=api)
        self.config.file.write_text(text)
        directory = self.config.tls.certificates
        issue(
            load_authority(directory),
            directory,
            role=Role.REPLICA,
            name=name,
            addresses=[peer.host],
            at=SystemClock().now(),
        )
        self.config = Config.load(self.config.file)
        return peer, api

    def lose(self, name: str) -> None:
        shutil.rmtree(self.config.wal_directory(name).parent)

    def client(self, name: str = "operator") -> Client:
        return Client(self.config.endpoints, self.config.tls_files(name), clock=SystemClock())


@contextlib.asynccontextmanager
async def site_of_three(directory: Path) -> AsyncIterator[Site]:
    site = Site(directory)
    try:
        for name in ("r1", "r2", "r3"):
            await site.start(name)
        async with site.client() as client:
            await ready(client)
        yield site
    finally:
        for process in site.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*site.reading.values())


def to(heir: str, client: Client) -> TransferRequest:
    return TransferRequest(command_id=client.new_command_id(), name=heir)


async def members(client: Client, until: Callable[[MembersAnswer], bool]) -> MembersAnswer:
    """List the members until the answer is as wanted."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ApiError):
                answer = await client.call(ops.LIST_MEMBERS, deadline_s=2)
                if until(answer):
                    return answer
            await asyncio.sleep(0.05)


def voters(answer: MembersAnswer) -> list[str]:
    return [member.id for member in answer.members if member.votes]


async def code_of(work: object) -> str:
    with pytest.raises(ApiError) as error:
        await work  # type: ignore[misc]
    return error.value.code


async def changes_in_the_ledger(client: Client, config: Config, replica: str) -> list[tuple[str, str | None, str]]:
    """Return the membership changes in one replica's ledger, once it has the committed ones."""
    at = config.replica(replica).api
    async with asyncio.timeout(PATIENCE_S):
        committed = 0
        for one in config.replicas:
            with contextlib.suppress(ApiError):  # the replica was removed, and has ended
                status = await client.call(ops.SHOW_STATUS, replica=one.api, deadline_s=2)
                committed = max(committed, status.commit_index)
        while (await client.call(ops.SHOW_STATUS, replica=at)).applied_index < committed:
            await asyncio.sleep(0.02)
    entries = (
        await client.call(ops.READ_LEDGER, **{"from": 1}, limit=1000, replica=config.replica(replica).api)
    ).entries
    rows = [entry.records[0] for entry in entries if entry.kind == "configuration"]
    return [(row["change"], row["member"], row["actor"]) for row in rows]


@story
async def test_replica_is_added_and_the_leader_removed_while_commands_are_answered(tmp_path: Path) -> None:
    async with site_of_three(tmp_path) as site:
        async with site.client() as operator, site.client("alice") as alice:
            jobs = [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id]
            peer, api = site.admit("r4")

            # The replica cannot join before the cluster has added it.
            await site.start("r4", "--join")
            code, said = await site.ends("r4")
            assert code == 66 and said.startswith("forebay: ") and "forebay cluster add r4" in said, said
            assert await code_of(operator.call(ops.REMOVE_MEMBER, name="r4")) == "unknown_member"
            assert await code_of(alice.call(ops.REMOVE_MEMBER, name="r1")) == "permission_denied"

            addition = AddMemberRequest(command_id=operator.new_command_id(), name="r4", peer=str(peer), api=str(api))
            answer = await operator.call(ops.ADD_MEMBER, addition)
            assert (answer.version, voters(answer)) == (2, ["r1", "r2", "r3"])
            again = await operator.call(ops.ADD_MEMBER, addition)
            assert again.version == 2, "a retry with the same ID is the same command"
            again_new = msgspec.structs.replace(addition, command_id=operator.new_command_id())
            assert await code_of(operator.call(ops.ADD_MEMBER, again_new)) == "member_exists"
            await site.start("r4", "--join")
            await members(operator, lambda found: "r4#2" in voters(found))
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id)

            # The leader is removed: it transfers leadership first, is notified, and stops.
            leader = (await operator.call(ops.LIST_MEMBERS)).leader
            assert leader is not None
            answer = await operator.call(ops.REMOVE_MEMBER, name=leader)
            assert leader not in {member.name for member in answer.members}
            code, said = await site.ends(leader)
            assert code == 77 and f"{leader} was removed from the cluster by version 4" in said
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id)
            assert [job.job_id for job in (await alice.call(ops.LIST_JOBS)).jobs] == jobs == [1, 2, 3]
            told = await changes_in_the_ledger(operator, site.config, "r4")
            assert told[1:] == [
                ("add", "r4#2", "operator operator"),
                ("promote", "r4#2", "leader"),
                ("remove", leader, "operator operator"),
            ]
            assert told[0][:2] == ("found", None)


@story
async def test_replica_that_lost_its_disk_returns_only_by_a_replacement(
    tmp_path: Path,
) -> None:
    async with site_of_three(tmp_path) as site:
        async with site.client() as operator, site.client("alice") as alice:
            jobs = [(await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id]
            leader = (await operator.call(ops.LIST_MEMBERS)).leader
            lost = next(name for name in ("r1", "r2", "r3") if name != leader)
            await site.kill(lost)
            site.lose(lost)
            for words, remedy in (([], "forgotten votes"), (["--join"], f"forebay cluster replace {lost}")):
                await site.start(lost, *words)
                code, said = await site.ends(lost)
                assert code == 66 and remedy in said, said
            answer = await operator.call(ops.REPLACE_MEMBER, name=lost)
            assert [member.id for member in answer.members if not member.votes] == [f"{lost}#2"]
            await site.start(lost, "--join")
            await members(operator, lambda found: f"{lost}#2" in voters(found) and len(voters(found)) == 3)
            jobs.append((await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id)

            # From now on it starts under its new ID and has all data, with `--join` or without.
            for words in (["--join"], []):
                site.processes[lost].send_signal(signal.SIGTERM)
                assert (await site.ends(lost))[0] == 0
                await site.start(lost, *words)
                await members(operator, lambda found: all(member.reachable for member in found.members))
            api = site.config.replica(lost).api
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ApiError):
                        status = await operator.call(ops.SHOW_STATUS, replica=api, deadline_s=2)
                        if status.ready and status.revision == (await alice.call(ops.LIST_JOBS)).revision:
                            break
                    await asyncio.sleep(0.05)
            assert [job.job_id for job in (await alice.call(ops.LIST_JOBS)).jobs] == jobs == [1, 2]
            told = await changes_in_the_ledger(operator, site.config, lost)
            assert told[1:] == [("replace", f"{lost}#2", "operator operator"), ("promote", f"{lost}#2", "leader")]


@story
async def test_lost_disk_declared_as_first_start_is_rejected(
    tmp_path: Path,
) -> None:
    async with site_of_three(tmp_path) as site:
        async with site.client() as operator, site.client("alice") as alice:
            await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
            leader = (await operator.call(ops.LIST_MEMBERS)).leader
            assert leader is not None
            wiped = next(name for name in ("r1", "r2", "r3") if name != leader)
            await site.kill(wiped)
            site.lose(wiped)
            for words in (["--first-start"], [], ["--first-start"]):
                await site.start(wiped, *words)
                code, said = await site.ends(wiped)
                assert code == 66 and f"forebay cluster replace {wiped}" in said, said
            assert (await operator.call(ops.LIST_MEMBERS)).leader == leader
            await operator.call(ops.REPLACE_MEMBER, name=wiped)
            # The cluster's record is the permit: no option is needed.
            await site.start(wiped)
            found = await members(operator, lambda found: f"{wiped}#2" in voters(found))
            assert not any(member.forgot for member in found.members)


@story
async def test_stopping_leader_transfers_first_and_an_operator_may_choose_the_target(
    tmp_path: Path,
) -> None:
    async with site_of_three(tmp_path) as site:
        async with site.client() as operator, site.client("alice") as alice:
            before = await operator.call(ops.LIST_MEMBERS)
            heir = next(member.name for member in before.members if member.name != before.leader)
            moved = await operator.call(ops.TRANSFER_LEADERSHIP, to(heir, operator))
            assert (moved.leader, moved.term) == (heir, before.term + 1)
            assert await code_of(operator.call(ops.TRANSFER_LEADERSHIP, to(heir, operator))) == "leader"
            await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
            site.processes[heir].send_signal(signal.SIGTERM)
            code, _ = await site.ends(heir)
            assert code == 0
            assert any("leadership was transferred to" in line for line in site.said[heir])
            await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
            after = await members(operator, lambda found: found.leader not in (None, heir))
            assert after.term == before.term + 2, "one election, by the target, and none by a timeout"


def _moved(site: Site, file: Path, *names: str) -> Config:
    """Write a file in which these replicas have other addresses."""
    text = site.config.file.read_text()
    for name in names:
        row = site.config.replica(name)
        for address, port in zip((row.peer, row.api), free_ports(2), strict=True):
            text = text.replace(f'"{address}"', f'"{Address(address.host, port)}"')
    file.write_text(text)
    return Config.load(file)


async def handed_over(operator: Client, heir: str) -> str | None:
    """Return the new leader; on a busy machine the transfer may need another attempt."""
    while True:
        try:
            return (await operator.call(ops.TRANSFER_LEADERSHIP, to(heir, operator))).leader
        except ApiError as error:
            if error.code != "silent":
                raise
            await asyncio.sleep(0.1)


@story
async def test_one_replica_is_readdressed_by_command_and_all_by_their_files(tmp_path: Path) -> None:
    async with site_of_three(tmp_path) as site:
        old = site.config
        async with site.client() as operator, site.client("alice") as alice:
            await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))
            leader = (await operator.call(ops.LIST_MEMBERS)).leader
            moves = next(name for name in ("r1", "r2", "r3") if name != leader)
            # The moved replica is down and has the new file. The others have the old file and use the cluster's
            # address.
            await site.kill(moves)
            one = _moved(site, tmp_path / "one.toml", moves)
            row = one.replica(moves)
            wanted = UpdateMemberRequest(command_id=operator.new_command_id(), peer=str(row.peer), api=str(row.api))
            for _ in range(2):  # the answer was lost
                answer = await operator.call(ops.UPDATE_MEMBER, wanted, name=moves)
                assert (answer.version, voters(answer)) == (2, ["r1", "r2", "r3"])
            site.config = one
            await site.start(moves)
            found = await members(operator, lambda found: all(member.reachable for member in found.members))
            shown = next(member for member in found.members if member.name == moves)
            assert (shown.peer, shown.api) == (str(row.peer), str(row.api))
            assert "correct the file, and send this replica SIGHUP" in shown.addresses_differ
            assert await handed_over(operator, moves) == moves
            # A client that asks at an old address is redirected to the new one.
            last = old.replica(leader or "").api
            assert (await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id == 2
            assert (await operator.call(ops.SHOW_STATUS, replica=last)).leader == moves

        for name in ("r1", "r2", "r3"):
            site.processes[name].send_signal(signal.SIGTERM)
            assert (await site.ends(name))[0] == 0
        site.config = _moved(site, tmp_path / "all.toml", "r1", "r2", "r3")
        for name in ("r1", "r2", "r3"):
            await site.start(name)
        async with site.client() as operator, site.client("alice") as alice:
            found = await members(operator, lambda found: all(member.reachable for member in found.members))
            for member in found.members:
                row = site.config.replica(member.name)
                command = f"forebay cluster update {member.name} --peer {row.peer} --api {row.api}"
                assert (member.peer, member.api) == (str(row.peer), str(row.api))
                assert command in member.addresses_differ
            assert (await alice.call(ops.SUBMIT_JOB, request(alice, tmp_path))).job_id == 3
            for name in ("r1", "r2", "r3"):
                row = site.config.replica(name)
                body = UpdateMemberRequest(command_id=operator.new_command_id(), peer=str(row.peer), api=str(row.api))
                answer = await operator.call(ops.UPDATE_MEMBER, body, name=name)
            assert not any(member.addresses_differ for member in answer.members)
            body = msgspec.structs.replace(body, command_id=operator.new_command_id())
            assert await code_of(operator.call(ops.UPDATE_MEMBER, body, name="r3")) == "same_addresses"
            assert await code_of(alice.call(ops.UPDATE_MEMBER, body, name="r3")) == "permission_denied"
            told = await changes_in_the_ledger(operator, site.config, "r1")
            assert told[1:] == [("update", name, "operator operator") for name in (moves, "r1", "r2", "r3")]


def test_h13_members_come_from_snapshot_and_ledger_and_unapplied_ones_from_the_journal(tmp_path: Path) -> None:
    config = make(tmp_path, 3)
    storage = open_storage(config, "r1")
    assert (storage.identity, storage.configuration) == ("r1", None)
    founders = founding_of(config, "r1")
    first = msgspec.structs.replace(founders, version=1)
    second = Configuration(2, founders.voters, (Member("r4#2"),), founders.change)
    third = Configuration(3, (*founders.voters, Member("r4#2")), (), founders.change)
    journal = storage.journal
    journal.set_term(1, "r1")
    entries = [Entry(index, 1, encode_configuration(one)) for index, one in enumerate((first, second, third), start=1)]
    journal.append(entries)
    journal.set_commit(2)
    for entry in entries[:2]:
        journal.record_applied(entry, 0)
    journal.sync()
    write_snapshot(
        storage.snapshots.directory, Image(EMPTY, 1, 1, journal.digest_at(1) or b"", ConfigurationAt(1, first))
    )
    storage.close()
    for replayed in (1, 2):
        storage = open_storage(config, "r1")
        assert (storage.replayed, storage.configuration) == (replayed, ConfigurationAt(2, second))
        engine = Harness(3, bootstrap=founders, configuration=storage.configuration, journal=storage.journal).engine
        assert engine.configuration == third, "appended, not applied, and in force"
        storage.close()
        for path in config.snapshot_directory("r1").iterdir():
            path.unlink()


def test_id_of_a_joined_replica_is_noted_and_a_foreign_note_is_rejected(tmp_path: Path) -> None:
    config = make(tmp_path, 3)
    assert identity_of(config, "r2") == "r2"
    note = member_note(config, "r2")
    note.write_text("r2#6\n")
    storage = open_storage(config, "r2")
    assert storage.identity == "r2#6"
    assert not founding_of(config, storage.identity).voters, "the replica counts no voters before it learns them"
    storage.close()
    for text in ("r3#6", "", "r2" + "#" * 200):
        note.write_text(text)
        with pytest.raises(StorageRefused, match="not an ID of replica r2"):
            open_storage(config, "r2")
    note.unlink()
    with pytest.raises(StorageRefused, match=r"is of r2#6\)"):
        open_storage(config, "r2")


@pytest.mark.parametrize("text", [b"r2#6\n", b"r\xb2#6\n", b"r3#6\n"])
def test_replica_that_lost_its_data_joins_under_no_former_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    config = make(tmp_path, 3)
    shutil.rmtree(config.wal_directory("r2"), ignore_errors=True)
    first_start_mark(config, "r2").unlink(missing_ok=True)
    member_note(config, "r2").write_bytes(text)

    async def ask(config: Config, name: str, clock: object, deadline_s: float) -> str:
        return "r2#6"

    monkeypatch.setattr(joining, "_ask", ask)
    with pytest.raises((joining.JoiningRefused, StorageRefused), match="forebay cluster replace"):
        asyncio.run(joining.join(config, "r2", clock=SystemClock()))
    assert member_note(config, "r2").read_bytes() == text
    assert not first_start_mark(config, "r2").exists()

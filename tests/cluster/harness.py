"""One replica in the test's own loop: real storage, controller and API over TLS; consensus is real, or a double."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import aiohttp
import msgspec
import uvloop

from forebay.cluster.api import ApiService, ApiWorkers, LocalBackend, Server
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, PoolSpec, create_site
from forebay.cluster.consensus import ChangeRefused, ClockBounds, Machine, MemberChange, NotLeader, Role
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.schemas.jobs import StatusView
from forebay.cluster.security.identity import Role as CertificateRole
from forebay.cluster.security.peers import Peers
from forebay.cluster.security.pki import issue, load_authority
from forebay.cluster.security.tls import client_context, server_context
from forebay.cluster.server.applied_log import AppliedEntry
from forebay.cluster.server.controller import Controller
from forebay.cluster.server.storage import Storage, allow_first_start, open_storage
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import Clock, SystemClock
from forebay.cluster.system.eventloop import Identities
from forebay.cluster.system.eventloop.slices import SlicedWork
from forebay.replica.messages import features
from forebay.wal import Journal, no_op_of
from forebay.wal.configuration import Configuration, Member, initial
from forebay.wal.journal import Entry
from tests.ports import free_port

PATIENCE_S = 60.0
"""How long a test waits for what normally takes milliseconds, on a machine that does other things as well."""

SCRIPT = "#!/bin/sh\n#DW jobdw capacity=16MiB access_mode=striped type=scratch\ntrue\n"
PLAIN = "#!/bin/sh\ntrue\n"

_T = TypeVar("_T")


def story(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an asynchronous test, on the event loop that a replica runs on."""

    @functools.wraps(test)
    def run(*arguments: Any, **fixtures: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(PATIENCE_S * 3):
                await test(*arguments, **fixtures)

        uvloop.run(bounded())

    return run


def make_cluster(directory: Path, replicas: int = 1) -> Config:
    """Write a cluster's configuration and certificates; addresses are set for each test."""
    founding = Founding(
        name="test",
        replicas=replicas,
        agents=2,
        pools=(PoolSpec("fast", "96MiB", "8MiB", True), PoolSpec("wide", "256MiB", "32MiB")),
        users=("alice", "bob"),
        source_roots=(directory / "in",),
        destination_roots=(directory / "out",),
        allow_root=True,
    )
    config = create_site(directory, founding, clock=SystemClock())
    authority, at = load_authority(config.tls.authority.parent), SystemClock().now()
    issue(authority, config.tls.certificates, role=CertificateRole.SCHEDULER, name="slurm", at=at)
    issue(authority, config.tls.certificates, role=CertificateRole.AUDITOR, name="auditor", at=at)
    issue(authority, config.tls.certificates, role=CertificateRole.MONITOR, name="prometheus", at=at)
    issue(authority, config.tls.certificates, role=CertificateRole.DRILL, name="dora", at=at)
    issue(authority, config.tls.certificates, role=CertificateRole.HELPER, name="h1", at=at)
    return config


def placed(config: Config, directory: Path) -> Config:
    """Return the configuration with storage of its own and free ports."""
    replicas = tuple(
        msgspec.structs.replace(replica, peer=Address("127.0.0.1", free_port()), api=Address("127.0.0.1", free_port()))
        for replica in config.replicas
    )
    storage = msgspec.structs.replace(config.storage, directory=directory, map_size_bytes=256 * 1024 * 1024)
    moved = msgspec.structs.replace(config, replicas=replicas, storage=storage)
    for replica in moved.replicas:
        allow_first_start(moved, replica.name)
    return moved


class SingleEngine:
    """Consensus of one, without peers: commits when told to, or by itself in the next turn of the loop."""

    def __init__(
        self, journal: Journal, machine: Machine, on_change: Callable[[], None], me: str, *, automatic: bool = True
    ) -> None:
        self.journal = journal
        self.machine = machine
        self.on_change = on_change
        self.me = me
        self.automatic = automatic
        self.role = Role.FOLLOWER
        self.leader: str | None = None
        self.ready = False
        self.compacted: list[int] = []
        self.confirmations = 0
        self.clock: Clock = SystemClock()
        self.off = False
        """Whether this replica's own wall clock is off from a majority's."""
        self.bounds: ClockBounds | None = None
        """What a majority's wall clocks say; None: what this replica's own does."""
        self.questions: list[bytes] = []
        """What this replica, while it follows, asked its leader, with the news."""
        self.answers_reads: int | None = None
        """What the leader answers; None: it does not."""
        self.takes_s: float | None = None
        """What its disk takes for a sync, seconds."""
        self.confirms = True
        """Whether a majority answers; False: confirm_leadership waits for ever."""

    @property
    def term(self) -> int:
        return self.journal.term

    @property
    def commit_index(self) -> int:
        return self.journal.applied_index

    @property
    def applied_index(self) -> int:
        return self.journal.applied_index

    @property
    def last_index(self) -> int:
        return self.journal.last_index

    @property
    def configuration(self) -> Configuration:
        return initial((Member(self.me),), version=1)

    @property
    def sync_s(self) -> float | None:
        return self.takes_s

    @property
    def clock_off(self) -> bool:
        return self.off

    @property
    def clock_bounds(self) -> ClockBounds:
        return self.bounds or ClockBounds(self.clock.now(), self.clock.now())

    def change(self, wanted: MemberChange) -> tuple[int, int]:
        raise ChangeRefused("alone", "this replica is alone", "use a real one")

    def reach_at(self, members: Mapping[str, str]) -> None:
        pass

    def address_of(self, name: str) -> str | None:
        return None

    def promotable(self) -> str | None:
        return None

    def unrecorded(self) -> None:
        return None

    async def transfer(self, target: str | None = None) -> str | None:
        raise ChangeRefused("no_heir", "this replica is alone", "use a real one")

    def propose(self, data: bytes) -> tuple[int, int]:
        if self.role is not Role.LEADER:
            raise NotLeader(self.leader)
        entry = Entry(self.journal.last_index + 1, self.term, data)
        self.journal.append([entry])
        if self.automatic:
            asyncio.get_running_loop().call_soon(self.commit)
        return entry.index, entry.term

    def commit(self, count: int = 1_000_000) -> None:
        """Commit and apply the next entries."""
        self.journal.sync()
        while count and self.journal.applied_index < self.journal.last_index:
            entry = self.journal.entry(self.journal.applied_index + 1)
            if not self.machine.apply(entry.index, entry.term, entry.data):
                count -= 1
            elif self.automatic:
                asyncio.get_running_loop().call_soon(self.commit)
                return

    @property
    def uncommitted(self) -> int:
        """Entries proposed and not applied."""
        return self.journal.last_index - self.journal.applied_index

    def lead(self) -> None:
        """Win an election: a new term, whose first entry is applied."""
        self.journal.set_term(self.journal.term + 1, self.me)
        self.role, self.leader, self.ready = Role.LEADER, self.me, False
        self.on_change()
        self.journal.append([Entry(self.journal.last_index + 1, self.term, no_op_of(self.me))])
        self.commit()
        self.ready = True
        self.on_change()

    def depose(self, leader: str | None = None, *, lose: bool = True) -> None:
        """Lose the leadership; with `lose` the entries that were not committed are lost too."""
        self.role, self.leader, self.ready = Role.FOLLOWER, leader, False
        if lose:
            self.journal.truncate_from(self.journal.applied_index + 1)
        self.on_change()

    async def confirm_leadership(self) -> int:
        self.confirmations += 1
        if self.role is not Role.LEADER:
            raise NotLeader(self.leader)
        if not self.confirms:
            await asyncio.Event().wait()
        return self.commit_index

    async def read_index(self, news: bytes) -> int:
        self.questions.append(news)
        if self.answers_reads is None:
            raise NotLeader(self.leader)
        return self.answers_reads

    def peers(self) -> list[Any]:
        return []

    def compact_to(self, index: int) -> None:
        self.compacted.append(index)
        self.journal.compact_to(index)

    async def start(self) -> None:
        self.lead()

    async def stop(self) -> None:
        self.role, self.ready = Role.FOLLOWER, False


class Answer(NamedTuple):
    """What came back."""

    status: int
    body: Any
    headers: dict[str, str]

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])

    @property
    def sentence(self) -> str:
        return str(self.body["error"]["sentence"])

    @property
    def remedy(self) -> str:
        return str(self.body["error"]["remedy"])

    @property
    def place(self) -> str:
        return str(self.body["error"]["place"])

    @property
    def revision(self) -> int:
        return int(self.headers["Forebay-Revision"])


class Harness:
    """The replica and whoever asks it."""

    api_workers = 0
    """Processes that serve clients in front of it; 0: it does so itself."""

    def __init__(
        self, config: Config, *, automatic: bool = True, clock: Clock | None = None, raises: bool = True
    ) -> None:
        self.config = config
        self.raises = raises
        """Whether the new cluster is raised to the level that this release knows, as its leader does by itself."""
        self.clock = clock or SystemClock()
        self.certificate_clock: Clock = self.clock
        """What certificates of open connections are compared with."""
        self.bounds: ClockBounds | None = None
        """What a majority's wall clocks say when this replica starts; None: what its own does."""
        self.automatic = automatic
        self.failures: list[BaseException] = []
        self.accounts: dict[str, int] = {}
        """The accounts of this replica's machine and their numbers, whatever those of the tests' are."""
        self.statuses: dict[str, StatusView] = {}
        """What peers say when they are asked for their status; who is not named does not answer."""
        self._sessions: dict[str, aiohttp.ClientSession] = {}

    async def _status_of(self, peer: str) -> StatusView:
        return self.statuses[peer]

    def fail(self, error: BaseException) -> NoReturn:
        self.failures.append(error)
        raise error

    async def __aenter__(self) -> Harness:
        await self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def open(self, *, founded: bool = True) -> None:
        self.storage: Storage = open_storage(self.config, "r1")

        def make_engine(machine: Machine, on_change: Callable[[], None], stop: Any) -> SingleEngine:
            engine = SingleEngine(self.storage.journal, machine, on_change, "r1", automatic=self.automatic)
            engine.clock, engine.bounds = self.clock, self.bounds
            return engine

        self.controller = Controller(
            name="r1",
            config=self.config,
            storage=self.storage,
            make_engine=make_engine,
            clock=self.clock,
            fail=self.fail,
            ask=self._status_of,
            raises_level=self.raises,
        )
        engine = self.controller.engine
        assert isinstance(engine, SingleEngine)
        self.engine = engine
        peers = Peers(self.config.cluster.id, self.certificate_clock)
        self.service = ApiService(self.controller, version="test", fail=self.fail, peers=peers)
        self.service.identities = Identities(self.controller.clock, lookup=self.accounts.get)
        replica = self.config.replica("r1")
        core, files = LocalBackend(self.service), self.config.tls_files("r1")
        self.core, required = core, not self.config.access.munge
        self.server: Server | ApiWorkers = (
            ApiWorkers(core, count=self.api_workers, api=replica.api, channel=replica.channel, files=files)
            if self.api_workers
            else Server(core, address=replica.api, tls=lambda: server_context(files, required=required))
        )
        await self.server.start()
        self.service.peers.start()
        await self.controller.start()
        if founded and self.controller.state.revision == 0:
            await until(lambda: self.engine.uncommitted > 0 or self.controller.state.revision > 0)
            self.engine.commit()
            await until(lambda: self.controller.state.revision > 0)
            while self.raises and (level := self.controller.state.feature_level) < features.FEATURE_LEVEL_KNOWN:
                await until(lambda: self.engine.uncommitted > 0 or self.controller.state.feature_level > level)
                self.engine.commit()
                await until(lambda: self.controller.state.feature_level > level)

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()
        self.service.peers.stop()
        self.service.wake()
        await self.server.stop()
        await self.service.providing.close()
        await self.service.past.stop()
        await self.controller.stop()
        assert not self.failures, self.failures

    async def restart(self) -> None:
        """Stop and start again on the same files."""
        await self.close()
        await self.open()

    def session(self, who: str) -> aiohttp.ClientSession:
        if who not in self._sessions:
            context = client_context(self.config.tls_files(who))
            self._sessions[who] = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0))
        return self._sessions[who]

    @property
    def url(self) -> str:
        return self.config.replica("r1").api.url

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        who: str = "operator",
        data: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Answer:
        """Send one request without following redirects."""
        payload = data if data is not None else (None if body is None else json.dumps(body).encode())
        sent = {"Content-Type": "application/json", **(headers or {})} if payload is not None else headers
        async with self.session(who).request(
            method, self.url + path, data=payload, headers=sent, allow_redirects=False
        ) as response:
            content = await response.read()
            kind = response.headers.get("Content-Type", "")
            found = json.loads(content) if content and kind.startswith("application/json") else content
            return Answer(response.status, found, dict(response.headers))

    @property
    def work(self) -> SlicedWork:
        """What long work of a test goes through."""
        return self.service.slices.work("test")

    async def applied(self, first: int = 1) -> list[AppliedEntry]:
        """Return the applied entries from index `first` on, from memory or from the ledger."""
        applied_log = self.controller.applied_log
        return [applied async for applied in applied_log.walk(first, applied_log.last_index, self.work)]

    def new_id(self) -> str:
        return new_command_id(self.clock)

    def job(self, **changes: Any) -> dict[str, Any]:
        """Return the body of a submission that is accepted."""
        workdir = str(self.config.file.parent / "out")
        body: dict[str, Any] = {
            "command_id": self.new_id(),
            "script": SCRIPT,
            "name": "job",
            "time_limit_s": 60,
            "workdir": workdir,
        }
        return {**body, **changes}

    async def submit(self, *, who: str = "alice", **changes: Any) -> Answer:
        return await self.ask("POST", "/v1/jobs", self.job(**changes), who=who)


async def compared(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """Ask for a history until it is complete: an index that was found at a start is compared with the ledger first."""
    async with asyncio.timeout(PATIENCE_S):
        while not (answer := await ask()).body["complete"]:
            await asyncio.sleep(0.05)
    return answer


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.002)

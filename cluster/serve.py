"""Process of one replica: `python -m cluster.serve --config forebay.toml --name r1`.

Exit codes: 0 stopped on request, 64 wrong usage, 66 unusable storage, 69 unusable address, 70 stopped itself (law 10),
76 an entry needs a later release, 77 no longer a member, 78 unusable configuration or certificate. Each code except 0
comes with one sentence on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import uvloop

from forebay.cluster.api import ApiService, ApiWorkers, ChannelServer, LocalBackend, Server
from forebay.cluster.config import AGREED, Config, ConfigError, Reloader, ReplicaConfig
from forebay.cluster.consensus import (
    Consensus,
    Engine,
    HistoryElsewhere,
    IncarnationOver,
    LostDurableState,
    Machine,
    RemovedFromCluster,
    Seals,
    Timing,
)
from forebay.cluster.peer_calls import PeerCalls
from forebay.cluster.providers.calls import PoolWatch
from forebay.cluster.security import Credentials, Peers, TlsError, until_valid
from forebay.cluster.server import (
    Backfill,
    Checkpoints,
    Controller,
    JoiningRefused,
    Pruner,
    Scrub,
    Storage,
    StorageRefused,
    has_joined,
    is_joining,
    is_permitted,
    join,
    note_forgotten,
    note_superseded,
    open_storage,
)
from forebay.cluster.server.mail import DrillReminder, Mailer, post_of, sender_of
from forebay.cluster.server.recovery import refuse_beside_history, refuse_incarnation_over
from forebay.cluster.server.tlog import SIGNING_DIRECTORY, private_key
from forebay.cluster.system import (
    EXIT_CONFIGURATION,
    LEVELS,
    READY,
    STOPPING,
    Clock,
    Collector,
    SystemClock,
    about,
    begin_logging,
    leave_when_terminated,
    say_at_last,
    tell_manager,
)
from forebay.cluster.system.eventloop import Identities, Watchdog, stop_on_signals
from forebay.replica.messages import ReleaseNeeded
from forebay.snapshots import SnapshotFailed
from forebay.wal import (
    BrokenInvariant,
    Configuration,
    Environment,
    Member,
    RecoveryRefused,
    StorageFailed,
    initial,
    unknown,
)

_T = TypeVar("_T")

LOGGER = logging.getLogger("forebay.cluster.serve")  # not __main__, whichever way it is started

EXIT_OK = 0
EXIT_USAGE = 64
EXIT_STORAGE_REFUSED = 66
EXIT_ADDRESS_UNUSABLE = 69
EXIT_STOPPED_ITSELF = 70
EXIT_RELEASE_NEEDED = 76
EXIT_NOT_A_MEMBER = 77

_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (ReleaseNeeded, EXIT_RELEASE_NEEDED),
    (HistoryElsewhere, EXIT_STORAGE_REFUSED),
    (RemovedFromCluster, EXIT_NOT_A_MEMBER),
    (IncarnationOver, EXIT_NOT_A_MEMBER),
)
"""Exit codes of a replica that stops itself for a reason that a restart by a service manager cannot remedy."""

COMMIT_NOTICE_SHARE = 0.1
"""Maximum delay of a commit notice to followers, as a share of a heartbeat, so that their state rarely lags."""

SWITCH_S = 0.001
"""Maximum time the loop waits for the interpreter while a thread computes, seconds: a fifth of Python's default."""

OPEN_FILES = 16_384
"""Limit on open files, count, as far as the machine permits: connections to API and channel, and the replica's own
files. The default of a process is 1,024.
"""

APPLIED = ("replicas", "mail", "drill", "limits", "witnesses", "checkpoints", "traces", "sinks")
"""Fields of the configuration that a replica applies at SIGHUP."""

RESTARTED = ("cluster", "replicas", "tls", "storage", "timing", "provider")
"""Fields that take effect at its next start; of `replicas`, only its own row."""


class StartRefused(Exception):
    """Replica that cannot start; `code` is the exit code."""

    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def fail_stop(error: BaseException) -> NoReturn:
    """End this process at once, with one sentence: it must make no further promises (law 10).

    Exit codes: EXIT_RELEASE_NEEDED if only the release is too old, EXIT_STORAGE_REFUSED if the replica lacks its peers'
    history, EXIT_NOT_A_MEMBER if the cluster continues without it, otherwise EXIT_STOPPED_ITSELF.
    """
    LOGGER.critical("stopping: %s", error, exc_info=error)
    logging.shutdown()
    say_at_last(f"forebay: this replica stops itself: {type(error).__name__}: {error}")
    os._exit(next((code for kind, code in _CODES if isinstance(error, kind)), EXIT_STOPPED_ITSELF))


def timing_of(config: Config) -> Timing:
    """Return the timing of consensus from the configuration.

    Raises:
        ConfigError: No leader could stay in office with these timeouts.
    """
    timing = config.timing
    try:
        return Timing(
            election_min_s=timing.election_min_s,
            election_max_s=timing.election_max_s,
            heartbeat_s=timing.heartbeat_s,
            commit_notice_s=min(Timing().commit_notice_s, COMMIT_NOTICE_SHARE * timing.heartbeat_s),
        )
    except ValueError as error:
        raise ConfigError(config.file, "timing", str(error), "use election timeouts of several heartbeats") from error


def release() -> str:
    """Return the version of the installed release."""
    try:
        return version("forebay")
    except PackageNotFoundError:
        return "unknown"


def mail_duties(controller: Controller, config: Callable[[], Config]) -> tuple[Mailer, DrillReminder]:
    """Return the duties that send mail while this replica leads, by the current settings of its own file."""
    identities = Identities(controller.clock)

    async def is_user(name: str) -> bool:
        # The name service accepts a number as a user ID.
        return not name.isdigit() and (await identities.uids((name,)))[name] is not None

    mailer = Mailer(
        state=lambda: controller.state,
        leads=lambda: controller.leads,
        submit=controller.submit,
        sender=lambda state: sender_of(config().mail, state.name, state.cluster_id, is_user),
        clock=controller.agreed,
    )
    reminder = DrillReminder(
        state=lambda: controller.state,
        config=lambda: config().drill,
        post=lambda: post_of(config().mail, is_user),
        clock=controller.agreed,
    )
    return mailer, reminder


def founding_of(config: Config, identity: str) -> Configuration:
    """Return the membership a replica assumes until its journal has one: the founders, or unknown if it joins."""
    if identity not in {replica.name for replica in config.founders}:
        return unknown()
    return initial(tuple(Member(one.name, str(one.peer), str(one.api)) for one in config.founders))


def _member_of(storage: Storage) -> Member | None:
    """Return this replica's entry in the last applied configuration; None before there is one."""
    placed = storage.configuration
    return None if placed is None else placed.configuration.by_id(storage.identity)


def _open(config: Config, me: ReplicaConfig, *, first_start: bool) -> Storage:
    """Open a replica's storage and rebuild its state.

    Raises:
        StartRefused: The storage cannot be used.
    """
    no_founder = StartRefused(
        f"replica {me.name} is not a founder; add it with `forebay cluster add`, then start it", EXIT_STORAGE_REFUSED
    )
    if me.joins and first_start:
        raise no_founder
    try:
        storage = open_storage(config, me.name, first_start=first_start)
    except (RecoveryRefused, StorageRefused, StorageFailed, SnapshotFailed, BrokenInvariant) as error:
        raise StartRefused(str(error), EXIT_STORAGE_REFUSED) from error
    except ReleaseNeeded as error:
        raise StartRefused(str(error), EXIT_RELEASE_NEEDED) from error
    if me.joins and storage.identity == me.name:
        storage.close()
        raise no_founder
    LOGGER.info(
        "revision %d, entry %d, %d replayed",
        storage.state.revision,
        storage.index,
        storage.replayed,
        extra=about(revision=storage.state.revision),
    )
    return storage


def _engine(
    config: Config,
    name: str,
    storage: Storage,
    seals: Seals,
    machine: Machine,
    on_change: Callable[[], None],
    stop: Callable[[BaseException], NoReturn],
    **more: Any,
) -> Engine:
    """Return the consensus of a replica that continues from its storage; `more` are arguments of `Consensus`."""

    def stop_for(error: BaseException) -> NoReturn:
        if isinstance(error, LostDurableState):
            note_forgotten(config, name, str(error))
        if isinstance(error, IncarnationOver):
            note_superseded(config, name, str(error))
        stop(error)

    return Consensus(
        me=storage.identity,
        seals=seals,
        members=config.members,
        bootstrap=founding_of(config, storage.identity),
        configuration=storage.configuration,
        incarnation=storage.environment.incarnation,
        cluster_id=config.cluster.id,
        journal=storage.journal,
        machine=machine,
        on_change=on_change,
        fail=stop_for,
        **more,
    )


class CommitWatch:
    """Watch of a replica's progress: if entries wait to be committed or applied, the next check must see progress.

    Idleness is no fault, and neither is a missing majority: a leader without one stops leading within an election
    timeout, and a restart would not bring it back. If the loop or the disk is blocked, the check does not run at all.
    """

    def __init__(self, controller: Controller) -> None:
        """Start from the replica's present term, last, committed and applied entries."""
        self._controller: Final = controller
        self._seen = (0, 0, 0, 0)
        self._note()

    def is_sound(self) -> bool:
        """Return whether the replica made progress since the last check, or had nothing to do."""
        term, last, commit, applied = self._seen
        self._note()
        now_term, _, now_commit, now_applied = self._seen
        if now_commit < last and now_commit == commit and now_term == term and self._controller.leads:
            LOGGER.error("entry %d was not committed since the watchdog's last check", commit + 1)
            return False
        if now_applied < commit and now_applied == applied:
            LOGGER.error("entry %d was not applied since the watchdog's last check", applied + 1)
            return False
        return True

    def status(self) -> str:
        """Return the line shown by the service manager."""
        engine, state = self._controller.engine, self._controller.state
        return f"{engine.role} in term {engine.term}, leader {engine.leader or 'unknown'}, revision {state.revision}"

    def _note(self) -> None:
        engine = self._controller.engine
        self._seen = (engine.term, engine.last_index, engine.commit_index, self._controller.applied_index)


class Replica:
    """Replica with all its parts, from its files to its listening sockets."""

    def __init__(
        self,
        config: Config,
        name: str,
        *,
        clock: Clock,
        fail: Callable[[BaseException], NoReturn] = fail_stop,
        first_start: bool = False,
        found_without: Sequence[str] = (),
    ) -> None:
        """Open the storage and rebuild the state; `first_start`: the operator declares that it never ran.

        `found_without`: founders the operator excludes while the cluster is not founded.

        Call in a running loop.

        Raises:
            StartRefused: The configuration, a certificate or the storage cannot be used.
        """
        try:
            me = config.replica(name)
            self._files = config.tls_files(name)
            credentials = Credentials(self._files, serves=True, open_to_all=config.access.munge, clock=clock)
            timing = timing_of(config)
        except (ConfigError, TlsError) as error:
            raise StartRefused(str(error), EXIT_CONFIGURATION) from error
        self.config = config
        """Configuration in force."""
        self.credentials = credentials
        self._reloader = Reloader(
            config, name, read=Config.load, applies=APPLIED, restarts=RESTARTED, agreed=AGREED, use=self._renew
        )
        self.peers = Peers(config.cluster.id, clock)
        self.peers.checks.append(credentials.refresh)
        credentials.on_authorities.append(self.peers.close_all)
        self._running = AsyncExitStack()
        """Parts to stop, in the order in which they were started."""
        storage = _open(config, me, first_start=first_start)
        try:
            private = private_key(config.storage.directory / name / SIGNING_DIRECTORY, _member_of(storage))
            self._calls = PeerCalls(config, name, api_of=self._api_of, clock=clock)
            self.controller = Controller(
                name=name,
                config=config,
                storage=storage,
                make_engine=partial(
                    _engine,
                    config,
                    name,
                    storage,
                    Seals(config.cluster.id, storage.identity, private),
                    timing=timing,
                    tls=credentials,
                    peers=self.peers,
                    clock=clock,
                    found_without=frozenset(found_without),
                ),
                clock=clock,
                fail=fail,
                node_down_s=config.timing.node_down_s,
                ask=self._calls.status,
                version=release(),
                checkpoints=Checkpoints(name, self._peers, self._calls.digests, fail, chain=storage.journal),
            )
            self.service = ApiService(
                self.controller, version=release(), fail=fail, peers=self.peers, log_peers=self._calls.of_log()
            )
            self.publisher = self.service.publisher
        except RemovedFromCluster as error:
            storage.close()
            raise StartRefused(str(error), EXIT_NOT_A_MEMBER) from error
        except (StorageRefused, ValueError, TlsError, BrokenInvariant) as error:
            storage.close()
            raise StartRefused(str(error), EXIT_STORAGE_REFUSED) from error
        self._register_duties(fail)
        self.fronts = self._fronts(me)
        """Servers for clients, in their starting order: API workers, or servers of this process."""
        self.collector = Collector(
            leads=lambda: self.controller.leads, election_min_s=timing.election_min_s, clock=clock
        )
        _time_syncs(storage.environment, clock, self.service)

    def _register_duties(self, fail: Callable[[BaseException], NoReturn]) -> None:
        controller, calls = self.controller, self.service.providing
        self.backfill = Backfill(
            controller.ledger,
            fill=controller.fill_history,
            journal_fill=lambda: controller.journal_fill,
            peers=self._peers,
            ask=self._calls.history,
            fail=fail,
        )
        self.scrub = Scrub(
            controller.ledger,
            found=controller.scrubbed,
            mend=controller.mend_history,
            peers=self._peers,
            ask=self._calls.history,
            clock=controller.clock,
            fail=fail,
        )
        self.pruner = Pruner(
            self.config.storage.directory / controller.name,
            authorise=controller.authorise_pruning,
            prune_some=controller.prune_some,
            fail=fail,
        )
        for duty in mail_duties(controller, lambda: self.config):
            controller.register(duty)
        controller.register(self.service.sinks, on_change=self.service.sinks.poll)
        controller.register(
            PoolWatch(
                calls.calls,
                calls.local,
                state=lambda: controller.state,
                leads=lambda: controller.leads,
                submit=controller.submit,
                clock=controller.clock,
            )
        )

    def _fronts(self, me: ReplicaConfig) -> list[ApiWorkers | Server | ChannelServer]:
        core = LocalBackend(self.service)
        if me.api_workers:
            workers = ApiWorkers(core, count=me.api_workers, api=me.api, channel=me.channel, files=self._files)
            self.credentials.on_renewed.append(workers.refresh)
            return [workers]
        fronts: list[ApiWorkers | Server | ChannelServer] = [
            Server(core, address=me.api, tls=self.credentials.api_context)
        ]
        if me.channel is not None:
            fronts.append(ChannelServer(core, address=me.channel, tls=self.credentials.server_context))
        return fronts

    def reload(self) -> None:
        """Reload certificates and configuration, on SIGHUP."""
        self.credentials.refresh(at_once=True)
        self._reloader.ask()

    def _renew(self, config: Config) -> None:
        self.config = config
        self.controller.membership.reach(config)
        self._calls.renew(config)
        self.service.renew(config)

    async def start(self) -> None:
        """Listen and participate.

        Raises:
            StartRefused: An address cannot be used.
        """
        async with AsyncExitStack() as running:
            for close in (
                self._calls.close,
                self.service.sink_client.close,
                self.controller.stop,
                self.service.past.stop,
                self.service.tracer.stop,
            ):
                running.push_async_callback(close)
            running.push_async_callback(self.service.providing.close)
            # Collect the garbage of loading once, before this replica serves clients.
            self.collector.start()
            running.callback(self.collector.stop)
            self.peers.start()
            running.callback(self.peers.stop)
            try:
                for front in self.fronts:
                    running.push_async_callback(front.stop)
                    await front.start()
                running.callback(self.service.wake)
                await self.controller.start()
                self.service.past.start()
                self.service.tracer.renew(self.config.traces)
            except OSError as error:
                raise StartRefused(
                    f"an address of replica {self.controller.name} cannot be used ({error.strerror or error}); "
                    f"see [[replica]] in {self.controller.config.file}",
                    EXIT_ADDRESS_UNUSABLE,
                ) from error
            for duty in (self.backfill, self.scrub, self.pruner):
                duty.start()
                running.push_async_callback(duty.stop)
            # A leader has its last entries signed and transfers leadership while it still answers requests.
            running.push_async_callback(self.controller.membership.hand_over)
            running.push_async_callback(self.publisher.conclude)
            self.publisher.start()
            running.push_async_callback(self.publisher.stop)
            self._running = running.pop_all()

    async def stop(self) -> None:
        """Have the entries of this term signed, transfer leadership, close the listeners, and write pending marks."""
        await self._running.aclose()

    def _peers(self) -> tuple[str, ...]:
        return tuple(peer.name for peer in self.controller.engine.peers())

    def _api_of(self, peer: str) -> str | None:
        return self.controller.membership.api_of(peer)


def _time_syncs(environment: Environment, clock: Clock, service: ApiService) -> None:
    """Observe how long each durable transaction takes."""
    commit = environment.commit

    def timed(transaction: Any) -> None:
        started_s = clock.monotonic_s()
        commit(transaction)
        service.metrics.record_sync(clock.monotonic_s() - started_s)

    environment.commit = timed


async def run(
    config: Config, name: str, *, first_start: bool = False, joins: bool = False, found_without: Sequence[str] = ()
) -> None:
    """Run a replica until SIGTERM or SIGINT; `first_start` and `found_without` as for `Replica`.

    `joins`: join the cluster unless the replica has data. A replica without data that the cluster has added joins too.

    Raises:
        StartRefused: The replica cannot start.
        StorageRefused: Its storage cannot be used as it is.
        JoiningRefused: It cannot join now.
    """
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_unhandled)
    stopped = asyncio.Event()
    stop_on_signals(stopped)
    clock = SystemClock()
    tell_manager(status="waits for a valid certificate and for the status of the other replicas")
    try:
        if not await until_valid(config.tls_files(name).certificate, clock, stopped):
            return
    except TlsError as error:
        raise StartRefused(str(error), EXIT_CONFIGURATION) from error
    if has_joined(config, name):
        joins = False
    elif not joins and not first_start:
        joins = bool(await _unless(stopped, is_permitted(config, config.replica(name).name, clock=clock)))
        if stopped.is_set():
            return
    if joins:
        identity = await _unless(stopped, join(config, config.replica(name).name, clock=clock))
        if identity is None:
            return
        LOGGER.info("this replica joins the cluster as %s", identity)
    else:
        await _unless(stopped, refuse_beside_history(config, name, first_start=first_start, clock=clock))
        if stopped.is_set():
            return
    replica = Replica(config, name, clock=clock, first_start=first_start, found_without=found_without)
    loop.add_signal_handler(signal.SIGHUP, replica.reload)
    await _unless(stopped, refuse_incarnation_over(config, name, replica.controller.incarnation, clock=clock))
    if stopped.is_set():
        return
    await replica.start()
    me = config.replica(name)
    LOGGER.info("replica %s of cluster %s: api %s, peers %s", name, config.cluster.name, me.api, me.peer)
    watch = CommitWatch(replica.controller)
    watchdog = Watchdog(watch.is_sound, watch.status)
    tell_manager(READY, status=watch.status())
    watchdog.start()
    await stopped.wait()
    LOGGER.info("stopping on request")
    tell_manager(STOPPING, status="transfers leadership, and stops")
    await watchdog.stop()
    await replica.stop()


async def _unless(stopped: asyncio.Event, work: Coroutine[Any, Any, _T]) -> _T | None:
    """Return the result of `work`; cancel it and return None if this process is to stop before it ends."""
    asked, task = asyncio.create_task(stopped.wait()), asyncio.create_task(work)
    try:
        await asyncio.wait({asked, task}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (asked, task):
            one.cancel()
        await asyncio.gather(asked, task, return_exceptions=True)


def _unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """Stop the replica for an uncaught exception of its own; only log those of connections."""
    error = context.get("exception")
    message = str(context.get("message", ""))
    if isinstance(error, StorageFailed | BrokenInvariant | ReleaseNeeded):
        fail_stop(error)
    if isinstance(error, OSError | asyncio.CancelledError):
        LOGGER.debug("%s: %s", message, error)
        return
    LOGGER.error("%s", message, exc_info=error if isinstance(error, BaseException) else None)


def _raise_open_files() -> None:
    """Raise the limit on open files to OPEN_FILES, as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="forebay run replica", description="Run one replica in the foreground.")
    parser.add_argument("--config", type=Path, required=True, help="the cluster's forebay.toml")
    parser.add_argument("--name", required=True, help="name of the replica")
    empty = parser.add_mutually_exclusive_group()
    empty.add_argument(
        "--first-start",
        action="store_true",
        help="declare that the replica has never run, so that it may start without data",
    )
    empty.add_argument(
        "--join",
        action="store_true",
        help="join as a member that was added or replaced; no effect on a replica with data",
    )
    parser.add_argument(
        "--found-without",
        action="append",
        default=[],
        metavar="NAME",
        help="create the cluster although this replica is missing",
    )
    parser.add_argument("--log-level", choices=LEVELS)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as leaving:
        return EXIT_OK if leaving.code in (0, None) else EXIT_USAGE
    begin_logging("forebay-controller", level=options.log_level, replica=options.name)
    faulthandler.enable()
    os.umask(0o077)
    _raise_open_files()
    sys.setswitchinterval(SWITCH_S)
    try:
        config = Config.load(options.config)
        joins = options.join or is_joining(config, options.name)
        without = tuple(config.replica(one).name for one in options.found_without)
        uvloop.run(run(config, options.name, first_start=options.first_start, joins=joins, found_without=without))
    except ConfigError as error:
        say_at_last(f"forebay: {error}")
        return EXIT_CONFIGURATION
    except (StorageRefused, JoiningRefused) as error:
        say_at_last(f"forebay: {error}")
        return EXIT_STORAGE_REFUSED
    except StartRefused as error:
        say_at_last(f"forebay: {error}")
        return error.code
    except (StorageFailed, BrokenInvariant, SnapshotFailed, ReleaseNeeded) as error:
        fail_stop(error)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())

"""Agent service: registers, polls for orders, sends results, and keeps running while no replica answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
import uuid
from collections.abc import Iterator
from typing import Any, Final

from forebay.cluster.agent.activities import Activities
from forebay.cluster.agent.adapters import tools_of
from forebay.cluster.agent.files import BUFFERS, FileRefused, FilesystemRefused, identity_at
from forebay.cluster.agent.limits import (
    BACK_OFF_S,
    BACK_OFF_S_MAX,
    FILESYSTEMS_LOOK_S,
    GATHER_S,
    ORDER_AGE_S_MAX,
    ORDER_AGE_S_MIN,
    POLL_WAIT_S,
    POLL_WAIT_S_MAX,
    POLL_WHILE_MOVING_S,
)
from forebay.cluster.agent.messages import attempt_label
from forebay.cluster.agent.operation import AgentSettings
from forebay.cluster.agent.processes import AUTO, NONE
from forebay.cluster.agent.replica_choice import STALE_INSTANCE, UNKNOWN_NODE, AgentClient, ReplicaChoice
from forebay.cluster.agent.runtime import AgentFailed, DiskFullRetry, ReportOutbox, RetryAbandoned, StateDirectory
from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config, ConfigError, Reloader
from forebay.cluster.schemas import (
    OperationReport,
    PollAnswer,
    PollRequest,
    RegisterRequest,
    ReportsAnswer,
    ReportsRequest,
    new_command_id,
)
from forebay.cluster.security import TlsError, until_valid
from forebay.cluster.system import (
    EXIT_CONFIGURATION,
    READY,
    STOPPING,
    Clock,
    SystemClock,
    about,
    begin_logging,
    say_at_last,
    tell_manager,
)
from forebay.cluster.system.eventloop import Watchdog, stop_on_signals

logger = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_REPLACED: Final = 77
"""Another agent has taken the name: restarting would take it back, and so on. Service managers must not restart on
this.
"""

CALL_DEADLINE_S: Final = 10.0
"""Seconds one call may take beyond its own wait, before the agent reports that no replica answers and retries."""

FLUSH_S: Final = 30.0
"""Seconds to send an earlier agent's results before registering: longer than a failover; afterwards they are sent as
stale.
"""

RESTARTED: Final = ("cluster", "tls", "agents", "provider", "job_process")
"""Configuration fields that take effect at the next start; of the agents only its own row."""

KEYS_NAMED_MAX: Final = 10
"""Keys listed in the warning, count: they fit on one log line."""

FLUSH_LOOK_S: Final = 0.02
"""Seconds between two checks whether they have been sent."""

NOT_PROMISED: Final = (
    "They are found by listing all processes, so one that forks and ends faster may outlive the job's cancellation, "
    "its time limit and its end"
)
"""Consequence of running without cgroups, for the log."""

REFUSED: Final = frozenset({400, 401, 403, 409})
"""Statuses for which registering again is pointless until an operator changes something."""

CLOCK_OFF: Final = "command_too_old"
"""Error code of a registration whose ID is too far from the leader's clock, which can be corrected."""


NO_FILESYSTEM: Final = (
    "no shared filesystem of the cluster is on this machine: mount one, "
    "mark it with `forebay pool filesystem mark`, and see `forebay pool filesystem list`"
)


class AgentReplaced(AgentFailed):
    """Another agent has registered under this agent's name."""


class Agent:
    """Agent working in its state directory."""

    def __init__(
        self, home: StateDirectory, settings: AgentSettings, cpus: int, controller: AgentClient, clock: Clock
    ) -> None:
        """Prepare.

        Raises:
            AgentFailed: The state of an earlier agent cannot be read.
            FileRefused: A file of an earlier agent is damaged.
        """
        self._home = home
        self._node = settings.node
        self._cpus = 0 if settings.mover else cpus
        self._is_mover = settings.mover
        self._controller = controller
        self._clock = clock
        self._instance = uuid.uuid4().hex
        self._outbox = ReportOutbox(home.outbox, clock, home.reserve_files)
        self._activities = Activities(home, self._outbox, settings, clock)
        self._wait_s = POLL_WAIT_S
        self._seen_revision = 0
        """Revision of the known orders; 0 if there are none, so that the first poll is answered at once."""
        self._least_revision = 0
        """Oldest revision accepted in an answer."""
        self._filesystems: dict[str, str] = {}
        """Shared filesystems that it serves, as registered."""
        self._not_staged: frozenset[str] = frozenset()
        """Logged reasons for not serving the others."""
        self._asked = 0
        """Number of polls and registrations so far."""
        self._seen_asked = 0
        """Value of that counter at the watchdog's last check."""

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set.

        Raises:
            AgentFailed: The agent cannot continue.
        """
        self._activities.take_up()
        watchdog = Watchdog(self._keeps_polling)
        tell_manager(READY, status="registering")
        watchdog.start()
        stopping = asyncio.create_task(stop.wait())
        broken = asyncio.create_task(self._activities.broken.wait())
        reporter = asyncio.create_task(self._send_reports())
        poller = asyncio.create_task(self._follow_orders())
        tasks: set[asyncio.Task[Any]] = {stopping, broken, reporter, poller}
        if self._is_mover:
            tasks.add(asyncio.create_task(self._watch_filesystems()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
            failed = self._activities.failed
            if failed is not None:
                raise AgentFailed(f"{self._home.path}: a result cannot be stored: {failed}") from failed
            tell_manager(STOPPING, status="stopping transfers; scripts continue")
        finally:
            await watchdog.stop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._activities.stop()

    def _keeps_polling(self) -> bool:
        """Return whether the agent still polls, with or without answers: silent replicas are not the agent's fault."""
        before, self._seen_asked = self._seen_asked, self._asked
        return self._asked > before

    async def _follow_orders(self) -> None:
        await self._flush()
        await self._register()
        back_off = _BackOff("request orders")
        behind = 0
        while True:
            asked_s = self._clock.monotonic_s()
            try:
                answer = await self._poll()
            except ApiError as error:
                if error.code == STALE_INSTANCE:
                    raise AgentReplaced(f"this agent was replaced: {error}") from error
                if error.code == UNKNOWN_NODE:
                    await self._register()
                else:
                    await back_off.after(error)
                continue
            if answer is None:
                continue
            if answer.revision < self._least_revision:
                # These orders are older than those known, and following them would undo work. Once is normal, if a
                # result was
                # acknowledged meanwhile; twice means that the replica lags.
                behind += 1
                if behind > 1:
                    await back_off.say(
                        f"orders of revision {answer.revision} are ignored: {self._least_revision} is known"
                    )
                continue
            behind = 0
            back_off.reset()
            self._wait_s = min(answer.wait_s or POLL_WAIT_S, POLL_WAIT_S_MAX)
            self._seen_revision = self._least_revision = answer.revision
            self._activities.reconcile(answer.orders)
            self._activities.confirm_orders(asked_s)
            if self._activities.are_many:
                await asyncio.sleep(GATHER_S)

    async def _poll(self) -> PollAnswer | None:
        """Poll once; return None if a transfer starts meanwhile and lasts long enough to poll again with progress.

        Abandoning a request costs its connection and a TLS handshake, and most transfers end sooner.
        """
        self._asked += 1
        self._activities.started_moving.clear()
        moving = self._activities.moving
        request = PollRequest(
            instance=self._instance,
            seen_revision=self._seen_revision,
            wait_s=POLL_WHILE_MOVING_S if moving else self._wait_s,
            progress=self._activities.progress(),
        )
        if moving:
            return await self._controller.poll(self._node, request)
        polling = asyncio.ensure_future(self._controller.poll(self._node, request))
        began = asyncio.ensure_future(self._activities.started_moving.wait())
        try:
            while True:
                await asyncio.wait({polling, began}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({polling}, timeout=POLL_WHILE_MOVING_S)
                if polling.done():
                    return polling.result()
                if self._activities.moving:
                    return None
                self._activities.started_moving.clear()
                began = asyncio.ensure_future(self._activities.started_moving.wait())
        finally:
            polling.cancel()
            began.cancel()
            await asyncio.gather(polling, began, return_exceptions=True)

    async def _flush(self) -> None:
        """Send an earlier agent's results first: after this one has registered they would be stale."""
        deadline_s = self._clock.monotonic_s() + FLUSH_S
        while self._outbox.changed.is_set() and self._clock.monotonic_s() < deadline_s:
            await asyncio.sleep(FLUSH_LOOK_S)

    async def _register(self) -> None:
        back_off = _BackOff("register")
        while True:
            self._asked += 1
            try:
                seen = await self._find_filesystems() if self._is_mover else {}
            except ApiError as error:
                await back_off.after(error)
                continue
            if self._is_mover and not seen:
                # It may be about to be mounted, or the cluster is just being set up.
                await back_off.say(f"agent {self._node} is a mover, and {NO_FILESYSTEM}")
                continue
            request = RegisterRequest(
                command_id=new_command_id(self._clock),
                instance=self._instance,
                storage_id=self._home.storage_id,
                cpus=self._cpus,
                buffers=str(self._home.path / BUFFERS),
                process_control="listing" if self._home.cgroups is None else "cgroup",
                capacity_control=self._home.capacity_control.word,
                filesystems=seen,
            )
            try:
                answer = await self._controller.register(self._node, request)
            except ApiError as error:
                if error.status in REFUSED and error.outcome == "rejected" and error.code != CLOCK_OFF:
                    raise AgentFailed(f"the controller rejected agent {self._node}: {error}") from error
                await back_off.after(error)
                continue
            self._filesystems = seen
            self._least_revision = max(self._least_revision, answer.revision)
            # Request all orders again.
            self._seen_revision = 0
            logger.info(
                "agent %s registered at revision %s with storage %s",
                self._node,
                answer.revision,
                self._home.storage_id,
                extra=about(revision=answer.revision),
            )
            tell_manager(status=f"registered at revision {answer.revision}")
            return

    async def _find_filesystems(self) -> dict[str, str]:
        """Return the cluster's shared filesystems mounted on this machine, with the identity in their marker files.

        The list comes from the replicated state, so no second list is needed here.
        """
        found: dict[str, str] = {}
        reasons = set()
        for filesystem in (await self._controller.filesystems()).filesystems:
            try:
                identity = await asyncio.to_thread(identity_at, filesystem.path)
            except FilesystemRefused as error:
                reasons.add(f"shared filesystem {filesystem.name}: {error}")
                continue
            if filesystem.identity and identity != filesystem.identity:
                reasons.add(
                    f"shared filesystem {filesystem.name}: another one is mounted at {filesystem.path}; mount it there"
                )
                continue
            found[filesystem.name] = identity
        for reason in sorted(reasons - self._not_staged):
            logger.warning("agent %s does not stage for %s", self._node, reason)
        self._not_staged = frozenset(reasons)
        return found

    async def _watch_filesystems(self) -> None:
        """Register again when the mounted shared filesystems change; other movers then take over.

        Raises:
            AgentFailed: None is left; the work of a silent mover is taken over, too.
        """
        while True:
            await asyncio.sleep(FILESYSTEMS_LOOK_S)
            if not self._filesystems:
                continue
            try:
                seen = await self._find_filesystems()
            except ApiError:
                continue
            if not seen:
                raise AgentFailed(f"agent {self._node} is a mover, and {NO_FILESYSTEM}")
            if seen != self._filesystems:
                await self._register()

    async def _send_reports(self) -> None:
        back_off = _BackOff("send results")
        while True:
            await self._outbox.changed.wait()
            if self._activities.are_many:
                await asyncio.sleep(GATHER_S)
            batch = self._outbox.batch()
            if not batch:
                self._outbox.changed.clear()
                continue
            try:
                answer = await self._controller.report(self._node, ReportsRequest(reports=tuple(batch)))
            except ApiError as error:
                await back_off.after(error)
                continue
            back_off.reset()
            self._acknowledge(batch, answer)
            # Orders from before this revision would repeat work that the reports have settled.
            self._least_revision = max(self._least_revision, answer.revision)

    def _acknowledge(self, batch: list[OperationReport], answer: ReportsAnswer) -> None:
        sent = {report.command_id for report in batch}
        for result in answer.results:
            if result.command_id not in sent:
                continue
            report = self._outbox.acknowledge(result.command_id)
            if report is None:
                continue
            if result.outcome == "rejected":
                logger.warning(
                    "%s: the controller rejected its result: %s",
                    attempt_label(report.job, report.attempt, report.stage),
                    result.sentence,
                    extra=about(job=report.job),
                )
            self._activities.note_acknowledged(report, accepted=result.outcome == "accepted")
        if not len(self._outbox):
            self._outbox.changed.clear()


class _BackOff:
    """Waits longer after each consecutive failure and logs each message once."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._wait_s = BACK_OFF_S
        self._logged = ""

    def reset(self) -> None:
        """Reset the wait after a success."""
        if self._logged:
            logger.info("the controller responds again: could %s", self._what)
        self._wait_s, self._logged = BACK_OFF_S, ""

    async def after(self, error: ApiError) -> None:
        """Wait after a failure with `error`."""
        await self.say(f"could not {self._what}: {error}")

    async def say(self, sentence: str) -> None:
        """Wait, and log the sentence unless it repeats the last one."""
        if sentence != self._logged:
            logger.warning("%s", sentence)
            self._logged = sentence
        await asyncio.sleep(self._wait_s * random.uniform(0.5, 1.0))
        self._wait_s = min(BACK_OFF_S_MAX, 2 * self._wait_s)


@contextlib.contextmanager
def _stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    stop_on_signals(stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _warn_of_keys(config: Config, name: str) -> None:
    """Warn about other identities' keys that jobs can read, because they run as the agent's own account."""
    try:
        keys = sorted(key.name for key in config.tls.certificates.glob("*.key") if os.access(key, os.R_OK))
    except OSError:
        return
    others = [key for key in keys if key != f"{name}.key"]
    if others:
        logger.warning(
            "jobs run as this agent's account, which can read %s in %s, so any job can use those identities; "
            "unless all users are trusted, run the agent as root with accounts = 'switch'",
            ", ".join(others[:KEYS_NAMED_MAX]),
            config.tls.certificates,
        )


def _hold_processes(home: StateDirectory, where: str) -> None:
    """Set up cgroups for jobs, and log the limitations without them.

    Raises:
        AgentFailed: The configuration requires cgroups and they are unavailable.
    """
    try:
        refused = home.hold_processes(where)
    except OSError as error:
        refused = f"the state directory cannot record them: {error.strerror}"
    if home.cgroups is not None:
        how = "at once" if home.cgroups.is_ended_at_once else "after freezing them (the kernel is older than 5.14)"
        logger.info("processes of jobs are held in cgroups below %s and ended %s", home.cgroups.path, how)
    elif where in (AUTO, NONE):
        logger.info("processes of jobs are not held in cgroups: %s. %s", refused, NOT_PROMISED)
    else:
        raise AgentFailed(f"cgroup = {where!r}: {refused}")


def _log_capacity_control(home: StateDirectory) -> None:
    """Log how the capacity of buffers is enforced while a job writes."""
    control = home.capacity_control
    if control.why_watch:
        logger.info(
            "buffer usage is watched: a job that exceeds its capacity is ended soon after, but its writes "
            "are not rejected: %s",
            control.why_watch,
        )
    else:
        logger.info("buffer capacity is enforced by %s", control.word)


async def _serve(config: Config, name: str, *, mover: bool) -> None:
    own = config.agent(name)
    clock = SystemClock()
    config.check_accounts(own, os.geteuid())
    if own.mode == "own":
        _warn_of_keys(config, name)
    settings = AgentSettings(
        node=name,
        accounts=own.mode,
        copy_rate_bytes_s=own.copy_rate_bytes_s,
        kill_wait_s=own.kill_wait_s,
        local=config.provider_here(own.directory),
        tools=tools_of(own),
        process=config.job_process,
        cluster=config.cluster.id,
        mover=mover,
        order_age_s_max=max(ORDER_AGE_S_MIN, min(ORDER_AGE_S_MAX, config.timing.node_down_s * 2 / 3)),
    )
    stop = asyncio.Event()
    with _stop_on_signals(stop):
        if not await until_valid(config.tls_files(name).certificate, clock, stop):
            return
        try:
            opened = await DiskFullRetry(str(own.directory), clock).keep_trying(
                "the agent's directory",
                lambda: StateDirectory(own.directory, own.mode, clock, images=own.buffer_image != "none"),
                stop,
            )
        except RetryAbandoned:
            return
        with contextlib.closing(opened) as home:
            home.fork_server.start()
            _hold_processes(home, own.cgroup)
            _log_capacity_control(home)
            try:
                async with Client.from_config(config, name, deadline_s=CALL_DEADLINE_S) as client:
                    home.fork_server.await_ready()
                    controller = AgentClient(client, ReplicaChoice(name, config.endpoints, clock), clock)
                    reloader = Reloader(
                        config, name, read=Config.load, applies=("replicas",), restarts=RESTARTED,
                        use=lambda renewed: controller.reach_at(renewed.endpoints),
                    )  # fmt: skip
                    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
                    await Agent(home, settings, own.cpus, controller, clock).run(stop)
            finally:
                if home.cgroups is not None:
                    # The cgroup remains as long as a script runs in it.
                    home.cgroups.remove()


def serve(config: Config, name: str, *, mover: bool = False) -> int:
    """Run an agent in the foreground until SIGTERM or SIGINT; return its exit code.

    A `mover` only stages on shared filesystems. Errors are reported on standard error, one sentence each.
    """
    begin_logging("forebay-agent", node=name)
    # Loaded objects stay for ever: scanning them repeatedly was a tenth of the agent's work.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(_serve(config, name, mover=mover))
    except (ConfigError, TlsError) as error:
        say_at_last(f"forebay run agent: {error}")
        return EXIT_CONFIGURATION
    except (AgentFailed, FileRefused) as error:
        say_at_last(f"forebay run agent: {error}")
        return EXIT_REPLACED if isinstance(error, AgentReplaced) else EXIT_FAILED
    return EXIT_OK

"""Functions of Slurm's burst-buffer plugins, as calls to the leader.

Every call can be repeated: the phase of the external job shows whether it was already executed
(replica/decide/external_jobs). So a call is resent until a replica answers, with a new command ID or the old one. Of
two calls for one job, the later call ends the wait of the earlier one. Calls of several hosts (a backup slurmctld) are
distinguished by epoch: a call first reads the current epoch, and has no effect on any other epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pwd
import re
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import ApiOperation, TransferView, WhyView, new_command_id, operations
from forebay.cluster.schemas import external_jobs as g
from forebay.cluster.slurm.files import (
    BufferSession,
    SlurmFiles,
    linked_script,
    make_directory,
    session_of_persistent,
    uptime_s,
)
from forebay.cluster.slurm.slurmctld import array_of, ended_by_itself, owner_of
from forebay.cluster.slurm.stage_ins import NEXT_S, POLLED_AGAIN_S, StageIns
from forebay.cluster.system import Clock
from forebay.replica.grammar import (
    UNKNOWN_VARIABLES,
    DirectiveRejected,
    PathVariables,
    find_overlap_in,
    read_external_job_request,
    read_request,
)
from forebay.replica.model import Access, BufferRequest
from forebay.replica.values import (
    MICROSECONDS_PER_SECOND,
    SCRIPT_BYTES_MAX,
    SizeError,
    format_size,
    name_fault,
    parse_size,
    round_up,
)

LOGGER = logging.getLogger(__name__)

POLL_S: Final = 25
"""Seconds for which one query of an external job waits at the leader."""

CALL_S: Final = 10.0
"""Timeout of one request in addition to its own wait, seconds; after that it is resent."""

RETRY_S: Final = 1.0
"""Seconds between two rounds of requests to a cluster that does not answer; the client backs off within a round."""

HOLD_S: Final = 10
"""Seconds for which a query waits for the end of a stage, because Slurm sleeps PollInterval after each `busy`."""

FORGOTTEN_EXPORT_S: Final = 240.0
"""Longest wait of a teardown for an export that Slurm did not request, seconds; Slurm gives it 300 s by default."""

NOT_NOW: Final = frozenset({401, 408, 429})
"""Status codes below 500 of rejections that may be temporary, because certificates and limits change.

Other codes concern the external job itself.
"""

EPOCH_S: Final = 2.0
"""Timeout of the query for an external job's epoch, seconds; after that the last known epoch is used."""

WARM_S: Final = 5.0
"""Seconds for which a known epoch counts as current, because no other host takes over that fast."""

NO_TEXT: Final = "the job's script is not UTF-8; write it as UTF-8"

KNOWN_MAX: Final = 100_000
"""Maximum number of external jobs whose last epoch is remembered: more than Slurm has buffer jobs."""

ALIVE: Final = frozenset({"waiting", "set-up", "staging-in", "stage-in-failed", "staged-in"})
"""Phases of an epoch after its setup and before its run, in which a setup is a repeat."""

CASE_OVER: Final = frozenset({"none", "over", "lingering", "retained"})
"""Phases of buffers that Slurm no longer uses; users and operators handle retained buffers."""

STUCK: Final = "slurmctld has lost the stage-in of job {0}, and will never start it; run: scancel {0}\n"
"""Text in `scontrol show bbstat` for a stuck job."""

SETUP_WAIT_S: Final = 20
"""Seconds for which a persistent buffer waits for space until the leader has sent the configured limit."""

FIRST_LOOK_S: Final = 0.05
"""Seconds before the first query of a persistent buffer's progress: enough for a commit and an agent's report."""

LOOK_S_MAX: Final = 2.0
"""Longest interval between two such queries, seconds: each interval is twice the previous one."""

Answer = tuple[str, str]
"""Status word (`ok`, `fail`, `busy`) and text."""

_T = TypeVar("_T")


_Perform = Callable[["PluginCalls", list[str], str], Awaitable[Answer]]


class PluginCalls:
    """Functions called by slurmscriptd."""

    def __init__(
        self,
        leader: Client,
        files: SlurmFiles,
        cluster: str,
        clock: Clock,
        ask_owner: Callable[[str], Awaitable[int | str]] = owner_of,
        *,
        state: Path | None = None,
        ask_array: Callable[[str], Awaitable[str | None]] = array_of,
        ask_ended: Callable[[str], Awaitable[bool]] = ended_by_itself,
    ) -> None:
        """Create the functions of one bridge.

        `cluster` identifies this Slurm in the registrations of all its hosts; `state` is StateSaveLocation. `ask_owner`
        returns the uid of a job's user, `ask_array` the job array of a task, `ask_ended` whether a job has
        ended and was not cancelled.
        """
        self._ask_ended = ask_ended
        self._ask_owner = ask_owner
        self._state = state
        self._ask_array = ask_array
        self._leader = leader
        self._files = files
        self._cluster = cluster
        self._clock = clock
        self._said = ""
        self._stage_ins = StageIns()
        self._epochs: dict[str, tuple[int, float]] = {}
        """Last known epoch of each external job, and the uptime of the query, seconds."""
        self.site: g.SchedulerSiteAnswer | None = None
        """Last site settings from the leader, or None."""
        self.is_stuck: Callable[[str], bool] = lambda _: False
        """Function that returns whether slurmctld will never start a job; see `cluster.slurm.reconciler`."""

    async def perform(self, function: str, words: list[str], script: str) -> Answer:
        """Perform one function with its arguments; errors of the cluster or the caller are replies, not exceptions."""
        perform = _FUNCTIONS.get(function)
        if perform is None:
            return "fail", f"forebay: function {function[:48]!r} does not exist"
        job = words[0] if words else ""
        if perform in _OF_NAMES:
            fault = "starts with a digit" if job[:1].isdigit() else name_fault(job)
            if fault is not None:
                return "fail", f"the name of a persistent buffer {fault}"
        elif perform not in _WITHOUT_JOB and not (job.isascii() and job.isdigit() and len(job) <= 10):
            return "fail", f"forebay: {function} needs a job ID, but received {job[:48]!r}"
        if function in STAGE_IN:
            with self._stage_ins.running_call(job):
                answer = "ok", ""
                if not self._stage_ins.is_leaving(job):
                    answer = await self._answer(perform, words, script)
                # The stage-in of a cancelled job reports success.
                return ("ok", "") if self._stage_ins.is_leaving(job) else answer
        return await self._answer(perform, words, script)

    async def _answer(self, perform: _Perform, words: list[str], script: str) -> Answer:
        try:
            return await perform(self, words, script)
        except ApiError as error:
            return "fail", sentence(error)

    async def _told(self, operation: ApiOperation[Any, _T], make: Callable[..., Any] | None, **parameters: Any) -> _T:
        """Perform an operation until a replica answers.

        Raises:
            ApiError: The operation is permanently rejected.
        """
        wait_s = parameters.get("wait_s") or 0
        while True:
            request = None if make is None else make(command_id=new_command_id(self._clock), cluster=self._cluster)
            try:
                found = await self._leader.call(
                    operation, request, deadline_s=CALL_S + wait_s, attempt_s=CALL_S / 2 + wait_s, **parameters
                )
            except ApiError as error:
                if 400 <= error.status < 500 and error.status not in NOT_NOW and error.outcome == "rejected":
                    raise
                if str(error) != self._said:
                    LOGGER.warning("a call waits: %s", error)
                    self._said = str(error)
                await asyncio.sleep(RETRY_S)
                continue
            self._said = ""
            return found

    async def _tell(
        self, operation: ApiOperation[Any, g.ExternalJobAnswer], job: str, *phases: str, **fields: Any
    ) -> g.ExternalJobAnswer:
        """Send a command, and return the external job once it is in none of these phases.

        Raises:
            ApiError: The command is permanently rejected.
        """
        epoch, heard_s = self._epochs.get(job, (0, -math.inf))
        if uptime_s() - heard_s > WARM_S:
            epoch, _ = await self._last(job)
        kind = g.TearDownExternalJobRequest if operation is operations.TEAR_DOWN_EXTERNAL_JOB else g.ExternalJobCommand
        return await self._after(operation, lambda **own: kind(**own, epoch=epoch, **fields), job, *phases)

    async def _after(
        self, operation: ApiOperation[Any, g.ExternalJobAnswer], make: Callable[..., Any], job: str, *phases: str
    ) -> g.ExternalJobAnswer:
        # The command itself waits, because a separate query would cost as much as the command.
        waits = {"wait_s": POLL_S, "while": ",".join(phases)} if phases else {}
        external_job = await self._told(operation, make, job=job, **waits)
        while external_job.phase in phases:
            external_job = await self._told(operations.SHOW_EXTERNAL_JOB, None, job=job, **waits)
        self.remember(external_job)
        return external_job

    async def _last(self, job: str) -> tuple[int, str]:
        """Return an external job's last epoch, 0 for none, and its phase, empty if unknown.

        The values are from the leader, or the last known ones if it does not answer. A later epoch that another host
        starts is not covered by the call.
        """
        try:
            external_job = await self._leader.call(operations.SHOW_EXTERNAL_JOB, job=job, deadline_s=EPOCH_S)
        except ApiError:
            if job in self._epochs:
                return self._epochs[job][0], ""
            external_job = await self._show(job)
        self.note_external_job(external_job)
        return external_job.epoch, external_job.phase

    def note_external_job(self, external_job: g.ExternalJobView) -> None:
        """Remember an external job's epoch, and update its entry in the list for Slurm.

        Raises:
            OSError: A file cannot be written.
        """
        self._files.update_listing(external_job)
        self.remember(external_job)

    def note_reply(self, function: str, words: list[str], word: str) -> None:
        """Note that Slurm has read the reply to a call.

        Raises:
            OSError: A file cannot be written.
        """
        if function == "teardown" and words:
            self._files.teardown_read(words[0], done=word == "ok")
        if words and (function in STAGE_IN or function == "setup"):
            self._stage_ins.note_reply(words[0], _NEXT_S.get((function, word), 0.0))

    def remember(self, external_job: g.ExternalJobView, asked_s: float | None = None) -> None:
        """Remember an external job's epoch.

        `asked_s` is the uptime at which the query was sent, None for a fresh reply.
        """
        known = self._epochs.get(external_job.job)
        # A list that was requested before a setup finished may lack that setup.
        if known is not None and asked_s is not None and known[1] >= asked_s:
            return
        if external_job.phase in ("none", "over"):
            self._epochs.pop(external_job.job, None)
        elif known is not None or len(self._epochs) < KNOWN_MAX:
            self._epochs[external_job.job] = external_job.epoch, uptime_s() if asked_s is None else asked_s

    async def _show(self, job: str) -> g.ExternalJobAnswer:
        return await self._told(operations.SHOW_EXTERNAL_JOB, None, job=job)

    # Functions in the order of a job's life

    async def setup(self, words: list[str], script: str) -> Answer:
        """Reserve the buffer's space (`job, uid, gid, pool, size, script`).

        Wait for space up to the configured limit.
        """
        size = _size(words[4]) if len(words) == 5 else None
        if size is None or not all(words[at].isdigit() for at in (1, 2)):
            return "fail", "forebay: setup needs job, uid, gid, pool, size and script"
        job, uid, gid, pool = words[0], int(words[1]), int(words[2]), words[3]
        pool = "" if pool == "(null)" else pool
        try:
            script = await self._job_files(job, script)
        except OSError as error:
            return "fail", f"files of job {job} in StateSaveLocation cannot be created: {error}"
        except UnicodeDecodeError:
            return "fail", NO_TEXT
        if not script:
            return "fail", "the job's script cannot be read, and slurmctld does not list the job as a task of an array"
        if self._has_none(script):
            return "ok", ""
        if len(script.encode()) > SCRIPT_BYTES_MAX:
            return "fail", f"the script has more than {SCRIPT_BYTES_MAX} bytes; put its data into files and stage them"
        fault = self._miscounted(pool, size, script)
        if fault:
            return "fail", fault
        try:
            user, groups = await asyncio.to_thread(_account, uid, gid)
        except KeyError:
            return "fail", f"this host has no user with the ID {uid}"

        def wanted(**own: Any) -> g.SetUpExternalJobRequest:
            return g.SetUpExternalJobRequest(
                **own, epoch=epoch, user=user, uid=uid, gid=gid, groups=groups, script=script, pool=pool, size=size
            )

        now_s = self._clock.now() // MICROSECONDS_PER_SECOND
        self._files.setup_begins(BufferSession(job, int(job), uid, size, now_s))
        failed = False
        try:
            last, phase = await self._last(job)
            epoch = last if phase in ALIVE else last + 1
            external_job = await self._after(operations.SET_UP_EXTERNAL_JOB, wanted, job, "waiting")
            self.note_external_job(external_job)
            failed = external_job.phase not in ("set-up", "staging-in", "staged-in")
        except ApiError:
            failed = True
            raise
        finally:
            # If the bridge ends, the job stays in the list, because Slurm counts it.
            self._files.setup_ends(job, failed=failed)
        return ("fail", external_job.message or f"the buffer is {external_job.phase}") if failed else ("ok", "")

    async def _job_files(self, job: str, script: str) -> str:
        """Create the files that Slurm omits for a task of a job array, and return the script.

        Raises:
            OSError: A file cannot be created or read.
        """
        if self._state is None:
            return script
        make_directory(self._state, job)
        return script or await linked_script(self._state, job, self._ask_array)

    def _has_none(self, script: str) -> bool:
        """Return whether a job only creates or deletes persistent buffers.

        Slurm addresses persistent buffers by name, so such a job needs no external job.
        """
        try:
            # If Slurm has its own directive (lua), only lines with that directive request a buffer.
            if (
                self.site is not None
                and read_external_job_request(
                    script, directive=self.site.directive, variables=UNKNOWN_VARIABLES
                ).request
                is not None
            ):
                return False
            asked = read_request(script, variables=UNKNOWN_VARIABLES).request
        except DirectiveRejected:
            return False
        return asked is not None and bool(asked.creates or asked.destroys) and not (asked.capacity_bytes or asked.uses)

    def _miscounted(self, pool: str, size: int, script: str) -> str:
        """Return how Slurm's request differs from the directives; empty if they agree or the difference is unknown."""
        if self.site is None:
            return ""
        try:
            asked = _asked(self.site, script)
        except DirectiveRejected as refused:
            return str(refused)
        found = {one.name: one for one in self.site.pools}.get(pool)
        if asked is None or found is None:
            return ""
        wanted = round_up(asked.capacity_bytes, found.granularity)
        # A job that uses only persistent buffers requests no pool, and Slurm passes its default pool. Without
        # pool=, datawarp also passes its own default pool.
        if (asked.pool or pool, wanted) == (pool, size) or wanted == size == 0:
            return ""
        return (
            f"{asked.places[1] or 'script'}: Slurm counts {size} bytes of pool {pool}, but the directives request "
            f"{wanted} of {asked.pool or 'no pool'}; write pool= and capacity= once, separated by blanks"
        )

    async def data_in(self, words: list[str], script: str) -> Answer:
        """Call stage-in and wait until it ends. Arguments: `job`, and for datawarp also the script."""
        if script and self._has_none(script):
            return "ok", ""
        return self._staged(await self._tell(operations.STAGE_IN_EXTERNAL_JOB, words[0], "set-up", "staging-in"))

    async def begin_data_in(self, words: list[str], script: str) -> Answer:
        """Start a stage-in (`job`); `test_data_in` returns its progress."""
        external_job = await self._tell(operations.STAGE_IN_EXTERNAL_JOB, words[0])
        if external_job.phase in ("set-up", "staging-in"):
            return "ok", ""
        return self._staged(external_job)

    async def test_data_in(self, words: list[str], script: str) -> Answer:
        """Return whether the stage-in has finished (`job`); waits a while for it."""
        external_job = await self._told(
            operations.SHOW_EXTERNAL_JOB, None, job=words[0], wait_s=HOLD_S, **{"while": "set-up,staging-in"}
        )
        return ("busy", "") if external_job.phase in ("set-up", "staging-in") else self._staged(external_job)

    def _staged(self, external_job: g.ExternalJobAnswer) -> Answer:
        if external_job.phase not in ("staged-in", "running"):
            return "fail", external_job.message or f"the buffer is {external_job.phase}"
        # Write the variables before Slurm gets the reply, because `paths` reads the file.
        self._files.write_variables(external_job)
        return "ok", ""

    async def pre_run(self, words: list[str], script: str) -> Answer:
        """Note that the run begins (`job`)."""
        external_job = await self._tell(operations.BEGIN_EXTERNAL_JOB_RUN, words[0])
        # In phase post-run, slurmctld was killed before it recorded the run, and runs the job again.
        began = external_job.phase in ("running", "post-run")
        return ("ok", "") if began else ("fail", external_job.message or f"the buffer is {external_job.phase}")

    async def post_run(self, words: list[str], script: str) -> Answer:
        """Note that the run has ended (`job`)."""
        await self._tell(operations.END_EXTERNAL_JOB_RUN, words[0])
        return "ok", ""

    async def data_out(self, words: list[str], script: str) -> Answer:
        """Export the results (`job`), and wait for the end."""
        return _exported(await self._tell(operations.STAGE_OUT_EXTERNAL_JOB, words[0], "post-run", "staging-out"))

    async def begin_data_out(self, words: list[str], script: str) -> Answer:
        """Start the export of the results (`job`); `test_data_out` returns its progress."""
        external_job = await self._tell(operations.STAGE_OUT_EXTERNAL_JOB, words[0])
        return ("ok", "") if external_job.phase in ("post-run", "staging-out") else _exported(external_job)

    async def test_data_out(self, words: list[str], script: str) -> Answer:
        """Return whether the results are exported (`job`); waits a while for it."""
        external_job = await self._told(
            operations.SHOW_EXTERNAL_JOB, None, job=words[0], wait_s=HOLD_S, **{"while": "post-run,staging-out"}
        )
        return ("busy", "") if external_job.phase in ("post-run", "staging-out") else _exported(external_job)

    async def teardown(self, words: list[str], script: str) -> Answer:
        """Tear the buffer down (`job, hurry`)."""
        self._files.teardown_begins(words[0], self._clock.now() // MICROSECONDS_PER_SECOND)
        hurry = words[1:2] == ["true"]
        async with self._stage_ins.leaving(words[0]):
            if hurry and await self._is_forgotten_run(words[0]):
                hurry = False
                await self._export_forgotten(words[0])
            external_job = await self._tell(operations.TEAR_DOWN_EXTERNAL_JOB, words[0], "teardown", hurry=hurry)
        if external_job.phase not in CASE_OVER:
            return "fail", external_job.message or f"the buffer is {external_job.phase}"
        self.note_external_job(external_job)
        self._files.remove_variables(words[0])
        return "ok", ""

    async def _is_forgotten_run(self, job: str) -> bool:
        """Return whether Slurm tears down the buffer of a run that it has forgotten.

        A slurmctld that was killed may not know that a job started. It then tears the buffer down with `hurry` as soon
        as the job has ended, without a stage-out. A user's `scancel --hurry` leaves a cancelled job.
        """
        external_job = await self._told(operations.SHOW_EXTERNAL_JOB, None, job=job)
        return external_job.phase == "running" and await self._ask_ended(job)

    async def _export_forgotten(self, job: str) -> None:
        """Export the results of a forgotten run, if that is possible in time; otherwise the teardown retains them."""
        LOGGER.warning("Slurm has forgotten that job %s ran; its results are exported before the teardown", job)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FORGOTTEN_EXPORT_S):
                await self._tell(operations.STAGE_OUT_EXTERNAL_JOB, job, "post-run", "staging-out")

    # Persistent buffers, which Slurm addresses by name

    async def create_persistent(self, words: list[str], script: str) -> Answer:
        """Create a persistent buffer (`name, uid, pool, size, access, type`); wait for space as in `setup`."""
        size = _size(words[3]) if len(words) > 3 else None
        if size is None or not words[1].isdigit():
            return "fail", "forebay: create_persistent needs a name, a user, a pool and a size"
        name, pool = words[0], words[2]
        access, kind = (words[4:6] + ["", ""])[:2]
        if access not in ("", "striped") or kind not in ("", "scratch"):
            return (
                "fail",
                f"a persistent buffer must be striped scratch, but {access or 'striped'} {kind} was requested",
            )
        owner = await self._owner(int(words[1]))
        if isinstance(owner, str):
            return "fail", owner

        def wanted(**own: Any) -> g.MakePersistentRequest:
            return g.MakePersistentRequest(**own, **owner, pool=pool, size=size)

        loop = asyncio.get_running_loop()
        since_s, look_s = loop.time(), FIRST_LOOK_S
        while True:
            made = await self._told(operations.MAKE_PERSISTENT, wanted, name=name)
            session = session_of_persistent(made, owner["uid"])
            if made.state == "allocated" and session is not None:
                # List the session before Slurm gets the reply, because Slurm then looks for it at once.
                self._files.list_persistent(session)
                return "ok", "created"
            setup_wait_s = SETUP_WAIT_S if self.site is None else self.site.setup_wait_s
            if made.failed or (made.state in ("none", "deleting") and loop.time() - since_s > setup_wait_s):
                await self._told(operations.REMOVE_PERSISTENT, lambda **own: _removal(**own, **owner), name=name)
                return "fail", made.message or f"the persistent buffer {name} could not be created"
            await asyncio.sleep(look_s)
            look_s = min(LOOK_S_MAX, 2 * look_s)

    async def destroy_persistent(self, words: list[str], script: str) -> Answer:
        """Delete a persistent buffer for the user of a job (`name, job, hurry`), and wait for the end."""
        name, job = words[0], words[1] if len(words) > 1 else ""
        if not (job.isascii() and job.isdigit() and len(job) <= 10):
            return (
                "fail",
                f"{name} cannot be removed: the script's path does not contain the ID of the job that requests it",
            )
        uid = await self._ask_owner(job)
        owner = uid if isinstance(uid, str) else await self._owner(uid)
        if isinstance(owner, str):
            return "fail", owner
        hurry, look_s = words[2:3] == ["true"], FIRST_LOOK_S
        while True:
            left = await self._told(
                operations.REMOVE_PERSISTENT, lambda **own: _removal(**own, **owner, hurry=hurry), name=name
            )
            if left.state == "none":
                self._files.unlist_persistent(name)
                return "ok", ""
            if left.failed:
                return "fail", left.message or f"the persistent buffer {name} could not be removed"
            await asyncio.sleep(look_s)
            look_s = min(LOOK_S_MAX, 2 * look_s)

    async def _owner(self, uid: int) -> dict[str, Any] | str:
        """Return user, uid and gid as requests contain them, or the fault."""
        try:
            account = await asyncio.to_thread(pwd.getpwuid, uid)
        except KeyError:
            return f"this host has no user with the ID {uid}"
        return {"user": account.pw_name, "uid": uid, "gid": account.pw_gid}

    # Functions at any time

    async def job_process(self, words: list[str], script: str) -> Answer:
        """Check that a script's directives can be parsed (datawarp only; burst_buffer.lua checks by itself)."""
        if self.site is None:
            return "fail", "the buffer is not available: no replica of Forebay has answered yet; try again"
        try:
            asked = _asked(self.site, script)
        except DirectiveRejected as refused:
            return "fail", str(refused)
        if asked is None:
            return "ok", ""
        overlap = find_overlap_in(asked)
        if overlap is not None:
            return "fail", str(DirectiveRejected(overlap))
        fault = _counted_fault(asked)
        if fault:
            places = (*asked.places[1:2], *(made.place for made in asked.creates), "script")
            return "fail", f"{next(filter(None, places))}: {fault}"
        if not asked.pool:
            return self._largest_fits(asked)
        names = sorted(pool.name for pool in self.site.pools)
        found = {one.name: one for one in self.site.pools}.get(asked.pool)
        if found is None:
            return "fail", f"{asked.places[0]}: pool {asked.pool!r} does not exist; use one of: {', '.join(names)}"
        if not found.quantity:
            remedy = "use another pool, or submit without a buffer"
            return "fail", f"{asked.places[0]}: pool {found.name} is out of service; {remedy}"
        if asked.capacity_bytes > found.quantity:
            size, asks = format_size(found.quantity), format_size(asked.capacity_bytes)
            return "fail", f"{asked.places[1]}: {asks} exceeds the capacity of pool {found.name}, {size}; request less"
        return "ok", ""

    def _largest_fits(self, asked: BufferRequest) -> Answer:
        """Check that some pool could satisfy a request without a pool.

        Slurm charges the request to its own default pool, which may differ from Forebay's, and leaves requests that are
        too large pending for ever.
        """
        assert self.site is not None
        if not (asked.capacity_bytes and self.site.pools):
            return "ok", ""
        largest = max(self.site.pools, key=lambda pool: pool.quantity)
        if not largest.quantity:
            return "fail", f"{asked.places[0]}: all pools are out of service; submit without a buffer"
        if asked.capacity_bytes > largest.quantity:
            size, asks = format_size(largest.quantity), format_size(asked.capacity_bytes)
            why = f"no pool has {asks}: {largest.name}, the largest, has {size}; request less"
            return "fail", f"{asked.places[1]}: {why}"
        return "ok", ""

    async def get_status(self, words: list[str], script: str) -> Answer:
        """Return the text of `scontrol show bbstat JOB`.

        The text contains no paths and no users, because every user may read it: Slurm 22.05 does not pass the caller's
        identity.
        """
        jobs = [word for word in words if word.isascii() and word.isdigit() and len(word) <= 10]
        if not jobs:
            return "ok", "usage: scontrol show bbstat PLUGIN JOB, where PLUGIN is lua or datawarp\n"
        # From 23.02 on, the caller's uid and gid come first.
        external_job = await self._show(jobs[-1])
        stuck = STUCK.format(external_job.job) if self.is_stuck(external_job.job) else ""
        if external_job.job_id is None:
            return "ok", f"job {external_job.job}: Forebay has no buffer of this job\n{stuck}"
        name = f"{external_job.scheduler}:{external_job.job}"
        why = await self._told(operations.EXPLAIN_JOB, None, id=name)
        moved = await self._told(operations.SHOW_JOB_TRANSFERS, None, id=name)
        return "ok", "".join(f"{line}\n" for line in _status(external_job, why, moved.transfer)) + stuck


def _asked(site: g.SchedulerSiteAnswer, script: str) -> BufferRequest | None:
    """Return a script's buffer request as `setup` reads it: with Slurm's directive, otherwise with Forebay's, #DW."""
    variables = PathVariables(site.path_variables, by_scheduler=True)
    asked = read_external_job_request(script, directive=site.directive, variables=variables).request
    if asked is not None:
        return asked
    return read_request(script, "", "", provider=site.provider, variables=variables).request


def _counted_fault(asked: BufferRequest) -> str:
    """Return why a setup would reject a request in Forebay's directives, or an empty string.

    Either Slurm would count the request differently, or the request depends on the job's nodes.
    """
    part = _PART.search(asked.text)
    if part is not None:
        return (
            f"Slurm reads '{part[1]}' as the integer before its decimal point; write a whole number with a smaller "
            "unit, for example 1536MiB"
        )
    if Access.PRIVATE in asked.access:
        return (
            "access_mode=private is not possible, because the nodes of the job are not known yet; use "
            "access_mode=striped"
        )
    if asked.capacity_bytes and asked.units == "count":
        return (
            "a capacity in nodes is not possible, because the nodes of the job are not known yet; write a size, for "
            "example capacity=10GiB"
        )
    if not (asked.capacity_bytes or asked.uses or asked.creates or asked.destroys):
        return "the job requests no space of its own; write for example #DW jobdw capacity=10GiB"
    return ""


_PART: Final = re.compile(r"(?:^|[ \t])capacity=([0-9]*\.[^ \t]*)", re.MULTILINE)
"""Capacity that is not a whole number."""


def _status(external_job: g.ExternalJobAnswer, why: WhyView, moving: TransferView | None) -> Iterator[str]:
    size = format_size(external_job.size) if external_job.size else "nothing"
    pool = external_job.pool or "-"
    yield f"job {external_job.job}: {external_job.phase} (epoch {external_job.epoch}, {size} of pool {pool})"
    if "/" not in why.sentence:  # the sentence contains a path from an operation's message
        yield f"why: {why.sentence}"
    if moving is not None:
        parts = [
            f"{moving.files_done} of {moving.files_total} files",
            f"{_mib(moving.bytes_done)} of {_mib(moving.bytes_total)}",
            f"{_mib(moving.rate_bytes_s)}/s",
        ]
        if moving.time_left_s is not None:
            parts.append(f"{moving.time_left_s:.0f} s left")
        yield f"{moving.stage}, attempt {moving.attempt} on {moving.node}, {moving.state}: {', '.join(parts)}"
    yield f"staged in: {external_job.staged_in_files} files, {_mib(external_job.staged_in_bytes)}"
    yield f"staged out: {external_job.staged_out_files} files, {_mib(external_job.staged_out_bytes)}"


def _removal(**fields: Any) -> g.RemovePersistentRequest:
    return g.RemovePersistentRequest(**fields)


def _size(text: str) -> int | None:
    """Return a size in Slurm's notation (8MiB, 8MB, 8388608, 0) in bytes, None if invalid."""
    try:
        return 0 if text == "0" else parse_size(text)
    except SizeError:
        return None


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


def _exported(external_job: g.ExternalJobAnswer) -> Answer:
    if external_job.phase == "stage-out-failed" or external_job.phase in ("running", "post-run"):
        return "fail", external_job.message or f"the buffer is {external_job.phase}"
    return "ok", ""


def _account(uid: int, gid: int) -> tuple[str, tuple[int, ...]]:
    """Return a user's name and groups from the host's name service.

    Raises:
        KeyError: The user does not exist on this host.
    """
    name = pwd.getpwuid(uid).pw_name
    return name, tuple(os.getgrouplist(name, gid))


def sentence(error: ApiError) -> str:
    """Format a rejection with its location and remedy on one line."""
    said = f"{error.place}: {error.sentence}" if error.place and " line " in error.place else error.sentence
    return (f"{said}; {error.remedy}" if error.remedy else said).replace("\n", " ")


_FUNCTIONS: Final[dict[str, _Perform]] = {
    method.__name__: method
    for method in (
        PluginCalls.setup,
        PluginCalls.data_in,
        PluginCalls.begin_data_in,
        PluginCalls.test_data_in,
        PluginCalls.pre_run,
        PluginCalls.post_run,
        PluginCalls.data_out,
        PluginCalls.begin_data_out,
        PluginCalls.test_data_out,
        PluginCalls.teardown,
        PluginCalls.create_persistent,
        PluginCalls.destroy_persistent,
        PluginCalls.job_process,
        PluginCalls.get_status,
    )
}
_OF_NAMES: Final = frozenset({PluginCalls.create_persistent, PluginCalls.destroy_persistent})
_WITHOUT_JOB: Final = frozenset({PluginCalls.job_process, PluginCalls.get_status})

FUNCTIONS: Final = frozenset(_FUNCTIONS)
"""Names of the functions."""

STAGE_IN: Final = frozenset({"data_in", "begin_data_in", "test_data_in"})
"""Functions of a stage-in, which never end the wait of the job's teardown."""

_NEXT_S: Final = {("setup", "ok"): NEXT_S, ("begin_data_in", "ok"): NEXT_S, ("test_data_in", "busy"): POLLED_AGAIN_S}
"""Function and reply -> seconds within which Slurm calls the next function of the stage-in."""

QUESTIONS: Final = frozenset({"test_data_in", "test_data_out", "job_process", "get_status"})
"""Functions that change nothing, and so do not end the wait of other calls."""

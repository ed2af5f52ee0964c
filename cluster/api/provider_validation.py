"""Validation of submits by the site's provider, on the leader.

Calls run in worker processes (cluster.providers.calls), a bounded number at once. A provider that hangs delays only the
submits it validates.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Final

from forebay.cluster.api.web import Problem, queue_full
from forebay.cluster.providers import Local, OperationError, Subject
from forebay.cluster.providers.calls import ProviderCalls, TooManyCalls
from forebay.cluster.providers.worker import CallRequest
from forebay.replica.fold import find_reply
from forebay.replica.messages import commands as c
from forebay.replica.model import JobStatus, Provision, format_dependencies, provision_of
from forebay.replica.state import State

VERDICTS_KEPT: Final = 1024
"""Verdicts kept, count, so that a retry of a submit gets the verdict of its first try."""

PROVIDER_REFUSED: Final = "provider_refused"
"""Error code: the provider rejected a job's request or could not validate it."""


class ProviderValidation:
    """Provider calls of one replica, which validate submits."""

    def __init__(self, local: Local) -> None:
        """`local`: location of the provider's programs on this machine."""
        self.calls = ProviderCalls()
        self.local = local
        self._verdicts: OrderedDict[tuple[bytes, bytes], asyncio.Task[str | None]] = OrderedDict()
        """Verdicts by command ID and content: the provider's objection, empty for none; None if it was not called.

        A reused ID with other content has no verdict.
        """

    async def validate(self, state: State, command_id: bytes, command: c.SubmitJob) -> None:
        """Have the provider validate a job with a burst buffer.

        A settled command is not validated again, and a retry waits for the verdict of its first try.

        Raises:
            Problem: 400, with the provider's objection; 429, if the provider is busy.
        """
        provision = provision_of(state)
        if provision is None or not asks(command) or find_reply(state, command_id) is not None:
            return
        key = _key(command_id, command)
        task = self._verdicts.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._verdict(provision, command), name="validate")
            self._verdicts[key] = task
            while len(self._verdicts) > VERDICTS_KEPT:
                self._verdicts.popitem(last=False)
        # Shielded, so that a retry after a disconnect finds the call in progress.
        failed = await asyncio.shield(task)
        if failed is None:
            if self._verdicts.get(key) is task:
                del self._verdicts[key]
            raise queue_full("too many submits wait for the provider", "send it again after the time in Retry-After")
        if failed:
            raise Problem(
                400,
                PROVIDER_REFUSED,
                f"burst_buffer/{provision.provider}: {failed}",
                "correct the cause that the provider reports, and submit again",
            )

    def is_needed(self, state: State) -> bool:
        """Return True if the site has a provider that validates submits."""
        return provision_of(state) is not None

    def check_validated(self, state: State, command_id: bytes, command: c.SubmitJob) -> None:
        """Check that a job was validated if the provider requires it.

        Every path to the proposer calls this.

        Raises:
            Problem: 503, if it was not.
        """
        if not self.is_needed(state) or not asks(command) or find_reply(state, command_id) is not None:
            return
        task = self._verdicts.get(_key(command_id, command))
        if task is None or not task.done() or task.cancelled() or task.result() != "":
            raise Problem(
                503, PROVIDER_REFUSED, "the provider has not validated the request", "submit it again in a moment"
            )

    async def _verdict(self, provision: Provision, command: c.SubmitJob) -> str | None:
        request = CallRequest(operation="process", provision=provision, local=self.local, subject=subject_of(command))
        try:
            await self.calls.ask(request, provision.validate_timeout_s)
        except TooManyCalls:
            return None
        except OperationError as error:
            return error.message
        return ""

    async def close(self) -> None:
        """Stop calls in progress."""
        await self.calls.close()
        for task in self._verdicts.values():
            task.cancel()
        await asyncio.gather(*self._verdicts.values(), return_exceptions=True)


def _key(command_id: bytes, command: c.SubmitJob) -> tuple[bytes, bytes]:
    return command_id, c.command_digest(c.Request(command_id, c.CONTROLLER, command))


def asks(command: c.SubmitJob) -> bool:
    """Return True if a job requests a burst buffer, which needs validation."""
    return command.request.buffer is not None


def subject_of(command: c.SubmitJob) -> Subject:
    """Return the provider's view of a job that has no ID yet."""
    request, options, asked = command.request, command.request.effective_options, command.request.buffer
    return Subject(
        job=0,
        name=request.name,
        user=request.user,
        gid=options.gid,
        workdir=request.workdir,
        script=request.script,
        directives="" if asked is None else asked.text,
        pool="" if asked is None else asked.pool,
        size=0 if asked is None else asked.capacity_bytes,
        has_size=asked is not None and asked.capacity_bytes > 0,
        options=options,
        status=JobStatus(
            priority=request.priority,
            dependency=format_dependencies(request, request.dependencies),
            output=request.output,
            error=options.error,
            eligible_at=request.begin_at,
            deadline=request.deadline,
        ),
        time_limit_s=request.time_limit_s,
        cpus=request.cpus,
        persistent_only=options.nodes == 0,
    )

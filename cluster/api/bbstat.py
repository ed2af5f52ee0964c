"""`bbstat`: what the site's burst-buffer provider says of itself."""

from __future__ import annotations

from typing import Final

import msgspec

from cluster.api.authentication import actor_of
from cluster.api.problems import Problem, bad
from cluster.api.service import Call, Reply
from cluster.providers import OperationError
from cluster.providers.calls import TooManyCalls
from cluster.providers.limits import STATUS_ARGUMENT_BYTES_MAX, STATUS_ARGUMENTS_MAX
from cluster.providers.worker import CallRequest
from cluster.schemas.burst import ProviderStatus
from replica.model.provider import provision_of

PROVIDER_FAILED: Final = "provider_failed"
"""Code: the provider cannot be asked, or says that it failed."""

STATUS_WAIT_S_MAX: Final = 60
"""How long `bbstat` waits for its answer, seconds: somebody looks at the terminal."""


async def status(call: Call) -> Reply:
    """Ask the site's burst-buffer provider for its status, as `scontrol show bbstat` does."""
    arguments = _arguments(call.query.get("arguments", "[]"))
    service = call.service
    await service.lead()
    state = await service.current()
    provision = provision_of(state)
    if provision is None:
        raise Problem(
            409,
            "wrong_state",
            "the agents of this cluster move the data themselves, so there is no provider to ask",
            "see forebay burst and forebay transfer list",
        )
    request = CallRequest(
        operation="get_status",
        provision=msgspec.structs.replace(provision, other_timeout_s=min(provision.other_timeout_s, STATUS_WAIT_S_MAX)),
        local=service.providing.local,
        user=actor_of(call.identity).name,
        arguments=arguments,
    )
    try:
        answer = await service.providing.calls.ask(request, min(provision.other_timeout_s, STATUS_WAIT_S_MAX))
    except TooManyCalls as error:
        raise Problem(
            429,
            "queue_full",
            "too many questions wait for the provider",
            "ask later",
            headers={"Retry-After": "1"},
        ) from error
    except OperationError as error:
        what = "slurm_bb_get_status" if provision.provider == "lua" else "the status command"
        # No gateway's status: clients would ask every replica again, and the answer would be the same.
        raise Problem(
            409, PROVIDER_FAILED, f"Error running {what}: {error.message}", "see the log of the leading replica"
        ) from error
    return Reply(state.revision, ProviderStatus(revision=state.revision, text=answer.text))


def _arguments(text: str) -> tuple[str, ...]:
    try:
        found = msgspec.json.decode(text, type=tuple[str, ...])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(
            f"arguments are no JSON list of texts: {error}", 'write for example ["sessions"]', "query arguments"
        ) from error
    if len(found) > STATUS_ARGUMENTS_MAX:
        raise bad(f"there are {len(found)} arguments", f"use at most {STATUS_ARGUMENTS_MAX}", "query arguments")
    for argument in found:
        if "\0" in argument or len(argument.encode("utf-8", "replace")) > STATUS_ARGUMENT_BYTES_MAX:
            raise bad(
                "an argument is too long or has a NUL character in it",
                f"use at most {STATUS_ARGUMENT_BYTES_MAX} bytes",
                "query arguments",
            )
    return found

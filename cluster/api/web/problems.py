"""Errors of requests: status, code for programs, and sentence for users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from forebay.cluster.schemas import ErrorAnswer, ErrorView, OtherError
from forebay.replica.values import RECEIPTS_KEPT_S, Rejection, RejectionCode

RETRY_AFTER_S = 1
"""Retry-After without a leader or with a full queue, seconds: longer than most elections."""


COMMAND_TOO_OLD = RejectionCode.COMMAND_TOO_OLD.name.lower()
"""Code of an ID whose cached reply may have expired."""


class Problem(Exception):
    """Error response with a status of 400 or above. Raised by handlers, written by the server."""

    def __init__(
        self,
        status: int,
        code: str,
        sentence: str,
        remedy: str = "",
        place: str = "",
        *,
        outcome: Literal["rejected", "unknown"] = "rejected",
        headers: Mapping[str, str] | None = None,
        others: tuple[OtherError, ...] | msgspec.UnsetType = msgspec.UNSET,
    ) -> None:
        super().__init__(sentence)
        self.status = status
        self.view = ErrorView(
            code=code, sentence=sentence, remedy=remedy, place=place, outcome=outcome, others=others or msgspec.UNSET
        )
        self.headers = dict(headers or {})

    @property
    def body(self) -> ErrorAnswer:
        """Body of the response."""
        return ErrorAnswer(error=self.view)


class Redirect(Exception):
    """Another replica leads: 307 to the same target at `base`, such as `https://10.0.0.2:7411`."""

    def __init__(self, base: str) -> None:
        super().__init__(base)
        self.base = base


STATUS_OF: Mapping[RejectionCode, int] = {
    RejectionCode.UNKNOWN_POOL: 400,
    RejectionCode.CAPACITY_OVER_TOTAL: 400,
    RejectionCode.INVALID_CAPACITY: 400,
    RejectionCode.UNKNOWN_JOB: 404,
    RejectionCode.PERMISSION_DENIED: 403,
    RejectionCode.WRONG_STATE: 409,
    RejectionCode.COMMAND_ID_REUSED: 409,
    RejectionCode.STALE_ATTEMPT: 409,
    RejectionCode.UNKNOWN_NODE: 404,
    RejectionCode.LIMIT_EXCEEDED: 409,
    RejectionCode.INVALID_FIELD: 400,
    RejectionCode.PATH_NOT_ALLOWED: 403,
    RejectionCode.COMMAND_TOO_OLD: 400,
    RejectionCode.UNKNOWN_SESSION: 404,
    RejectionCode.ALREADY_FOUNDED: 409,
    RejectionCode.NO_DEFAULT_POOL: 400,
    RejectionCode.UNKNOWN_DEPENDENCY: 400,
    RejectionCode.ROOT_NOT_ALLOWED: 403,
    RejectionCode.STORAGE_CHANGED: 409,
    RejectionCode.NOT_FOUNDED: 503,
    RejectionCode.INVALID_DIRECTIVE: 400,
}
"""Status of each rejection: 400 invalid, 403 not permitted, 404 not found, 409 conflicts with the state."""


def rejection_problem(rejection: Rejection) -> Problem:
    """Convert a rejection to an error response."""
    return Problem(
        STATUS_OF.get(rejection.code, 409),
        rejection.code.name.lower(),
        rejection.sentence,
        rejection.remedy,
        rejection.place,
        # Its cached reply may have expired, so an earlier request's outcome is unknown.
        outcome="unknown" if rejection.code is RejectionCode.COMMAND_TOO_OLD else "rejected",
    )


def bad_request(sentence: str, remedy: str = "", place: str = "", code: str = "invalid_field") -> Problem:
    """Return an error of the request itself."""
    return Problem(400, code, sentence, remedy, place)


def unknown_job(sentence: str, remedy: str = "see /v1/jobs", place: str = "job id") -> Problem:
    """Return the error for a job that does not exist."""
    return Problem(404, "unknown_job", sentence, remedy, place)


def too_busy(sentence: str, remedy: str = "try again in a moment", retry_after_s: int = RETRY_AFTER_S) -> Problem:
    """Return the error for a temporary lack of capacity."""
    return Problem(503, "too_busy", sentence, remedy, headers={"Retry-After": str(retry_after_s)})


def too_many(sentence: str, remedy: str, retry_after_s: int = RETRY_AFTER_S) -> Problem:
    """Return the error for exceeding a limit."""
    return Problem(429, "too_many_requests", sentence, remedy, headers={"Retry-After": str(retry_after_s)})


def permission_denied(sentence: str, remedy: str, place: str = "") -> Problem:
    """Return the error for a missing permission."""
    return Problem(403, "permission_denied", sentence, remedy, place)


def no_leader(sentence: str = "no replica leads at the moment") -> Problem:
    """Return the error for a missing leader; nothing has changed."""
    return Problem(503, "no_leader", sentence, "try again in a moment", headers={"Retry-After": str(RETRY_AFTER_S)})


def internal_error(remedy: str, outcome: Literal["rejected", "unknown"]) -> Problem:
    """Return the error for a bug in this release; the outcome of a write is unknown."""
    words = "the request failed because of a fault in this release"
    return Problem(500, "internal_error", words, remedy, outcome=outcome)


def outcome_unknown() -> Problem:
    """Return the error for a command with an unknown outcome."""
    return Problem(
        503,
        "outcome_unknown",
        "this replica stopped leading while the command was under way, so its outcome is unknown here",
        "send the command again with the same command_id: it is executed once, and you get its reply",
        outcome="unknown",
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def queue_full(
    sentence: str = "too many commands are waiting to be decided",
    remedy: str = "send it again after the time in Retry-After, or send many in one request to /v1/commands",
) -> Problem:
    """Return the error for a full queue."""
    return Problem(
        429,
        "queue_full",
        sentence,
        remedy,
        headers={"Retry-After": str(RETRY_AFTER_S)},
    )


def too_many_answers(sentence: str) -> Problem:
    """Return the error for a single command beyond the limit of cached replies."""
    remedy = (
        f"wait: each is cached for {RECEIPTS_KEPT_S} s; programs with many commands use a session (POST /v1/sessions)"
    )
    return Problem(429, "too_many_answers", sentence, remedy, headers={"Retry-After": str(RETRY_AFTER_S)})

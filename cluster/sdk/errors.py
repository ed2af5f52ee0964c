"""Errors of the Python API: one tree, each with a code for programs, a message and a remedy for users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forebay.cluster.client import ApiError
    from forebay.cluster.schemas import JobView

CONFIGURATION: Final = "configuration"
INVALID_SCRIPT: Final = "invalid_script"
WAIT_TIMEOUT: Final = "wait_timeout"
JOB_FAILED: Final = "job_failed"
"""Codes of errors that are found by the client; all others come from the cluster."""


class ForebayError(Exception):
    """Base of all errors of this API.

    Attributes:
        code: Stable code for programs, for example `unknown_pool`.
        message: Cause, for users.
        remedy: Action to take; may be empty.
        place: Part of the input that is wrong, for example `script line 2`; may be empty.
        command_id: ID of the failed command; None for reads.
    """

    def __init__(
        self, code: str, message: str, remedy: str = "", *, place: str = "", command_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.remedy = remedy
        self.place = place
        self.command_id = command_id

    def __str__(self) -> str:
        message = f"{self.place}: {self.message}" if self.place else self.message
        return f"{message}; {self.remedy}" if self.remedy else message


class ConfigurationError(ForebayError):
    """The configuration or a certificate is missing or cannot be used; nothing was sent."""


class InvalidRequestError(ForebayError):
    """The script or an option is invalid; nothing changed."""


class PermissionDeniedError(ForebayError):
    """The identity may not do this, or is not trusted; nothing changed."""


class NotFoundError(ForebayError):
    """The named object does not exist; nothing changed."""


class RejectedError(ForebayError):
    """The present state of the cluster, or a limit, does not allow it; nothing changed."""


class UnavailableError(ForebayError):
    """No replica answered, or none leads; nothing changed. Retries have already been made."""


class OutcomeUnknownError(ForebayError):
    """No reply arrived, so the command may or may not have been carried out.

    Repeat the call with `command_id` set to that of this error: the command takes effect at most once.
    """


class WaitTimeoutError(ForebayError, TimeoutError):
    """The jobs have not finished in time."""


class JobFailedError(ForebayError):
    """A job ended without success; `job` is its last state."""

    def __init__(self, job: JobView) -> None:
        ended = f"job {job.job_id} ended as {job.state}"
        detail = f" with exit code {job.exit_code}" if job.exit_code else f" by signal {job.signal}" * bool(job.signal)
        super().__init__(JOB_FAILED, ended + detail, "see the job's history and output")
        self.job = job


_BY_STATUS: Final[dict[int, type[ForebayError]]] = {
    HTTPStatus.UNAUTHORIZED: PermissionDeniedError,
    HTTPStatus.FORBIDDEN: PermissionDeniedError,
    HTTPStatus.NOT_FOUND: NotFoundError,
    HTTPStatus.CONFLICT: RejectedError,
    HTTPStatus.GONE: NotFoundError,
    HTTPStatus.TOO_MANY_REQUESTS: RejectedError,
    HTTPStatus.INSUFFICIENT_STORAGE: RejectedError,
}


def error_of_call(error: ApiError) -> ForebayError:
    """Convert an error of the client."""
    kind = _kind_of(error)
    return kind(error.code, error.sentence, error.remedy, place=error.place, command_id=error.command_id)


def _kind_of(error: ApiError) -> type[ForebayError]:
    from forebay.cluster.client import NO_ANSWER, UNTRUSTED

    if error.outcome == "unknown":
        return OutcomeUnknownError
    if error.code == UNTRUSTED:
        return PermissionDeniedError
    if error.status == NO_ANSWER or error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return _BY_STATUS.get(error.status, UnavailableError)
    return _BY_STATUS.get(error.status, InvalidRequestError)


@contextmanager
def converted_errors() -> Iterator[None]:
    """Convert errors of the packages below into ForebayError."""
    try:
        yield
    except Exception as error:
        found = _error_of(error)
        if found is None:
            raise
        raise found from error


def _error_of(error: Exception) -> ForebayError | None:
    """Return the converted error; None for one that is not of the packages below."""
    # Imported for an error only, because a program that imports this API pays for every module.
    from forebay.cluster.client import ApiError
    from forebay.cluster.config import ConfigError
    from forebay.cluster.security import TlsError

    if isinstance(error, ApiError):
        return error_of_call(error)
    if isinstance(error, ConfigError):
        return ConfigurationError(CONFIGURATION, error.sentence, error.remedy, place=error.place)
    if isinstance(error, TlsError):
        message, _, remedy = str(error).partition("; ")
        return ConfigurationError(CONFIGURATION, message, remedy)
    return None

"""Python API for users' programs, exported as `forebay`: clients, results and errors."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.sdk.async_client import AsyncClient
    from forebay.cluster.sdk.client import Client
    from forebay.cluster.sdk.errors import (
        ConfigurationError,
        ForebayError,
        InvalidRequestError,
        JobFailedError,
        NotFoundError,
        OutcomeUnknownError,
        PermissionDeniedError,
        RejectedError,
        UnavailableError,
        WaitTimeoutError,
    )
    from forebay.cluster.sdk.submission import SubmitOptions
else:
    __getattr__ = export_lazily(__name__)

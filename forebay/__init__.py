"""Forebay, a burst-buffer controller: the Python API.

    from forebay import Client

    with Client.connect() as client:
        job = client.submit("#!/bin/sh\\n#DW jobdw capacity=1GiB\\nhostname\\n")
        client.wait(job, check=True)

The packages of Forebay are links to the top-level directories; a wheel contains their files.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.cluster.schemas import (
        BufferView,
        EventView,
        HistoryAnswer,
        HistoryRow,
        JobTransfersView,
        JobView,
        PoolView,
        ReceiptView,
        StatusView,
        TransferView,
    )
    from forebay.cluster.sdk import (
        AsyncClient,
        Client,
        ConfigurationError,
        ForebayError,
        InvalidRequestError,
        JobFailedError,
        NotFoundError,
        OutcomeUnknownError,
        PermissionDeniedError,
        RejectedError,
        SubmitOptions,
        UnavailableError,
        WaitTimeoutError,
    )
else:

    def __getattr__(name):
        # Every command imports this module first, so it imports nothing itself.
        if name.startswith("__"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from forebay.replica.lazy_exports import export_lazily

        return export_lazily(__name__)(name)


__all__ = [
    "AsyncClient",
    "BufferView",
    "Client",
    "ConfigurationError",
    "EventView",
    "ForebayError",
    "HistoryAnswer",
    "HistoryRow",
    "InvalidRequestError",
    "JobFailedError",
    "JobTransfersView",
    "JobView",
    "NotFoundError",
    "OutcomeUnknownError",
    "PermissionDeniedError",
    "PoolView",
    "ReceiptView",
    "RejectedError",
    "StatusView",
    "SubmitOptions",
    "TransferView",
    "UnavailableError",
    "WaitTimeoutError",
]

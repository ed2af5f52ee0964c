"""Transfers, receipts and unexported files: views, and the handlers of `/v1/transfers`."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.transfers.handlers import summary_of
    from forebay.cluster.api.transfers.views import (
        is_transfer,
        transfer_view,
        transfers_of,
        with_transfers,
    )
else:
    __getattr__ = export_lazily(__name__)

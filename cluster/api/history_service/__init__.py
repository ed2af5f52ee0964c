"""History service: answers queries about past states in a separate process, using a per-job index."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.history_service.follower import Follower, note_of
    from forebay.cluster.api.history_service.frames import (
        NO_JOB,
        REJECTED,
        REVERSED,
        CommandEvents,
        EventFilter,
        EventPageQuery,
        JobRecord,
        LeaderTerm,
        LedgerRecords,
        PastQuery,
        PastReply,
        PoolUseReply,
        PresentQuery,
        QueryFailure,
        RecordsQuery,
        RecordsReply,
        WhyReply,
    )
    from forebay.cluster.api.history_service.present import PresentState
    from forebay.cluster.api.history_service.service import (
        HistoryService,
        HistoryServiceBusy,
        HistoryServiceLost,
        HistoryServiceTimeout,
        ProofUnavailable,
    )
else:
    __getattr__ = export_lazily(__name__)

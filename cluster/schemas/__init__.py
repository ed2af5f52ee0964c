"""Wire schemas: requests, responses, frames, and command IDs."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.schemas.agents import (
        PROGRESS_ROWS_MAX,
        OperationProgress,
        OperationReport,
        PollRequest,
        RegisterRequest,
        ReportsRequest,
        StageWord,
    )
    from forebay.cluster.schemas.base import (
        BODY_BYTES_MAX,
        NUMBER_MAX,
        USER_HEADER,
        Answer,
        Command,
        Json,
        made_of,
        shared_fields,
    )
    from forebay.cluster.schemas.burst import (
        NO_VALUE,
        BurstAnswer,
        BurstBufferView,
        BurstPoolView,
        BurstUseView,
        ProviderStatus,
        Zone,
        burst_lines,
        burst_text,
        local_time,
        owner,
    )
    from forebay.cluster.schemas.channel_frames import (
        ANSWER_BYTES_MAX,
        CHANNEL_VERSION,
        FRAME_BYTES_MAX,
        LENGTH,
        NOT_LEADER,
        OUTSTANDING_MAX,
        ChannelProtocolError,
        CommandFrame,
        FailureFrame,
        FrameSplitter,
        HelloFrame,
        SuccessFrame,
        check_hello,
        decode_from_client,
        decode_from_replica,
        encode_body,
        encode_frame,
    )
    from forebay.cluster.schemas.command_ids import bytes_of, instant_in, instant_of, new_command_id
    from forebay.cluster.schemas.configuration import (
        CompareAnswer,
        UnitWord,
    )
    from forebay.cluster.schemas.job_fields import (
        IF_DEFINED,
        IGNORED_OPTIONS_MAX,
        JOB_FIELDS,
        NO_DETAILS,
        OPTION_SHOWN_MAX,
        JobDetailsView,
        JobField,
        Reads,
        SubmitRequest,
        UpdateRequest,
    )
    from forebay.cluster.schemas.jobs import (
        AdmittedAnswer,
        ArchivedView,
        BuffersAnswer,
        BufferView,
        BulkAnswer,
        CollapsedTasksView,
        CommandResult,
        DigestsAnswer,
        ErrorAnswer,
        ErrorView,
        FilesystemsAnswer,
        FilesystemView,
        HistoryAnswer,
        HistoryRow,
        JobsAnswer,
        JobView,
        LostJobView,
        MembersAnswer,
        MemberView,
        NodeLostAnswer,
        NodesAnswer,
        NodeView,
        OtherError,
        PollAnswer,
        PoolsAnswer,
        PoolView,
        RegisterAnswer,
        ReportResult,
        ReportsAnswer,
        StateDigestAnswer,
        StatusView,
        TransferAnswer,
        WhyView,
    )
    from forebay.cluster.schemas.ledger import (
        ChangeView,
        CheckpointAnswer,
        CheckpointRequest,
        ClockAnswer,
        DiffAnswer,
        EventView,
        FeatureLevelAnswer,
        HandedAnswer,
        HandedView,
        HistoriesView,
        LeadersAnswer,
        LeaderTermView,
        LedgerAnswer,
        LedgerEntryView,
        LogKeysAnswer,
        LogKeyView,
        MemberLevelView,
        MomentView,
        SignedAnswer,
        SignRequest,
        SnapshotPoolView,
        SnapshotsAnswer,
        SnapshotView,
        StoredSnapshotView,
        StoryAnswer,
        StoryRow,
        WitnessKeyView,
    )
    from forebay.cluster.schemas.operations import OPERATIONS, PEOPLE, ApiOperation, Parameter
    from forebay.cluster.schemas.overview import (
        EXPIRY_NOTICE_DAYS,
        NeedKind,
        NeedView,
        OverviewAnswer,
        PoolStepView,
        PoolUseAnswer,
        PoolUseView,
        TransfersSummary,
        days_left,
    )
    from forebay.cluster.schemas.requests import (
        BULK_COMMANDS_MAX,
        FEATURE_LEVEL_MAX,
        BulkCommand,
        BulkRequest,
        CancelCommand,
        ContinueCommand,
        FeatureLevelRequest,
        HoldCommand,
        OpenSessionCommand,
        PersistentClearedAnswer,
        PoolRequest,
        ReleaseCommand,
        RequeueCommand,
        SetClockRequest,
        SubmitCommand,
        SuspendCommand,
        UpdateCommand,
    )
    from forebay.cluster.schemas.transfers import (
        CheckpointView,
        JobTransfersView,
        LeftOutView,
        NotExportedView,
        ReceiptsAnswer,
        ReceiptView,
        TransfersAnswer,
        TransferState,
        TransferView,
    )
else:
    __getattr__ = export_lazily(
        __name__,
        """
        agents: PROGRESS_ROWS_MAX OperationProgress OperationReport PollRequest RegisterRequest ReportsRequest
        agents: StageWord
        base: BODY_BYTES_MAX NUMBER_MAX USER_HEADER Answer Command Json made_of shared_fields
        burst: NO_VALUE BurstAnswer BurstBufferView BurstPoolView BurstUseView ProviderStatus Zone burst_lines
        burst: burst_text local_time owner
        channel_frames: ANSWER_BYTES_MAX CHANNEL_VERSION FRAME_BYTES_MAX LENGTH NOT_LEADER OUTSTANDING_MAX
        channel_frames: ChannelProtocolError CommandFrame FailureFrame FrameSplitter HelloFrame SuccessFrame
        channel_frames: check_hello decode_from_client decode_from_replica encode_body encode_frame
        command_ids: bytes_of instant_in instant_of new_command_id
        configuration: CompareAnswer UnitWord
        job_fields: IF_DEFINED IGNORED_OPTIONS_MAX JOB_FIELDS NO_DETAILS OPTION_SHOWN_MAX JobDetailsView
        job_fields: JobField Reads SubmitRequest UpdateRequest
        jobs: AdmittedAnswer ArchivedView BufferView BuffersAnswer BulkAnswer CollapsedTasksView CommandResult
        jobs: DigestsAnswer ErrorAnswer ErrorView HistoryAnswer HistoryRow JobView JobsAnswer LostJobView MemberView
        jobs: MembersAnswer NodeLostAnswer NodeView NodesAnswer OtherError FilesystemView FilesystemsAnswer PollAnswer
        jobs: PoolView PoolsAnswer RegisterAnswer ReportResult ReportsAnswer StateDigestAnswer StatusView
        jobs: TransferAnswer WhyView
        ledger: ChangeView CheckpointAnswer CheckpointRequest ClockAnswer DiffAnswer EventView
        ledger: FeatureLevelAnswer HandedAnswer HandedView HistoriesView LeaderTermView LeadersAnswer
        ledger: LedgerAnswer LedgerEntryView LogKeyView LogKeysAnswer MemberLevelView MomentView SignRequest
        ledger: SignedAnswer SnapshotPoolView SnapshotView SnapshotsAnswer StoredSnapshotView StoryAnswer
        ledger: StoryRow WitnessKeyView
        operations: OPERATIONS PEOPLE ApiOperation Parameter
        overview: EXPIRY_NOTICE_DAYS NeedKind NeedView OverviewAnswer PoolStepView PoolUseAnswer PoolUseView
        overview: TransfersSummary days_left
        requests: BULK_COMMANDS_MAX FEATURE_LEVEL_MAX BulkCommand BulkRequest CancelCommand ContinueCommand
        requests: FeatureLevelRequest HoldCommand OpenSessionCommand PersistentClearedAnswer PoolRequest
        requests: ReleaseCommand RequeueCommand SetClockRequest SubmitCommand SuspendCommand UpdateCommand
        transfers: CheckpointView JobTransfersView LeftOutView NotExportedView ReceiptView ReceiptsAnswer
        transfers: TransferState TransferView TransfersAnswer
        """,
    )

"""What can be asked and what has happened: commands, events, what an entry holds, feature levels."""

from replica.messages.commands import (
    CONTROLLER,
    Actor,
    ActorRole,
    CancelJob,
    ChangePool,
    Command,
    ConfigureSite,
    ExpireAnswers,
    FoundCluster,
    MarkNodeBack,
    MarkNodeDown,
    OperationDone,
    OperationFailed,
    OperationReached,
    OperationResult,
    PersistentChanged,
    RaiseFeatureLevel,
    Request,
    RestartOperations,
    RunSchedulingPass,
    ScriptEnded,
    ScriptStarted,
    SetClock,
    SettleMails,
    SubmitJob,
    UpdateJob,
    command_digest,
    kind_of,
)
from replica.messages.entries import NOTHING, Accepted, Batch, Decision, Entry, Receipt, Session, accepted
from replica.messages.events import (
    EVENTS,
    Event,
    FeatureLevelRaised,
    JobSubmitted,
    SiteConfigured,
    TransferRecorded,
    TransferRulesSet,
    job_of,
    jobs_of,
)
from replica.messages.features import (
    ReleaseNeeded,
    check_level,
)

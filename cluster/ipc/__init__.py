"""Child processes of a replica: started, supervised, and connected by frames over a socket pair."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.ipc.child import ChildSocket, begin_child
    from forebay.cluster.ipc.connection import FrameConnection
    from forebay.cluster.ipc.frames import FrameCodec
    from forebay.cluster.ipc.supervisor import RestartDelays, SupervisedProcess
else:
    # A child loads only its own end.
    __getattr__ = export_lazily(__name__)

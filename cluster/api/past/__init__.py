"""The past of a replica, in a process beside it, its historian: the index by job, and states as they once were."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.past.follower import Follower, note_of
    from cluster.api.past.frames import (
        NO_JOB,
        REFUSED,
        TURNED,
        AskThen,
        Explained,
        Happened,
        PoolSteps,
        Record,
        Records,
        Seeking,
        TermLed,
        Then,
        Unanswered,
    )
    from cluster.api.past.link import Historian, HistorianBusy, HistorianLate, NotProven
else:
    __getattr__ = shown(
        __name__,
        """
        follower: Follower note_of
        frames: NO_JOB REFUSED TURNED AskThen Explained Happened PoolSteps Record Records Seeking TermLed Then
        frames: Unanswered
        link: Historian HistorianBusy HistorianLate NotProven
        """,
    )

"""Leader's duty for queued mail: send it, record the result, retry failures.

The queue is in the State (`replica.model.mail`). This module only keeps soft state: mails being sent, retry times, and
results to be recorded. If a leader dies between sending and commit, the next leader sends the mail again, with the same
Message-ID.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final

from forebay.cluster.server import Answer, NotLeading, QueueFull
from forebay.cluster.server.mail.sending import Send, SendFailed, Undeliverable
from forebay.cluster.system import Clock, about
from forebay.replica.messages import CONTROLLER, Request, SettleMails
from forebay.replica.model import Mail
from forebay.replica.state import State
from forebay.replica.values import MAILS_SETTLED_MAX, MESSAGE_CHARACTERS_MAX, MICROSECONDS_PER_SECOND

LOGGER = logging.getLogger(__name__)

SENDING_MAX: Final = 4
"""Maximum number of mails being sent at once: each may be a process, and thousands of jobs may end together."""

RETRY_S: Final = 10.0
"""Wait before the first retry of a mail, seconds; doubled after each."""

RETRY_S_MAX: Final = 3_600.0

AGE_S_MAX: Final = 86_400
"""Age at which a mail is dropped, seconds: older events are no longer news."""

OFF: Final = "mail is disabled on the leader: see [mail] in its forebay.toml"

SUCCESS: Final = ""


class Mailer:
    """Sends queued mail while this replica leads."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        leads: Callable[[], bool],
        submit: Callable[[Request], Answer],
        sender: Callable[[State], Send | None],
        clock: Clock,
    ) -> None:
        """Initialize. `submit` is `Controller.submit`; `sender` returns the present sending function, or None."""
        self._state = state
        self._leads = leads
        self._submit = submit
        self._sender = sender
        self._clock = clock
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._tries: dict[str, tuple[int, float]] = {}
        """Mail -> number of attempts, and the time of the next one on the monotonic clock."""
        self._outcomes: dict[str, str] = {}
        """Mail -> SUCCESS or the reason for giving up, until the ledger records the result."""
        self._settling: Answer | None = None

    def poll(self) -> None:
        """Start all due work; return at once. Called often, and whenever an attempt has ended."""
        if not self._leads():
            self.stop()
            return
        owed = self._state().mails
        for noted in (self._tries, self._outcomes):
            for key in [key for key in noted if key not in owed]:
                del noted[key]
        if not owed:
            return
        send = self._sender(self._state())
        waiting = [mail for mail in owed.values() if mail.key not in self._outcomes and mail.key not in self._sending]
        if send is None:
            for mail in waiting:
                self._outcomes[mail.key] = OFF
        else:
            self._begin(waiting, send)
        self._settle()

    def stop(self) -> None:
        """Abandon pending work: leadership was lost, or the replica stops."""
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()
        self._tries.clear()
        self._outcomes.clear()

    def _begin(self, waiting: list[Mail], send: Send) -> None:
        now_s = self._clock.monotonic_s()
        room = SENDING_MAX - len(self._sending)
        due = [mail for mail in waiting if self._tries.get(mail.key, (0, now_s))[1] <= now_s]
        for mail in sorted(due, key=lambda mail: (mail.at, mail.key))[:room]:
            task = asyncio.create_task(send(mail))
            self._sending[mail.key] = task
            task.add_done_callback(partial(self._sent, mail))

    def _sent(self, mail: Mail, done: asyncio.Task[None]) -> None:
        if done.cancelled():
            return
        self._sending.pop(mail.key, None)
        error = done.exception()
        if error is None:
            self._outcomes[mail.key] = SUCCESS
        elif isinstance(error, Undeliverable):
            self._give_up(mail, str(error))
        else:
            if not isinstance(error, SendFailed | OSError):
                LOGGER.error("sending mail %s failed unexpectedly", mail.key, exc_info=error, extra=about(job=mail.job))
            self._try_later(mail, str(error) or type(error).__name__)
        self.poll()

    def _try_later(self, mail: Mail, why: str) -> None:
        tries = self._tries.get(mail.key, (0, 0.0))[0] + 1
        age_s = (self._clock.now() - mail.at) / MICROSECONDS_PER_SECOND
        if age_s > AGE_S_MAX:
            self._give_up(mail, f"not accepted for a day; the last attempt: {why}")
            return
        pause_s = min(RETRY_S_MAX, RETRY_S * 2.0 ** min(tries - 1, 16))
        self._tries[mail.key] = tries, self._clock.monotonic_s() + pause_s
        LOGGER.warning(
            "mail %s was not sent and is tried again in %.0f s: %s", mail.key, pause_s, why, extra=about(job=mail.job)
        )

    def _give_up(self, mail: Mail, why: str) -> None:
        LOGGER.warning("mail %s is dropped: %s", mail.key, why, extra=about(job=mail.job))
        self._outcomes[mail.key] = why[:MESSAGE_CHARACTERS_MAX]

    def _settle(self) -> None:
        if self._settling is not None or not self._outcomes:
            return
        chosen = list(self._outcomes.items())[:MAILS_SETTLED_MAX]
        command = SettleMails(
            tuple(key for key, why in chosen if why == SUCCESS),
            tuple((key, why) for key, why in chosen if why != SUCCESS),
        )
        try:
            self._settling = self._submit(Request(b"", CONTROLLER, command))
        except (QueueFull, NotLeading):
            return  # the next call retries
        self._settling.add_done_callback(self._settled)

    def _settled(self, answer: Answer) -> None:
        self._settling = None
        if answer.cancelled() or answer.exception() is not None:
            return  # the State shows the result
        rejection = answer.result().rejection
        if rejection is not None:
            LOGGER.error("outcomes of mails could not be recorded: %s", rejection.sentence)
            return
        self.poll()

"""Reminders of drills that were not run within the site's period: a duty of the leader.

Reminders are not stored: their times follow from the last run of the scenario, and repeat weekly. A new leader sends
the reminders that became due within the previous hour, possibly a second time with the same Message-ID. A reminder that
no leader could send within an hour is sent a week later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from forebay.cluster.config import DrillConfig
from forebay.cluster.server.mail.sending import Post
from forebay.cluster.server.mail.text import MESSAGE_ID_DOMAIN, Letter, message_id_line
from forebay.cluster.system import Clock, format_instant
from forebay.replica.model import Drill, latest_completed
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, plain

LOGGER = logging.getLogger(__name__)

DAY_US: Final = 86_400 * MICROSECONDS_PER_SECOND

AGAIN_US: Final = 7 * DAY_US
"""Interval of repeated reminders."""

LATE_US: Final = 3_600 * MICROSECONDS_PER_SECOND
"""Period in which a due reminder is sent: retries, and the maximum delay without a leader."""

LOOK_S: Final = 60.0
"""Interval of checks for due reminders and of retries, seconds."""


class DrillReminder:
    """Sends reminders while this replica leads."""

    def __init__(
        self,
        *,
        state: Callable[[], State],
        config: Callable[[], DrillConfig],
        post: Callable[[], Post | None],
        clock: Clock,
    ) -> None:
        """Initialize. `config` and `post` return the present settings; `clock` has the agreed time."""
        self._state = state
        self._config = config
        self._post = post
        self._clock = clock
        self._look_s = 0.0
        """Time of the next check, on the monotonic clock."""
        self._sending: dict[str, asyncio.Task[None]] = {}
        self._sent: set[str] = set()
        """Message-IDs of due reminders that need not be sent again."""

    def poll(self) -> None:
        """Send due, unsent reminders; return at once."""
        config, now_s = self._config(), self._clock.monotonic_s()
        if not config.every_days or now_s < self._look_s:
            return
        self._look_s = now_s + LOOK_S
        state, post = self._state(), self._post()
        due = list(letters_due(config, state, int(self._clock.now())))
        self._sent &= {letter.message_id for letter in due}
        for letter in due:
            if letter.message_id in self._sent or letter.message_id in self._sending:
                continue
            if post is None:
                LOGGER.warning(
                    "%s: mail is disabled on this replica, the leader: see [mail] in its forebay.toml", letter.subject
                )
                self._sent.add(letter.message_id)
                continue
            task = asyncio.create_task(post(letter))
            self._sending[letter.message_id] = task
            task.add_done_callback(partial(self._done, letter))

    def stop(self) -> None:
        """Abandon pending work: leadership was lost, or the replica stops."""
        for task in self._sending.values():
            task.cancel()
        self._sending.clear()
        self._sent.clear()
        self._look_s = 0.0

    def _done(self, letter: Letter, done: asyncio.Task[None]) -> None:
        if done.cancelled():
            return
        self._sending.pop(letter.message_id, None)
        error = done.exception()
        if error is None:
            self._sent.add(letter.message_id)
        else:
            LOGGER.warning("a reminder to %r was not sent: %s", letter.recipient, error)


def letters_due(config: DrillConfig, state: State, now_us: int) -> Iterator[Letter]:
    """Yield the reminders that became due within the last hour, one for each recipient."""
    tried: Mapping[str, Drill] = latest_completed(state.drills.values())
    for scenario, days in sorted(config.every_days.items()):
        last = tried.get(scenario)
        since_us = 0 if last is None else int(last.ended_at)
        late_us = now_us - since_us - days * DAY_US
        if late_us < 0 or late_us % AGAIN_US >= LATE_US:
            continue
        for recipient in config.remind:
            yield _letter(state, scenario, days, last, now_us - late_us % AGAIN_US, recipient)


def _letter(state: State, scenario: str, days: int, last: Drill | None, due_us: int, recipient: str) -> Letter:
    cluster, often = plain(state.name), f"{days} days" if days > 1 else "day"
    if last is None:
        when = "has never run"
    else:
        when = f"last ran on {format_instant(last.ended_at)} (drill {last.id}, {last.verdict.word})"
    message_id = f"<drill.{scenario}.{due_us}.{recipient.replace('@', '.')}.{state.cluster_id}@{MESSAGE_ID_DOMAIN}>"
    body = (
        f"The drill {scenario} of the cluster {cluster} {when}; [drill] schedules it every {often}.\nTo see its plan: "
        f"forebay drill plan {scenario}\n{message_id_line(message_id)}"
    )
    return Letter(recipient, f"Forebay cluster {cluster}: the drill {scenario} is due", body, message_id)

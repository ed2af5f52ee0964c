"""What is said of a call: in the log, and where it was over its time."""

from __future__ import annotations

import logging

from cluster.providers.guard import Finished
from cluster.providers.limits import LOGGED_BYTES_MAX
from replica.values import plain

logger = logging.getLogger(__name__)


def timed_out(timeout_s: float, finished: Finished) -> str:
    """Return what is said of a call that was over its time, in Slurm's words, and what could not be killed."""
    message = f"Timeout @ {round(timeout_s * 1000)} msec"
    if finished.unkillable:
        message += f"; processes {', '.join(map(str, finished.unkillable[:20]))} cannot be killed"
    return message


def log_output(what: str, finished: Finished) -> None:
    """Log the beginning of what a call printed, a line each."""
    for stream in (finished.printed, finished.complained):
        for line in stream[:LOGGED_BYTES_MAX].decode("utf-8", "replace").splitlines():
            if line.strip():
                logger.info("%s: %s", plain(what), plain(line.rstrip()))

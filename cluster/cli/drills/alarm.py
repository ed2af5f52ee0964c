"""A site's own word that a drill has to end: an expression that its Prometheus is asked."""

from __future__ import annotations

from typing import Any, Final

import aiohttp
import msgspec

ANSWER_S: Final = 2.0
"""Seconds in which Prometheus answers."""

ANSWER_BYTES_MAX: Final = 1024 * 1024
"""Bytes of an answer that are read: one that is larger is more than nothing."""


class Alarm:
    """One expression, asked again and again. Whoever cannot be asked has not said that all is well."""

    def __init__(self, prometheus: str, stop_when: str) -> None:
        self._url = f"{prometheus.rstrip('/')}/api/v1/query"
        self._stop_when = stop_when

    async def ask(self) -> str:
        """Return why a drill has to end, empty while it has not."""
        timeout = aiohttp.ClientTimeout(total=ANSWER_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(self._url, params={"query": self._stop_when}, allow_redirects=False) as answer,
            ):
                data = await answer.content.read(ANSWER_BYTES_MAX)
                found = _found(msgspec.json.decode(data)) if answer.status == 200 else None
        except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError):
            found = None
        if found is None:
            return f"Prometheus does not say whether {self._stop_when}"
        return f"Prometheus says that {self._stop_when}" if found else ""


def _found(answer: Any) -> bool | None:
    """Return whether anything came of a query; None for what is no answer to one."""
    if not isinstance(answer, dict) or answer.get("status") != "success":
        return None
    result = answer["data"].get("result") if isinstance(answer.get("data"), dict) else None
    return bool(result) if isinstance(result, list) else None

"""What a site's programs find in their environment: little of this process's, and what the site wants for them."""

from __future__ import annotations

import os
from typing import Final

from cluster.providers.private_directory import MARK

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", MARK)


def environment_for(site: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the whole environment of a call; `site` is `[provider] environment`."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(site)

"""What every answer has in common."""

from typing import Any

import msgspec

Json = dict[str, Any]


class View(msgspec.Struct, frozen=True, kw_only=True):
    """What every answer has in common: it is frozen and made of named fields."""

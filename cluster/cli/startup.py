"""Deferred imports of modules that click and msgspec import but most commands never use.

Imports take most of a short command's time. `defer_imports` registers a placeholder for each such module, which loads
the module on the first access to an attribute that the placeholder does not define itself.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import typing
from types import ModuleType
from typing import Any, Final


def _cleandoc(text: str) -> str:
    """Return the text as `inspect.cleandoc` does; click calls it for the help of each option."""
    if "\n" in text:
        cleaned: str = _load("inspect").cleandoc(text)
        return cleaned
    return text.expandtabs().lstrip()


def _gettext(message: str) -> str:
    """Return click's message untranslated, since Forebay's own messages are in English."""
    return message


def _ngettext(singular: str, plural: str, number: int) -> str:
    return singular if number == 1 else plural


def _system() -> str:
    return os.uname().sysname


_DIGITS: Final = "0123456789"
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

DEFERRED: Final[dict[str, dict[str, Any]]] = {
    "array": {},
    "fnmatch": {},
    "gettext": {"gettext": _gettext, "ngettext": _ngettext},
    "inspect": {"cleandoc": _cleandoc},
    "ipaddress": {},
    "msgspec.inspect": {},
    "msgspec.toml": {},
    "msgspec.yaml": {},
    "ntpath": {},
    "platform": {"system": _system},  # used by uuid, which click imports
    "selectors": {},
    "string": {"ascii_letters": _LETTERS, "digits": _DIGITS, "hexdigits": f"{_DIGITS}abcdefABCDEF"},  # used by tomllib
    "textwrap": {},
    # From Python 3.11 on, typing has them as well; msgspec prefers typing_extensions.
    "typing_extensions": {name: getattr(typing, name) for name in ("NotRequired", "Required", "get_type_hints")},
}
"""Name of a module -> attributes that its placeholder defines."""

_lock: Final = threading.Lock()


class _LazyModule(ModuleType):
    """Placeholder that loads its module on access to an attribute that it does not have."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # attributes that the import system looks up
            raise AttributeError(name)
        return getattr(_load(self.__name__), name)


def _load(name: str) -> ModuleType:
    with _lock:
        if isinstance(sys.modules.get(name), _LazyModule):
            del sys.modules[name]
    return importlib.import_module(name)


def defer_imports() -> None:
    """Register a placeholder for each module of DEFERRED that is not loaded yet."""
    for name, own in DEFERRED.items():
        if name not in sys.modules:
            stand_in = sys.modules[name] = _LazyModule(name)
            vars(stand_in).update(own)

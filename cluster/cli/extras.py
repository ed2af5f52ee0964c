"""Extras of the distribution: the packages that each brings, and what to install if one is missing."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forebay.cluster.cli.exits import ExitCode, Failure

if TYPE_CHECKING:
    from collections.abc import Mapping

IMPORTED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cli": ("click", "rich"),
        "agent": ("blake3", "xxhash"),
        "lua": ("lupa",),
        "server": (
            "aiohttp", "cryptography", "immutables", "jinja2", "lmdb", "markupsafe", "msgpack", "prometheus_client",
            "pysyncobj", "uvloop", "yarl",
        ),
    }
)  # fmt: skip
"""Extra -> the modules that only its packages have. An agent needs some of `server` too, and brings them itself."""

NEEDED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "forebay.cluster.agent": "agent",
        "forebay.cluster.audit": "server",
        "forebay.cluster.drills.helper": "server",
        "forebay.cluster.gateway": "server",
        "forebay.cluster.serve": "server",
        "forebay.cluster.slurm": "server",
        "forebay.cluster.witness": "server",
    }
)
"""Module that is started as a process -> its extra."""


def missing_extra(error: ModuleNotFoundError) -> Failure | None:
    """Return the failure of a command that lacks an extra; None for any other missing module."""
    module = (error.name or "").partition(".")[0]
    extra = next((name for name, modules in IMPORTED.items() if module in modules), None)
    return None if extra is None else needs_extra(extra, module)


def needs_extra(extra: str, module: str) -> Failure:
    """Return the failure of a command that needs an extra, because this module is missing."""
    sentence = f"this command needs forebay[{extra}]: {module} is not installed"
    return Failure(ExitCode.REFUSED, sentence, f"run `pip install 'forebay[{extra}]'`")


def check_process(module: str) -> None:
    """Check that the packages of a module that is to be started are installed.

    Raises:
        Failure: One is missing; the failure names the extra.
    """
    from importlib.util import find_spec

    extra = NEEDED.get(module)
    for name in IMPORTED.get(extra or "", ()):
        if find_spec(name) is None:
            assert extra is not None
            raise needs_extra(extra, name)

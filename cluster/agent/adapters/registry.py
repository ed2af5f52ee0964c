"""Registry of adapters by the words that configure them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Final

from forebay.cluster.agent.adapters.beegfs import BeegfsAdapter, BeegfsLayout
from forebay.cluster.agent.adapters.btrfs import BtrfsAdapter
from forebay.cluster.agent.adapters.cephfs import CephfsAdapter, CephfsLayout
from forebay.cluster.agent.adapters.command import CommandAdapter, CommandLayout
from forebay.cluster.agent.adapters.gpfs import GpfsAdapter
from forebay.cluster.agent.adapters.interface import LayoutAdapter, QuotaAdapter, Stripes
from forebay.cluster.agent.adapters.lustre import LustreAdapter, LustreLayout
from forebay.cluster.agent.adapters.project import ProjectAdapter
from forebay.cluster.agent.adapters.tools import Tools
from forebay.replica.model import LAYOUT_NONE, FilesystemLayout

NO_TOOLS: Final = Tools()
"""Settings of a machine that configures no tools."""

_STRIPED: Final = "striped"

_QUOTAS: Final[Mapping[str, Callable[[Tools], QuotaAdapter]]] = {
    ProjectAdapter.word: lambda tools: ProjectAdapter(),
    BtrfsAdapter.word: lambda tools: BtrfsAdapter(),
    LustreAdapter.word: LustreAdapter,
    CephfsAdapter.word: lambda tools: CephfsAdapter(),
    BeegfsAdapter.word: BeegfsAdapter,
    GpfsAdapter.word: GpfsAdapter,
    CommandAdapter.word: CommandAdapter,
}

_LAYOUTS: Final[Mapping[str, Callable[[Tools], LayoutAdapter]]] = {
    LustreLayout.word: LustreLayout,
    CephfsLayout.word: lambda tools: CephfsLayout(),
    BeegfsLayout.word: BeegfsLayout,
    CommandLayout.word: CommandLayout,
}


def quota_adapter(word: str, tools: Tools) -> QuotaAdapter:
    """Return the quota adapter that a word of the configuration names.

    Raises:
        KeyError: There is no such adapter; the configuration was not checked.
    """
    return _QUOTAS[word](tools)


def lay_out(directory: int, layout: FilesystemLayout, access: Collection[str], tools: Tools) -> None:
    """Set the layout of an open buffer whose access mode is striped, also by default.

    Raises:
        AdapterFailed: The layout cannot be set.
        OSError: The layout cannot be set.
    """
    if layout.adapter != LAYOUT_NONE and (not access or _STRIPED in access):
        stripes = Stripes(layout.stripe_count, layout.stripe_bytes, layout.pool)
        layout_adapter(layout.adapter, tools).apply(directory, stripes)


def layout_adapter(word: str, tools: Tools) -> LayoutAdapter:
    """Return the layout adapter that a word of the configuration names.

    Raises:
        KeyError: There is no such adapter; the configuration was not checked.
    """
    return _LAYOUTS[word](tools)

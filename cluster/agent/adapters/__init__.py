"""Adapters of filesystems: quotas that limit a buffer to its capacity, and layouts that place its files."""

from forebay.cluster.agent.adapters.btrfs import BtrfsAdapter
from forebay.cluster.agent.adapters.filesystem_type import LOCAL, is_local, type_of
from forebay.cluster.agent.adapters.interface import (
    BAD_OUTPUT,
    EXIT_CODE,
    NOT_APPLIED,
    NOT_INSTALLED,
    TIMED_OUT,
    UNTRUSTED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    LayoutAdapter,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
)
from forebay.cluster.agent.adapters.project import ProjectAdapter
from forebay.cluster.agent.adapters.registry import NO_TOOLS, lay_out, layout_adapter, quota_adapter
from forebay.cluster.agent.adapters.tools import Tools, tools_of

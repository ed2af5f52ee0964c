"""Check of a shared filesystem: what movers and jobs need of it, tried in a private directory."""

from forebay.cluster.agent.filesystem_check.probe import ProbeResult, ProbeStatus
from forebay.cluster.agent.filesystem_check.runner import CHECK_S_MAX, CheckTarget, FilesystemReport, check_filesystem

"""File operations of the agent: durable writes, safe paths (openat), removal, and capacity of buffers."""

from forebay.cluster.agent.files import capacity as capacity
from forebay.cluster.agent.files import filesystems as filesystems
from forebay.cluster.agent.files.durable import (
    BUFFERS,
    CALLS,
    LEFTOVERS,
    OPERATIONS,
    OUTBOX,
    PERSISTENT,
    RECEIPTS,
    RESERVE_SUFFIX,
    SPARE,
    STEPS,
    TEMPORARY_SUFFIX,
    FileRefused,
    ReserveFiles,
    is_resource_exhausted,
    read_bounded,
    read_record,
    reserve,
    write_durably,
    write_new,
    write_reserved,
)
from forebay.cluster.agent.files.filesystems import (
    FilesystemRefused,
    buffer_path,
    identity_at,
    open_parent,
    sync_written,
)
from forebay.cluster.agent.files.images import ImageFailed
from forebay.cluster.agent.files.kernel import READ_FLAGS, XATTR_CLASS, allocate, clone, open_direct
from forebay.cluster.agent.files.links import beneath, leads_to, names_of
from forebay.cluster.agent.files.paths import (
    VARIABLES,
    FileIdentity,
    PathRefused,
    Target,
    identity_of,
    inside_target,
    join,
    kind_of,
    open_as_user,
    open_target,
    open_target_parent,
    outside_target,
    split,
    variable_of,
)
from forebay.cluster.agent.files.removal import (
    KEPT_NAMED_MAX,
    RemovalFailed,
    empty_directory,
    remove_removable,
    remove_tree,
)

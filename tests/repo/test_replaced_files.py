"""Files that are replaced keep their owner: a command that root runs must not leave a service without its key."""

import ast
from pathlib import Path

from tests.repo.tree import modules, text_of

KEEP_IT = {"cluster/security/pki.py", "cluster/system/private_files.py"}
"""Modules that give the new file the owner, group and mode of the one before (`keep_ownership`)."""

BY_THE_SAME_ACCOUNT = {
    "cluster/agent/files/capacity.py": "the agent's own directory",
    "cluster/agent/filesystem_check/probes.py": "files of a check",
    "cluster/agent/files/durable.py": "the agent's own directory",
    "cluster/agent/files/images.py": "the agent's own directory",
    "cluster/agent/files/filesystems.py": "directories of a mover",
    "cluster/agent/files/removal.py": "what is removed",
    "cluster/agent/scripts/record.py": "the agent's own directory",
    "cluster/agent/transfer/fence.py": "directories that a transfer made",
    "cluster/agent/transfer/file_copy.py": "results of a user, written with the user's rights",
    "cluster/cli/commands/backup.py": "a backup under a name that does not exist before",
    "cluster/drills/copies/replicas.py": "a copy for a drill",
    "cluster/client/last_leader.py": "a cache of the account that reads it",
    "cluster/config/new_site.py": "a site that did not exist before",
    "cluster/drills/helper/record.py": "root's helper alone reads and writes it",
    "cluster/providers/files.py": "the directory of one call",
    "cluster/server/recovery/restore.py": "a directory that did not exist before",
    "cluster/slurm/files.py": "the bridge's own directory",
    "cluster/slurm/install.py": "a file of another owner is rejected",
    "snapshots/finalize.py": "the replica's own directory",
    "snapshots/receive.py": "the replica's own directory",
    "wal/segments.py": "the replica's own directory",
}
"""Modules that rename a file to a name that may exist, and why its owner is the same."""


def renames(path: Path) -> bool:
    """Return whether a module renames files: os.rename, os.replace, Path.rename, Path.replace or the like."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
            # Texts have two arguments, records have named ones.
            of_a_path = node.func.attr == "replace" and len(node.args) == 1 and not node.keywords
            is_rename = node.func.attr == "rename" and owner != "builder"
            if of_a_path or is_rename or (owner, node.func.attr) == ("os", "replace"):
                return True
    return False


def test_each_module_that_replaces_files_keeps_their_owner_or_says_why_it_is_the_same() -> None:
    found = {str(path) for path in modules() if renames(path)}
    assert found == KEEP_IT | set(BY_THE_SAME_ACCOUNT), (
        "use forebay.cluster.system.replace_private, or add the module here"
    )
    assert all("keep_ownership" in text_of(Path(path)) for path in KEEP_IT)

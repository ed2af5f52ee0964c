"""The archive of the directories that the previous release left, and how it is unpacked."""

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parent


def unpack(directory: Path) -> None:
    """Unpack the directories of the three replicas into `directory`: plain files, with the modes that they had."""
    # By hand: `extractall(filter=...)` is younger than the Python of Debian 12.
    with tarfile.open(GOLDEN / "level-1.tar.gz") as archive:
        for member in archive.getmembers():
            path = directory / member.name
            if member.isdir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            content = archive.extractfile(member)
            assert content is not None, member.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(content.read())
            path.chmod(member.mode)

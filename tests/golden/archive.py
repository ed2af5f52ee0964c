"""The archives of directories that were left on disks, and how they are unpacked."""

import tarfile
from pathlib import Path

GOLDEN = Path(__file__).parent


def unpack(directory: Path, archive: str = "format-1") -> None:
    """Unpack directories of replicas into `directory`: plain files, with the modes that they had."""
    # By hand: `extractall(filter=...)` is younger than the Python of Debian 12.
    with tarfile.open(GOLDEN / f"{archive}.tar.gz") as packed:
        for member in packed.getmembers():
            path = directory / member.name
            if member.isdir():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                continue
            content = packed.extractfile(member)
            assert content is not None, member.name
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.write_bytes(content.read())
            path.chmod(member.mode)

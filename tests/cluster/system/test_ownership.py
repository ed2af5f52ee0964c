"""Replacing a file keeps its owner, group and mode."""

import os
import stat
from pathlib import Path

import pytest

from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.system import SystemClock, keep_ownership, replace_private

NOBODY = 65534
ONLY_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def ownership(path: Path) -> tuple[int, int, int]:
    found = path.lstat()
    return found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)


@ONLY_ROOT
def test_certificate_rotated_by_root_keeps_the_owner(tmp_path: Path) -> None:
    now, tls = SystemClock().now(), tmp_path / "tls"
    authority = create_authority(tls, cluster_name="demo", cluster_id="c1", at=now)
    issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=now)
    key, certificate = tls / "r1.key", tls / "r1.pem"
    for path, mode in ((key, 0o400), (certificate, 0o640)):
        os.chown(path, NOBODY, 4712)
        path.chmod(mode)
    before = key.read_bytes(), certificate.read_bytes()
    issue(authority, tls, role=Role.REPLICA, name="r1", addresses=["127.0.0.1"], at=now, replace=True)
    assert before[0] != key.read_bytes() and before[1] != certificate.read_bytes()
    assert (ownership(key), ownership(certificate)) == ((NOBODY, 4712, 0o400), (NOBODY, 4712, 0o640))


@ONLY_ROOT
def test_replica_files_keep_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"before")
    os.chown(path, NOBODY, 4712)
    path.chmod(0o440)
    replace_private(path, b"after")
    assert (path.read_bytes(), ownership(path)) == (b"after", (NOBODY, 4712, 0o440))


def test_link_or_missing_file_changes_nothing(tmp_path: Path) -> None:
    target, new = tmp_path / "target", tmp_path / "new"
    target.touch(0o604)
    (tmp_path / "link").symlink_to(target)
    with new.open("w") as file:
        new.chmod(0o600)
        for name in ("link", "missing"):
            keep_ownership(file.fileno(), tmp_path / name)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o775])
def test_ownership_is_not_copied_from_a_file_in_a_shared_directory(tmp_path: Path, mode: int) -> None:
    """An attacker creates `r1.key` in a shared directory and waits for root to issue a key into it."""
    planted, new = tmp_path / "r1.key", tmp_path / "new"
    planted.touch()
    planted.chmod(0o644)
    tmp_path.chmod(mode)
    with new.open("w") as file:
        new.chmod(0o600)
        keep_ownership(file.fileno(), planted)
    assert stat.S_IMODE(new.stat().st_mode) == 0o600

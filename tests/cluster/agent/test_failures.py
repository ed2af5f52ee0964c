"""Which failures are tried again by themselves, and which wait for somebody."""

import errno

import pytest

from forebay.cluster.agent.files.paths import PathRefused
from forebay.cluster.agent.files.removal import RemovalFailed
from forebay.cluster.agent.processes.environment import AccountRefused
from forebay.cluster.agent.transfer.errors import ReadBackFailed, TransferFailed
from forebay.cluster.agent.worker.worker import is_final

GOES_AWAY = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EINTR, errno.ESTALE, errno.EBUSY)
STAYS = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.ELOOP, errno.EROFS)


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize("number", GOES_AWAY + STAYS)
@pytest.mark.parametrize("kind", [PathRefused, TransferFailed])
def test_what_the_kernel_says_decides_whether_trying_again_is_of_use(number: int, kind: type[Exception]) -> None:
    error = caused(TransferFailed("stage_in source=a"), caused(kind("a"), OSError(number, "x")))
    assert is_final(error) is (number in STAYS)


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (PathRefused("outside"), True),
        (AccountRefused("no such user"), True),
        (TransferFailed("needs more than the buffer has"), True),
        (ReadBackFailed("not what was written"), False),
        (RemovalFailed("busy"), False),
        (caused(TransferFailed("changed"), RuntimeError("while it was copied")), False),
    ],
)
def test_what_is_wrong_with_the_request_is_not_tried_again(error: Exception, final: bool) -> None:
    assert is_final(error) is final

"""Credentials of a local peer, as reported by the kernel."""

import os
import socket

import pytest

from forebay.cluster.system import PeerAccount, peer_account

LARGE = (65_534, 2**31 - 1, 2**31, 2**32 - 2)
"""Account numbers just below and above the largest signed number."""


def test_peer_account_is_the_account_that_connected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_account(ours) == PeerAccount(os.getpid(), os.geteuid(), os.getegid())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another account")
@pytest.mark.parametrize("account", LARGE)
def test_large_account_number_is_read_unchanged(account: int) -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        os.setegid(account)
        os.seteuid(account)
        ours, theirs = socket.socketpair()
    finally:
        os.seteuid(user)
        os.setegid(group)
    with ours, theirs:
        assert peer_account(ours) == PeerAccount(os.getpid(), account, account)

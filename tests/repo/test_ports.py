"""Ports for servers of tests: what one process is handed no other one is, and none is handed that is in use."""

import socket
import subprocess
import sys

import pytest

from tests import ports
from tests.repo.tree import ROOT

HANDED = "from tests.ports import free_ports; print(*free_ports(9), flush=True); input()"


def test_processes_that_live_at_once_are_handed_different_ports() -> None:
    line = [sys.executable, "-c", HANDED]
    running = [
        subprocess.Popen(line, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    handed = [ports.free_ports(9)]
    for process in running:
        assert process.stdout is not None
        handed.append([int(word) for word in process.stdout.readline().split()])
    for process in running:
        process.communicate("\n")
    assert [len(row) for row in handed] == [9] * 5
    assert len({port for row in handed for port in row}) == 9 * 5
    assert all(row == list(range(row[0], row[0] + 9)) for row in handed)


def test_a_port_is_handed_out_again_only_after_all_others_were_and_never_while_it_is_in_use() -> None:
    with socket.create_server(("127.0.0.1", ports.free_port())) as server:
        others = [ports.free_port() for _ in range(ports.BLOCK_PORTS)]
        assert server.getsockname()[1] not in others
        assert len(set(others[: ports.BLOCK_PORTS // 2])) == ports.BLOCK_PORTS // 2


def test_more_ports_in_a_row_than_there_are_is_refused_with_what_was_tried() -> None:
    with pytest.raises(ports.NoFreePorts, match=f"no {ports.BLOCK_PORTS + 1} free ports in a row from [0-9]+ to"):
        ports.free_ports(ports.BLOCK_PORTS + 1)

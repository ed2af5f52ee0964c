"""File server that can stop answering: a small FUSE filesystem.

Whoever waits for an answer then waits in the kernel, where not even SIGKILL ends it, as on a dead NFS or Lustre mount.
The protocol is that of linux/fuse.h, version 7.31.
"""

import ctypes
import errno
import os
import stat
import struct
import threading
from enum import IntEnum
from pathlib import Path

from tests.faults.kernel import tool

DEVICE = Path("/dev/fuse")

_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTRIBUTES = struct.Struct("<6Q10I")
_ENTRY = struct.Struct("<QQQQII")
_ATTRIBUTES_HEAD = struct.Struct("<QII")
_OPENED = struct.Struct("<QII")
_INIT = struct.Struct("<IIIIHHIIHHI28x")
_READ = struct.Struct("<QQI")
_NAME = struct.Struct("<QQII")

_REQUEST_BYTES = 1 << 17
_ROOT = 1
_SECOND = 10**9
_BORN_S = 1_700_000_000
"""When everything was written to last, seconds since the epoch."""


class Request(IntEnum):
    """What is asked."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    OPEN = 14
    READ = 15
    RELEASE = 18
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    INTERRUPT = 36
    DESTROY = 38
    BATCH_FORGET = 42


_UNANSWERED = frozenset({Request.FORGET, Request.BATCH_FORGET, Request.INTERRUPT})


class _Node:
    def __init__(self, number: int, content: bytes | dict[str, int]) -> None:
        self.number = number
        self.content = content

    @property
    def mode(self) -> int:
        return stat.S_IFDIR | 0o755 if isinstance(self.content, dict) else stat.S_IFREG | 0o644

    def attributes(self) -> bytes:
        size = 0 if isinstance(self.content, dict) else len(self.content)
        links = 2 if isinstance(self.content, dict) else 1
        times = (_BORN_S,) * 3
        return _ATTRIBUTES.pack(
            self.number, size, -(-size // 512), *times, 0, 0, 0, self.mode, links, os.getuid(), os.getgid(), 0, 4096, 0
        )


class DyingServer:
    """The tree, mounted; `die` and `revive` it. Nothing is cached: each look is asked for."""

    def __init__(self, mount_point: Path, files: dict[str, bytes]) -> None:
        """Mount `files`, whose names may have directories before them. OSError if FUSE cannot be used here."""
        self._nodes = {_ROOT: _Node(_ROOT, {})}
        for path, content in files.items():
            self._plant(path.split("/"), content)
        self._mutex = threading.Lock()
        self._dead_to: Request | None = None
        self._pass = 0
        self._waiting: list[tuple[int, bytes]] = []
        self.stuck = threading.Event()
        """Set when somebody waits for an answer that does not come."""
        self._mount_point = mount_point
        mount_point.mkdir(parents=True, exist_ok=True)
        self._device = os.open(DEVICE, os.O_RDWR | os.O_CLOEXEC)
        options = f"fd={self._device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"forebay", os.fsencode(mount_point), b"fuse", 0, options.encode()) != 0:
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, f"a FUSE file system cannot be mounted: {os.strerror(number)}")
        self._thread = threading.Thread(target=self._serve, name="fuse", daemon=True)
        self._thread.start()

    def _plant(self, parts: list[str], content: bytes) -> None:
        node = self._nodes[_ROOT]
        for part in parts[:-1]:
            assert isinstance(node.content, dict)
            node = self._nodes[node.content[part]] if part in node.content else self._add(node, part, {})
        self._add(node, parts[-1], content)

    def _add(self, parent: _Node, name: str, content: bytes | dict[str, int]) -> _Node:
        assert isinstance(parent.content, dict)
        node = _Node(max(self._nodes) + 1, content)
        self._nodes[node.number] = node
        parent.content[name] = node.number
        return node

    def die(self, request: Request, *, after: int = 0) -> None:
        """Answer nothing any more from the first such request on, but for `after` that come before."""
        with self._mutex:
            self.stuck.clear()
            self._dead_to, self._pass = request, after

    def revive(self) -> None:
        """Answer everything, what was asked meanwhile first."""
        with self._mutex:
            self._dead_to = None
            waiting, self._waiting = self._waiting, []
        for unique, answer in waiting:
            self._send(unique, answer)

    def close(self) -> None:
        """Unmount it; who still waits gets an error."""
        self.revive()
        tool("umount", "--lazy", str(self._mount_point))
        self._thread.join(5)
        os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                asked = os.read(self._device, _REQUEST_BYTES)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, request, unique, number, *_ = _IN.unpack_from(asked)
            if request in _UNANSWERED:
                continue
            answer = self._answer(request, self._nodes.get(number), asked[_IN.size :])
            with self._mutex:
                if self._dead_to is not None and (self._waiting or self._is_last(request)):
                    self._waiting.append((unique, answer))
                    self.stuck.set()
                    continue
            self._send(unique, answer)

    def _is_last(self, request: int) -> bool:
        if request != self._dead_to:
            return False
        self._pass -= 1
        return self._pass < 0

    def _send(self, unique: int, answer: bytes) -> None:
        try:
            error = -int.from_bytes(answer[1:], "little") if answer[:1] == b"!" else 0
            data = b"" if error else answer[1:]
            os.write(self._device, _OUT.pack(_OUT.size + len(data), error, unique) + data)
        except OSError:
            # Whoever asked is gone.
            return

    def _answer(self, request: int, node: _Node | None, asked: bytes) -> bytes:
        """Return `=` and the data, or `!` and an error."""
        if request == Request.INIT:
            return b"=" + _INIT.pack(7, 31, 1 << 17, 0, 16, 12, 1 << 16, 1, 16, 0, 0)
        if node is None:
            return _rejection(errno.ENOENT)
        content = node.content
        match request:
            case Request.GETATTR:
                return b"=" + _ATTRIBUTES_HEAD.pack(0, 0, 0) + node.attributes()
            case Request.LOOKUP if isinstance(content, dict):
                number = content.get(os.fsdecode(asked.rstrip(b"\0")))
                if number is None:
                    return _rejection(errno.ENOENT)
                return b"=" + _ENTRY.pack(number, 0, 0, 0, 0, 0) + self._nodes[number].attributes()
            case Request.OPEN | Request.OPENDIR:
                return b"=" + _OPENED.pack(0, 0, 0)
            case Request.READ if isinstance(content, bytes):
                _, offset, size = _READ.unpack_from(asked)
                return b"=" + content[offset : offset + size]
            case Request.READDIR if isinstance(content, dict):
                _, offset, size = _READ.unpack_from(asked)
                return b"=" + self._listing(content, offset, size)
            case Request.RELEASE | Request.RELEASEDIR | Request.FLUSH | Request.DESTROY:
                return b"="
        return _rejection(errno.ENOSYS)

    def _listing(self, names: dict[str, int], offset: int, size: int) -> bytes:
        found = b""
        for at, (name, number) in enumerate(sorted(names.items())):
            encoded = os.fsencode(name)
            entry = _NAME.pack(number, at + 1, len(encoded), self._nodes[number].mode >> 12) + encoded
            entry += b"\0" * (-len(entry) % 8)
            if at >= offset:
                if len(found) + len(entry) > size:
                    break
                found += entry
        return found


def _rejection(number: int) -> bytes:
    return b"!" + number.to_bytes(4, "little")

"""MUNGE credentials: an account authenticated by its host's munged to all hosts with the same key.

libmunge is loaded on first use; a machine without it lacks only this feature. Calls block on munged's local socket, so
servers make them in a thread (ctypes releases the interpreter lock).

A credential contains its creator and time, and munged decodes it only once. Its payload is the digest of `purpose_of`
over cluster, replica and request. A stolen credential therefore serves no other request and cannot be replayed. Source
of the interface: munge.h, munge(3), munge_enum(3).
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from pathlib import Path
from typing import Any, Final, NamedTuple

LIBRARY: Final = "libmunge.so.2"

SCHEME: Final = "MUNGE"
"""Scheme of the Authorization header with a credential."""

TTL_S: Final = 60
"""Validity of a credential, seconds: covers the wait for a connection and differing clocks."""

CREDENTIAL_CHARACTERS_MAX: Final = 2_048
"""Longest credential, characters; Forebay's have about 300."""

PURPOSE: Final = b"forebay request 1\n"
"""Prefix of a payload; credentials made for other programs are rejected."""

_SUCCESS: Final = 0
_NO_MEMORY: Final = 5
_SOCKET_ERROR: Final = 6
_TIMEOUT: Final = 7
_EXPIRED: Final = 15
_REWOUND: Final = 16
_REPLAYED: Final = 17
_OPTION_TTL: Final = 4
_OPTION_ENCODED: Final = 6
_OPTION_DECODED: Final = 7
_OPTION_SOCKET: Final = 8

_WORDS: Final = {
    _EXPIRED: "the credential has expired",
    _REWOUND: "the credential is from the future: the clocks of the two machines differ",
    _REPLAYED: "the credential was already used",
}


class MungeUnavailable(Exception):
    """libmunge or munged cannot be used on this machine; the message gives the reason."""


class MungeError(Exception):
    """A credential is invalid; the message gives the reason."""


class MungeCredential(NamedTuple):
    """Creator and payload of a credential, as verified by munged."""

    uid: int
    payload: bytes


def purpose_of(cluster_id: str, server: str, method: str, target: str, body: bytes) -> bytes:
    """Return the credential payload for one request to the replica at `server` (HOST:PORT)."""
    digest = hashlib.sha256()
    for part in (cluster_id.encode(), server.encode(), method.encode(), target.encode(), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return PURPOSE + digest.hexdigest().encode()


class Munge:
    """libmunge bindings, safe for several threads."""

    def __init__(self, socket: Path | None = None) -> None:
        """Load the library. `socket` is munged's socket; None for the library's default.

        Raises:
            MungeUnavailable: The library cannot be loaded.
        """
        self._socket = None if socket is None else str(socket).encode()
        self._library = _library()
        self._contexts = threading.local()

    def encode(self, payload: bytes) -> str:
        """Return a credential of this process's account.

        Raises:
            MungeUnavailable: munged created no credential.
        """
        context, found = self._context(), ctypes.c_void_p()
        code = self._library.munge_encode(ctypes.byref(found), context, payload, len(payload))
        try:
            if code != _SUCCESS or not found.value:
                raise MungeUnavailable(f"munged did not create a credential: {self._words(context, code)}")
            return ctypes.string_at(found.value).decode("ascii")
        finally:
            self._library.free(found)

    def decode(self, credential: str) -> MungeCredential:
        """Return the verified contents of a credential.

        Raises:
            MungeError: The credential is not valid here and now.
        """
        if len(credential) > CREDENTIAL_CHARACTERS_MAX or not credential.isascii() or "\0" in credential:
            raise MungeError("this is not a credential")
        context, data, size = self._context(), ctypes.c_void_p(), ctypes.c_int(0)
        uid, gid = ctypes.c_uint32(0xFFFFFFFF), ctypes.c_uint32(0xFFFFFFFF)
        code = self._library.munge_decode(
            credential.encode("ascii"),
            context,
            ctypes.byref(data),
            ctypes.byref(size),
            ctypes.byref(uid),
            ctypes.byref(gid),
        )
        try:
            if code in (_NO_MEMORY, _SOCKET_ERROR, _TIMEOUT):
                raise MungeUnavailable(f"munged does not answer: {self._words(context, code)}")
            if code != _SUCCESS:
                raise MungeError(_WORDS.get(code) or self._words(context, code))
            # The creator sets the validity, and munged accepts up to an hour, so check the age here.
            age_s = self._number(context, _OPTION_DECODED) - self._number(context, _OPTION_ENCODED)
            if age_s > TTL_S:
                raise MungeError(f"the credential is {age_s} s old, and valid for {TTL_S} s")
            payload = ctypes.string_at(data.value, size.value) if data.value and size.value > 0 else b""
            return MungeCredential(uid.value, payload)
        finally:
            self._library.free(data)

    def _context(self) -> Any:
        """Return this thread's context; a context serves one caller at a time."""
        known = getattr(self._contexts, "context", None)
        if known is not None:
            return known
        context = self._library.munge_ctx_create()
        if not context:
            raise MungeUnavailable("libmunge is out of memory")
        context = ctypes.c_void_p(context)
        codes = [self._library.munge_ctx_set(context, _OPTION_TTL, ctypes.c_int(TTL_S))]
        if self._socket is not None:
            codes.append(self._library.munge_ctx_set(context, _OPTION_SOCKET, ctypes.c_char_p(self._socket)))
        if any(codes):
            raise MungeUnavailable(f"libmunge rejects its settings: {self._words(context, max(codes))}")
        self._contexts.context = context
        return context

    def _number(self, context: Any, option: int) -> int:
        found = ctypes.c_long(0)  # time_t
        if self._library.munge_ctx_get(context, option, ctypes.byref(found)) != _SUCCESS:
            raise MungeError("the credential has no creation time")
        return found.value

    def _words(self, context: Any, code: int) -> str:
        found = self._library.munge_ctx_strerror(context) or self._library.munge_strerror(code) or b"unknown error"
        return bytes(found).decode("utf-8", "replace")


def _library() -> Any:
    try:
        library = ctypes.CDLL(LIBRARY, use_errno=True)
    except OSError as error:
        raise MungeUnavailable(f"{LIBRARY} is not installed on this machine ({error})") from error
    library.munge_ctx_create.restype = ctypes.c_void_p
    library.munge_ctx_strerror.restype = ctypes.c_char_p
    library.munge_strerror.restype = ctypes.c_char_p
    library.munge_encode.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int]
    library.munge_decode.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 5]
    library.free.argtypes = [ctypes.c_void_p]
    library.free.restype = None
    return library

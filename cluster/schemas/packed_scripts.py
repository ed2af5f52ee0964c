"""Packing a script that is too long to be sent as it is, and unpacking it before it runs."""

import base64
import lzma
import re
from typing import Final

from replica.values import PACKED_HEAD_BYTES_MAX, PACKED_MARK, SUBMITTED_SCRIPT_BYTES_MAX, split_packed

_MAYBE_DIRECTIVE: Final = re.compile(r"#[A-Za-z!]")
"""How a comment line begins that the site's grammar may know: those stay in the head."""

UNPACKING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Memory for unpacking one script, bytes: seven times what LZMA takes at its default preset."""


class NotPackable(ValueError):
    """A script whose lines at the top are too long to stay as they are; the message is a sentence with the remedy."""


def packed(script: str) -> str:
    """Return the script packed; NotPackable."""
    end = _end_of_head(script)
    head, rest = script[:end], script[end:]
    if not rest or len(head.encode()) > PACKED_HEAD_BYTES_MAX:
        raise NotPackable(
            f"the comment lines at the top of the script have more than {PACKED_HEAD_BYTES_MAX} bytes; "
            "begin them with '# ', or write them below the first command"
        )
    data = base64.b85encode(lzma.compress(rest.encode())).decode()
    return f"{head.removesuffix(chr(10))}{PACKED_MARK}{data}\n"


def unpacked(script: str) -> str:
    """Return the script that this is the packed form of; the text itself if it is none, or would be too long."""
    found = split_packed(script)
    if found is None:
        return script
    head, rest = found
    try:
        reader = lzma.LZMADecompressor(memlimit=UNPACKING_BYTES_MAX)
        data = reader.decompress(base64.b85decode(rest.strip()), SUBMITTED_SCRIPT_BYTES_MAX)
        return head + data.decode() if reader.eof else script
    except (ValueError, lzma.LZMAError, EOFError):
        return script


def _end_of_head(script: str) -> int:
    """Return where the last line ends that may be a directive, among the comment lines at the top."""
    at = end = 0
    while at < len(script):
        following = script.find("\n", at) + 1 or len(script)
        line = script[at:following]
        if line.strip() and not line.startswith("#"):
            break
        if _MAYBE_DIRECTIVE.match(line):
            end = following
        at = following
    return end

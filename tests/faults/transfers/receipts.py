"""Compares the lines of a receipt with the files, without the mover's code, as a user's tool would."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from tests.faults.transfers.harness import Inconclusive


class Mismatch(NamedTuple):
    """A file that is not what its line says."""

    path: str
    why: str


def newest_lines(home: Path) -> list[dict[str, Any]]:
    """Return the lines of files in the newest receipt in an agent's home; Inconclusive if there is none.

    Where items went stands before them.
    """
    receipts = sorted((home / "receipts").glob("*"), key=lambda path: path.stat().st_mtime_ns)
    if not receipts:
        raise Inconclusive(f"{home} has no receipts")
    lines = [msgspec.json.decode(line) for line in receipts[-1].read_bytes().splitlines()]
    return [line for line in lines if "place" not in line]


def compare(lines: list[dict[str, Any]], destination: Path) -> list[Mismatch]:
    """Return what differs from the lines of a receipt of one tree: missing, other content, and what no line names."""
    wrong: list[Mismatch] = []
    named: set[bytes] = set()
    for line in lines:
        name = bytes.fromhex(line["path_hex"]) if line.get("path_hex") else os.fsencode(line["path"])
        named.add(name)
        path = Path(os.fsdecode(os.path.join(os.fsencode(destination), name)))
        shown = os.fsdecode(name)
        if line["kind"] == "directory":
            if not path.is_dir():
                wrong.append(Mismatch(shown, "no directory"))
        elif line["kind"] == "file":
            if not path.is_file():
                wrong.append(Mismatch(shown, "missing"))
            elif not line.get("digest"):
                wrong.append(Mismatch(shown, "its line has no digest"))
            elif digest_of(path, line.get("chunk_bytes", 0)) != line["digest"]:
                wrong.append(Mismatch(shown, "another digest"))
    for where, _, files in os.walk(os.fsencode(destination)):
        for file in files:
            name = os.path.relpath(os.path.join(where, file), os.fsencode(destination))
            if name not in named:
                wrong.append(Mismatch(os.fsdecode(name), "no line"))
    return wrong


def digest_of(path: Path, chunk_bytes: int) -> str:
    """Return the XXH3-128 of a file as receipts have it: over the digests of its chunks, if it was moved in chunks."""
    whole = xxhash.xxh3_128()
    if chunk_bytes:
        whole.update(b"%d:" % chunk_bytes)
    with path.open("rb") as file:
        while data := file.read(chunk_bytes or 1 << 20):
            whole.update(xxhash.xxh3_128(data).digest() if chunk_bytes else data)
    return whole.hexdigest()

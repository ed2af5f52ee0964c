"""Snapshots of every released format stay readable (law 12).

`FOREBAY_WRITE_GOLDEN=1` writes the file of the present format again. Do this only before the format's release.
"""

from __future__ import annotations

import os
from pathlib import Path

from forebay.snapshots import load_snapshot, write_snapshot
from forebay.snapshots.finalize import FORMAT_VERSION, frame_checksum
from forebay.snapshots.restore import inspect
from tests.snapshots.states import small_image

GOLDEN = Path(__file__).parent / "golden"
PRESENT = GOLDEN / f"format-{FORMAT_VERSION}.fbs"


def test_golden_snapshot_of_each_format_is_read_unchanged(tmp_path: Path) -> None:
    if os.environ.get("FOREBAY_WRITE_GOLDEN"):
        write_snapshot(tmp_path, small_image()).replace(PRESENT)
    found = sorted(GOLDEN.glob("*.fbs"))
    assert PRESENT in found
    for path in found:
        assert load_snapshot(path) == small_image(), path.name
        assert inspect(path).index == 7


def test_present_format_equals_its_golden_file_byte_for_byte(tmp_path: Path) -> None:
    written = write_snapshot(tmp_path, small_image()).read_bytes()
    assert written == PRESENT.read_bytes()


def test_frame_checksum_covers_section_and_number() -> None:
    checksums = {frame_checksum(section, sequence, b"x") for section in range(4) for sequence in range(4)}
    assert len(checksums) == 16

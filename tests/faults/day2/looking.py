"""Rows about inspection: checking a machine before its first start, and collecting diagnostics."""

from __future__ import annotations

import re
import shlex
import tarfile
from typing import Final

from tests.faults.day2.day import Day, check
from tests.faults.day2.site import FOURTH
from tests.faults.local_cluster import REPLICAS

EXIT_BAD: Final = 2
PRIVATE: Final = b"PRIVATE KEY"
OTHER_HOST: Final = "10.9.9.9"

MENDS: Final = re.compile(r"`forebay (cert issue [^`]+)`")
"""How `check` says what to do about a certificate."""


async def ready_machine(day: Day) -> str:
    """A machine that is prepared passes; with a certificate for another host it does not, and that is named."""
    site = day.site
    await site.prepare_fourth()
    sound = await day.types(at=FOURTH)
    await site.certify_fourth(OTHER_HOST)
    wrong = await day.types(at=FOURTH, code=EXIT_BAD)
    mends = MENDS.findall("".join(line for line in wrong.out.splitlines() if "FAIL" in line))
    check(len(mends) == 1, f"one command is not what mends it: {wrong.out}")
    await site.typed(shlex.split(mends[0]))
    site.copy_pair(FOURTH)
    await day.types(at=FOURTH)
    await site.retire_fourth()
    return (
        f"{len(sound.out.splitlines())} lines without a FAIL; a certificate for another host FAILs, with what mends it"
    )


async def debug(day: Day) -> str:
    """What is written for who helps, where an operator works and on a machine, has no private key in it."""
    site = day.site
    parts = 0
    for at in (None, "r1"):
        place = site.operators if at is None else site.machine(at)
        await day.types(at=at)
        [file] = place.glob("forebay-debug-*.tar.gz")
        with tarfile.open(file) as packed:
            members = [member for member in packed.getmembers() if member.isfile()]
            texts = {member.name: packed.extractfile(member).read() for member in members}
        parts += len(texts)
        keys = [name for name, text in texts.items() if PRIVATE in text]
        check(not keys, f"private keys are in {keys}")
        if at is None:
            missing = [name for name in REPLICAS if not any(name.encode() in text for text in texts.values())]
            check(not missing, f"nothing is said of {missing}")
        file.unlink()
    return f"{parts} parts of two files, no private key in them"

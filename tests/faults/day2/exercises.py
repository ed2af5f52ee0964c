"""Exercise for each row of the task table, with the documented commands and effects.

Each leaves a whole cluster, and returns what was checked in words.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

from tests.faults.day2 import disasters, looking, members, storage, trust, work
from tests.faults.day2.day import Day


class Exercise(NamedTuple):
    """The row of the table that it exercises, and what does it."""

    task: str
    run: Callable[[Day], Awaitable[str]]


EXERCISES: Final = {
    "check": Exercise("a new machine, before its first start", looking.ready_machine),
    "replace": Exercise("a replica lost its disk", members.replace),
    "add": Exercise("one replica more", members.add),
    "remove": Exercise("one replica less", members.remove),
    "transfer": Exercise("another replica leads", members.transfer),
    "upgrade": Exercise("a new release, one replica after another", members.upgrade),
    "renumber-one": Exercise("one replica has another address", members.renumber_one),
    "renumber-all": Exercise(
        "all replicas have other addresses: once they run again, what is left to write down", members.renumber_all
    ),
    "certificate": Exercise("a certificate is to be renewed", trust.certificate),
    "authority": Exercise("the authority is to be renewed", trust.authority),
    "revoke": Exercise("a key was stolen", trust.revoke),
    "resize": Exercise("a pool grows or shrinks", work.resize),
    "drain": Exercise("a node is to be emptied", work.drain),
    "lost": Exercise("a node is lost, with what is on it", work.lost),
    "debug": Exercise("support needs to see what is wrong", looking.debug),
    "archive": Exercise("old history is to be kept elsewhere", storage.archive),
    "disk-full": Exercise("the disk of a replica was full, and has room again", storage.disk_full),
    "journal-full": Exercise("the journal of a replica is full", storage.journal_full),
    "recover": Exercise("a majority is lost for good", disasters.recover),
    "clock": Exercise("a clock is off", disasters.clock),
    "restore": Exercise("all is lost but a backup", disasters.restore),
}
"""By name, in the order in which they are done."""

"""A membership command is carried out once, however often it is requested."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.consensus import ChangeRefused, MemberChange
from forebay.cluster.consensus.configurations import next_configuration
from forebay.cluster.server.membership import Membership
from forebay.wal.configuration import ChangeKind, Configuration, Member, initial
from tests.cluster.test_serve import make

COMMAND = bytes(range(16))


class Leader:
    """Leader whose changes are committed and applied at once."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.last_index = self.term = 1
        self.caught_up: str | None = None

    def change(self, wanted: MemberChange) -> tuple[int, int]:
        self.configuration = next_configuration(self.configuration, wanted, at=0)
        self.last_index += 1
        return self.last_index, self.term

    def promotable(self) -> str | None:
        return self.caught_up

    def unrecorded(self) -> None:
        return None


@pytest.mark.parametrize("caught_up", ["r3#3", "r4#2"])
def test_replacement_repeated_after_a_promotion_is_carried_out_once(tmp_path: Path, caught_up: str) -> None:
    leader: Any = Leader(initial((Member("r1"), Member("r2"), Member("r3")), version=1))

    async def applied(index: int) -> None:
        return None

    membership = Membership("r1", make(tmp_path, 3), leader, leads=lambda: True, wait_applied=applied)

    async def story() -> None:
        await membership.change(
            MemberChange(action=ChangeKind.ADD, name="r4", peer="h:1", api="h:2", id=b"another command.")
        )
        replace = MemberChange(action=ChangeKind.REPLACE, name="r3", actor="operator", id=COMMAND)
        await membership.change(replace)  # the answer is lost
        leader.caught_up = caught_up
        membership.poll()
        assert leader.configuration.votes(caught_up)
        known = await membership.change(replace)
        assert (known.version, leader.configuration.version) == (4, 4)
        assert known.holds("r3#3")

    asyncio.run(story())


@pytest.mark.parametrize("name", ["r1", "r2", "r3", "r4"])
def test_existing_member_name_is_not_added_again(name: str) -> None:
    learner = MemberChange(action=ChangeKind.ADD, name="r4", peer="h:1", api="h:2")
    members = next_configuration(initial(tuple(map(Member, ("r1", "r2", "r3")))), learner, at=0)
    again = MemberChange(action=ChangeKind.ADD, name=name, peer="elsewhere:1", api="elsewhere:2")
    with pytest.raises(ChangeRefused, match=f"{name} is a member already") as refused:
        next_configuration(members, again, at=0)
    assert refused.value.code == "member_exists"

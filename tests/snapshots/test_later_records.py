"""Partitions, consumption and terms of jobs survive a snapshot unchanged."""

from __future__ import annotations

from forebay.replica.messages import commands as c
from forebay.replica.model.accounts import Account, AccountUser
from forebay.replica.model.partitions import Partition, PartitionState
from forebay.replica.model.requests import Dependency, DependencyKind, JobOptions, JobRequest
from forebay.replica.state.digest import state_digest
from forebay.snapshots.image import DIGEST_BYTES, Image, to_sections
from tests.replica.world import SCRIPT, World, user
from tests.snapshots.states import from_sections


def test_scheduling_records_of_level_4_survive_with_the_same_digest() -> None:
    made = World({"fast": 100})
    before = state_digest(made.state)
    made.settle(c.SetPartition(Partition("p", ("n1",), state=PartitionState.DRAIN, max_nodes=1, users=("alan",))))
    made.settle(c.SetPartition(Partition("q", every_node=True, is_default=True)))
    made.settle(c.SetAccount(Account("lab", members=(AccountUser("alan"),))))
    first = made.submit("capacity=50", options=JobOptions(account="lab"))
    made.advance(600)
    made.finish(first)
    both = tuple(Dependency(kind, first) for kind in (DependencyKind.AFTER_OK, DependencyKind.AFTER_NOT_OK))
    asked = JobRequest("job", "alan", SCRIPT, "/out", 60, dependencies=both, options=JobOptions(any_of=True))
    job = made.settle(c.SubmitJob(asked), user())
    assert isinstance(job, int)
    assert made.state.partitions and made.state.consumed and made.state.jobs[job].request.effective_options.any_of
    assert state_digest(made.state) != before
    image = Image(made.state, made.state.revision, 1, bytes(DIGEST_BYTES))
    loaded = from_sections((piece.section, piece.payload) for piece in to_sections(image)).state
    assert loaded == made.state and state_digest(loaded) == state_digest(made.state)

"""Receipts in layers behave as one ordered map: checked against a plain dict over random histories."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.messages.commands import Actor, ActorRole
from forebay.replica.messages.entries import CachedReply
from forebay.replica.state import single_replies as layered
from forebay.replica.state.single_replies import SingleReplies
from forebay.replica.values.errors import LedgerViolation
from forebay.replica.values.units import Revision


def _id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def _receipt(revision: int) -> CachedReply:
    return CachedReply(Revision(revision), revision % 7, None, b"", Actor(ActorRole.USER, f"user{revision % 3}"))


batches = st.lists(st.lists(st.integers(1, 3), max_size=9), max_size=40)
"""For each batch, how far each of its receipts is beyond the one before."""


@given(batches, st.integers(1, 30))
def test_receipts_in_layers_are_a_dict_that_drops_its_oldest_at_every_step(steps: list[list[int]], kept: int) -> None:
    model: dict[bytes, CachedReply] = {}
    receipts, revision = SingleReplies(), 0
    held: list[tuple[SingleReplies, dict[bytes, CachedReply]]] = []
    for batch in steps:
        builder = receipts.mutate()
        for step in batch:
            revision += step
            builder.add(_id(revision), _receipt(revision))
            model[_id(revision)] = _receipt(revision)
            for known in range(max(0, revision - 2 * kept), revision + 2):
                assert builder.get(_id(known)) == model.get(_id(known))
                assert (_id(known) in builder) == (_id(known) in model)
            assert len(builder) == len(model)
        gone = [model.pop(oldest) for oldest in list(model)[: max(0, len(model) - kept)]]
        dropped = builder.drop_through(gone[-1].revision if gone else 0)
        assert dropped.greatest_id == (_id(gone[-1].revision) if gone else b"")
        assert dropped.of == Counter(receipt.actor for receipt in gone)
        assert len(builder) == len(model)
        for known in range(max(0, revision - 3 * kept), revision + 2):
            assert builder.get(_id(known)) == model.get(_id(known))
        receipts = builder.finish()
        held.append((receipts, dict(model)))
    for state, expected in held:
        # Older ones stay as they were, whatever was merged and dropped since.
        assert list(state.items()) == list(expected.items())
        assert list(state) == list(expected) and len(state) == len(expected)
        for known in range(revision + 2):
            assert state.get(_id(known)) == expected.get(_id(known))
            assert (_id(known) in state) == (_id(known) in expected)
        assert state == SingleReplies(expected.items())


def test_the_greatest_id_that_was_dropped_is_told_wherever_it_stood() -> None:
    builder = SingleReplies(
        (_id(number), _receipt(place)) for place, number in enumerate([7, 90, 8, 3, 50, 4], start=1)
    ).mutate()
    builder.add(_id(60), _receipt(7))
    assert builder.drop_through(3).greatest_id == _id(90)
    assert builder.drop_through(3) == (b"", Counter())
    assert builder.drop_through(6).greatest_id == _id(50)
    assert list(builder.finish()) == [_id(60)]


def test_layers_stay_few_and_no_full_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layered, "LAYER_FULL", 64)
    receipts, revision = SingleReplies(), 0
    full: list[object] = []
    for size in [1, 1, 7, 1, 30, 2, 1, 1, 64, 3] * 40:
        builder = receipts.mutate()
        for _ in range(size):
            revision += 1
            builder.add(_id(revision), _receipt(revision))
        receipts = builder.finish()
        sizes = [len(layer.ids) for layer in receipts._layers]
        small = [size for size in sizes if size < 64]
        assert len(small) <= 8 and sizes[len(sizes) - len(small) :] == small
        now_full = [id(layer.by_id) for layer in receipts._layers if len(layer.ids) >= 64]
        assert now_full[: len(full)] == full
        full = list(now_full)
    assert len(receipts) == revision


@pytest.mark.parametrize(
    ("known", "command_id", "revision", "sentence"),
    [
        ([5], _id(5), 6, "was settled twice"),
        ([5, 6], _id(5), 7, "was settled twice"),
        ([5], _id(9), 5, "the receipt of revision 5 comes after that of 5"),
        ([5], _id(9), 4, "the receipt of revision 4 comes after that of 5"),
    ],
)
@pytest.mark.parametrize("in_one_batch", [False, True])
def test_a_second_receipt_for_an_id_or_one_out_of_order_is_no_ledgers(
    known: list[int], command_id: bytes, revision: int, sentence: str, in_one_batch: bool
) -> None:
    builder = SingleReplies().mutate()
    for number in known:
        builder.add(_id(number), _receipt(number))
    if not in_one_batch:
        builder = builder.finish().mutate()
    with pytest.raises(LedgerViolation, match=sentence):
        builder.add(command_id, _receipt(revision))
    assert [receipt.revision for _, receipt in builder.finish().items()] == known


def test_an_id_that_was_dropped_may_come_again_and_has_its_new_place() -> None:
    builder = SingleReplies((_id(number), _receipt(number)) for number in (1, 2, 3)).mutate()
    assert builder.drop_through(1).greatest_id == _id(1)
    assert builder.get(_id(1)) is None and builder.get(_id(1), "none") == "none"
    builder.add(_id(1), _receipt(4))
    receipts = builder.finish()
    assert [receipt.revision for _, receipt in receipts.items()] == [2, 3, 4]
    assert receipts[_id(1)].revision == 4
    with pytest.raises(KeyError):
        receipts[_id(9)]


def test_states_with_equal_receipts_are_equal_however_they_were_layered() -> None:
    once = SingleReplies((_id(number), _receipt(number)) for number in range(1, 40))
    singly = SingleReplies()
    for number in range(1, 40):
        builder = singly.mutate()
        builder.add(_id(number), _receipt(number))
        singly = builder.finish()
    assert once == singly and msgspec.to_builtins(list(once.items())) == msgspec.to_builtins(list(singly.items()))
    assert once != SingleReplies()
    with pytest.raises(TypeError):
        hash(once)

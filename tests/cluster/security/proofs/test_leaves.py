"""Leaves of ledger entries: their content, what they hide, and proofs of single commands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.security.proofs import (
    EMPTY_ROOT,
    LEAF_BYTES,
    Leaf,
    LeafError,
    command_leaf,
    command_path,
    command_salt,
    entry_salt,
    leaf_of,
    parse_leaf,
    verify_inclusion,
)

NUMBERS = st.integers(0, 2**64 - 1)
HASHES = st.binary(min_size=32, max_size=32)
KEY = bytes(range(32))


def leaf(commands: tuple[bytes, ...], *, key: bytes = KEY, data: bytes = b"data", base: int = 6) -> Leaf:
    return leaf_of(key, index=3, term=2, data=data, base=base, revision=base + len(commands), at=5, commands=commands)


@given(st.builds(Leaf, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, NUMBERS, HASHES, HASHES))
def test_leaf_survives_encoding(one: Leaf) -> None:
    assert len(one.encode()) == LEAF_BYTES
    assert parse_leaf(one.encode()) == one


@given(st.binary(max_size=2 * LEAF_BYTES))
def test_bytes_without_the_head_of_a_leaf_are_rejected(held: bytes) -> None:
    with pytest.raises(LeafError):
        parse_leaf(held)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=40), st.data())
def test_one_command_is_proven_without_the_others(commands: list[bytes], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(commands) - 1))
    base, root = 6, leaf(tuple(commands)).commands_root
    shown = command_leaf(command_salt(KEY, base + 1 + position), commands[position])
    verify_inclusion(position, len(commands), shown, command_path(KEY, base, commands, position), root)


def test_entry_content_cannot_be_confirmed_without_the_key() -> None:
    ours, others = leaf((b"guessed",)), leaf((b"guessed",), key=bytes(32))
    assert ours.data_digest != others.data_digest
    assert ours.commands_root != others.commands_root


def test_salts_of_commands_and_entries_are_all_different() -> None:
    salts = [command_salt(KEY, number) for number in range(300)] + [entry_salt(KEY, number) for number in range(300)]
    assert len({*salts}) == len(salts)
    assert {len(salt) for salt in salts} == {16}


def test_entry_without_commands_has_the_empty_root() -> None:
    assert leaf(()).commands_root == EMPTY_ROOT

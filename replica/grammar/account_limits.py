"""Text form of limits and reserved space: `MaxBBPerUser:bb/fast=1TiB`, `[plugin:][pool:]#[units]`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import immutables

from forebay.replica.model import PROVIDERS, TRES_PREFIX, Limit, LimitKind, Pool, ReservedSpace
from forebay.replica.values import LIMITS_PER_RECORD_MAX, POOLS_MAX, SIZE_BYTES_MAX, SizeError, format_size, parse_size

_KINDS: Mapping[str, LimitKind] = {kind.word.lower(): kind for kind in LimitKind}
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)


class LimitTextError(ValueError):
    """Invalid text of a limit or reservation, with the cause in `sentence` and a `remedy`."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.remedy = remedy


def parse_limits(texts: Mapping[str, str]) -> tuple[Limit, ...]:
    """Return the limits of a mapping such as {"MaxBBPerUser:bb/fast": "1TiB"}, in canonical order.

    Raises:
        LimitTextError: a limit is unknown or its value invalid.
    """
    if len(texts) > LIMITS_PER_RECORD_MAX:
        raise LimitTextError(f"{len(texts)} limits are given", f"set at most {LIMITS_PER_RECORD_MAX}")
    return tuple(sorted((_limit(key, value) for key, value in texts.items()), key=lambda one: (one.kind, one.tres)))


def _limit(key: str, value: str) -> Limit:
    word, _, name = key.partition(":")
    kind = _KINDS.get(word.lower())
    if kind is None:
        listed = ", ".join(known.word for known in LimitKind)
        raise LimitTextError(f"limit {word[:64]!r} does not exist", f"use one of: {listed}")
    if not kind.counts_space:
        if name:
            raise LimitTextError(f"{kind.word} is not a space limit", f"write {kind.word}={value[:20]}")
        if _NUMBER.fullmatch(value) is None or int(value) > SIZE_BYTES_MAX:
            raise LimitTextError(f"{kind.word} is {value[:64]!r}", "write a whole number")
        return Limit(kind, "", int(value))
    if not name.lower().startswith(TRES_PREFIX) or len(name) == len(TRES_PREFIX):
        raise LimitTextError(
            f"{kind.word} names no resource",
            f"write {kind.word}:bb/NAME, where NAME is a pool, or one of {', '.join(PROVIDERS)} for all pools together",
        )
    return Limit(kind, name[len(TRES_PREFIX) :], parse_space(value, kind.word))


def parse_space(text: str, what: str) -> int:
    """Return a size, which may be 0.

    Raises:
        LimitTextError: the text is not a size.
    """
    if text.strip("0") == "" and text:
        return 0
    try:
        return parse_size(text)
    except SizeError as error:
        raise LimitTextError(f"{what}: {error.sentence}", error.remedy) from None


def format_limits(limits: Iterable[Limit]) -> dict[str, str]:
    """Format limits as `parse_limits` reads them."""
    return {
        f"{limit.kind.word}:{TRES_PREFIX}{limit.tres}" if limit.tres else limit.kind.word: (
            format_size(limit.value) if limit.kind.counts_space and limit.value else str(limit.value)
        )
        for limit in limits
    }


def parse_reserved(text: str, pools: immutables.Map[str, Pool], provider: str) -> tuple[ReservedSpace, ...]:
    """Return the space in `[plugin:][pool:]#[units]`, a list separated by commas.

    Raises:
        LimitTextError: an item names no pool, another provider, or an invalid size.
    """
    items = [item.strip() for item in text.split(",")]
    if len(items) > POOLS_MAX:
        raise LimitTextError(f"{len(items)} pools are listed", f"list at most {POOLS_MAX}")
    found: dict[str, int] = {}
    for item in items:
        words = item.split(":")
        size = words.pop()
        if words and words[0] in PROVIDERS and words[0] not in pools:
            if words[0] != provider:
                raise LimitTextError(
                    f"{words[0]!r} is not this cluster's provider", f"write {provider}, or leave it out"
                )
            del words[0]
        default = next((pool.name for pool in pools.values() if pool.is_default), "")
        if len(words) > 1 or (not words and not default):
            raise LimitTextError(f"{item[:64]!r} names no pool", "write it as pool:size, for example fast:10TiB")
        pool = words[0] if words else default
        found[pool] = found.get(pool, 0) + parse_space(size, f"reservation of {pool[:64]}")
    return tuple(ReservedSpace(pool, size_bytes) for pool, size_bytes in sorted(found.items()))


def format_reserved(space: Iterable[ReservedSpace]) -> str:
    """Format reserved space as `parse_reserved` reads it."""
    return ",".join(f"{one.pool}:{format_size(one.size_bytes)}" for one in space)

"""What a configuration says a cluster is founded with: its pools and its policy.

Afterwards they are replicated state that commands change (law 3); what the file says then is no longer looked at.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from cluster.config.toml import Table
from cluster.security import NAME_RULE, is_name
from replica.model import Policy, Pool, check_policy
from replica.values import POOLS_MAX

ROOTS_MAX: Final = 256
"""Staging roots of a kind, count: each is compared with each path of a job."""


def read_name(table: Table, key: str, example: str) -> str:
    """Return the name of something; ConfigError says what a name is."""
    name = table.text(key, example=example)
    if not is_name(name):
        raise table.refuse(key, f"found {name!r}", NAME_RULE)
    return name


def read_pools(top: Table) -> tuple[Pool, ...]:
    """Return the tables [[pool]], sizes in bytes; ConfigError names the key that cannot be used."""
    pools: list[Pool] = []
    default = ""
    for table in top.tables("pool", most=POOLS_MAX):
        name, quantity, granularity = (
            read_name(table, "name", "fast"),
            table.size("quantity"),
            table.size("granularity", 1),
        )
        if granularity > quantity:
            raise table.refuse(
                "granularity",
                f"found {granularity} bytes, more than the pool's quantity of {quantity}",
                "write a smaller one",
            )
        is_default = table.boolean("default", False)
        table.finish()
        if name in {pool.name for pool in pools}:
            raise table.refuse("name", f"there is already a pool {name!r}", "give each pool a name of its own")
        if is_default and default:
            raise table.refuse("default", f"pool {default!r} is the default already", "make one pool the default")
        default = name if is_default else default
        pools.append(Pool(name=name, quantity_bytes=quantity, granularity_bytes=granularity, is_default=is_default))
    return tuple(pools)


def read_policy(top: Table, base: Path) -> Policy:
    """Return [policy] and [staging], paths relative to `base`; ConfigError names the key that cannot be used."""
    staging, table = top.table("staging"), top.table("policy")
    sources, destinations = _roots(staging, "sources", base), _roots(staging, "destinations", base)
    staging.finish()
    settings: dict[str, int | bool] = {}
    standard = Policy()
    for field in Policy.__struct_fields__:
        value = getattr(standard, field)
        if isinstance(value, bool):
            settings[field] = table.boolean(field, value)
        elif isinstance(value, int):
            settings[field] = table.integer(field, value)
    table.finish({"sources": "[staging]", "destinations": "[staging]"})
    policy = msgspec.structs.replace(standard, sources=sources, destinations=destinations, **settings)
    refusal = check_policy(policy)
    if refusal is not None:
        key = refusal.place.removeprefix("policy.")
        place = staging if key in ("sources", "destinations") else table
        raise place.refuse(key, refusal.sentence, refusal.remedy)
    return policy


def _roots(table: Table, key: str, base: Path) -> tuple[str, ...]:
    roots = []
    for number, text in enumerate(table.texts(key, (), most=ROOTS_MAX), start=1):
        if "%" in text.replace("%u", ""):
            raise table.refuse(f"{key}[{number}]", f"found {text!r}", "the only symbol here is %u, the job's user")
        if ".." in Path(text).parts:
            raise table.refuse(f"{key}[{number}]", f"found '..' in {text!r}", "write the directory itself")
        roots.append(os.path.normpath(base / text))
    return tuple(roots)

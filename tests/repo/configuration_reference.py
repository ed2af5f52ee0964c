"""Tables of docs/reference/configuration.md, generated from the keys themselves."""

from collections.abc import Iterable

from forebay.replica.decide.configuration import file_value
from forebay.replica.grammar.settings import KEYS, SettingKey, SettingOwner
from forebay.replica.model.configuration import DEFAULT_SITE

HEAD = "| key | value | default | meaning |\n|---|---|---|---|\n"


def slurm_keys() -> str:
    """Return the table of the keys of burst_buffer.conf."""
    return _table(key for key in KEYS if key.is_slurm)


def own_keys() -> str:
    """Return the table of Forebay's own keys."""
    return _table(key for key in KEYS if not key.is_slurm)


def _table(keys: Iterable[SettingKey]) -> str:
    return HEAD + "\n".join(map(row, keys))


def row(key: SettingKey) -> str:
    """Return the row of a key."""
    default = "" if key.owner is SettingOwner.FLAG else file_value(key, DEFAULT_SITE)
    return f"| `{key.name}` | {key.kind.value} | {f'`{default}`' if default else ''} | {key.about} |"

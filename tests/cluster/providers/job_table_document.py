"""Table of docs/reference/lua-provider.md with every field of the job table."""

from __future__ import annotations

from forebay.cluster.providers.job_table import FIELDS, INFINITE16, NICE_OFFSET, NO_VAL, NO_VAL16, JobField

NAMES = {NO_VAL: "NO_VAL", NO_VAL16: "NO_VAL16", INFINITE16: "INFINITE16", NICE_OFFSET: "NICE_OFFSET"}


def render() -> str:
    """Return the fields as a Markdown table, by name."""
    fields = sorted(FIELDS, key=lambda field: field.name)
    rows = [f"| `{field.name}` | {field.kind} | {_releases(field)} | {_value(field)} |" for field in fields]
    return "\n".join(["| field | type | releases | value |", "|---|---|---|---|", *rows])


def _releases(field: JobField) -> str:
    return f"{field.since} to {field.until}" if field.until else f"from {field.since}"


def _value(field: JobField) -> str:
    if callable(field.value):
        return "the job's"
    if field.value is None:
        return "nil"
    name = NAMES.get(int(field.value)) if isinstance(field.value, int | float) else None
    return f"{field.value:.0f} ({name})" if name and isinstance(field.value, int | float) else str(field.value)

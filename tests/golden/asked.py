"""Every request that a release takes over HTTP and the channel: its fields, and what each is where nobody says it."""

import inspect
from typing import Any

import msgspec

from forebay.cluster.schemas import agents, requests

REQUIRED = "required"


def kinds() -> dict[str, type[requests.Request]]:
    """Return each kind of request by its name."""
    return {
        name: kind
        for module in (agents, requests)
        for name, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, requests.Request) and kind is not requests.Request
    }


def bodies() -> dict[str, dict[str, Any]]:
    """Return the fields of each kind of request by their names: REQUIRED, or the default in a list."""
    return {
        name: {one.encode_name: _need(one) for one in msgspec.structs.fields(kind)} for name, kind in kinds().items()
    }


def _need(field: msgspec.structs.FieldInfo) -> Any:
    if field.required:
        return REQUIRED
    made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    return [msgspec.to_builtins(made)]

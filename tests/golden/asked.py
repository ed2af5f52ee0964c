"""Every request that a release takes over HTTP and the channel: its fields, and whether each has to be there."""

import inspect

import msgspec

from cluster.client import requests


def bodies() -> dict[str, dict[str, str]]:
    """Return the fields of each kind of request by their names, "required" or "optional"."""
    kinds = inspect.getmembers(requests, lambda value: inspect.isclass(value) and issubclass(value, requests.Request))
    return {
        name: {
            field.encode_name: "required" if field.required else "optional" for field in msgspec.structs.fields(kind)
        }
        for name, kind in kinds
        if kind not in (requests.Request, requests.Command)
    }

"""Reference pages of the HTTP API and of the metrics, generated from the OpenAPI document and from the code.

`scripts/generate` writes them into docs/reference.
"""

import ast
import re
import textwrap
from typing import Any, Final

from forebay.cluster.api.web.openapi import document
from tests.repo.tree import ROOT, modules, text_of

WIDTH: Final = 100
KINDS: Final = ROOT / "tests/contract/names/metrics.txt"
"""Name, type and labels of each metric, as a test found them in a scrape."""

METHODS: Final = ("get", "post", "put", "patch", "delete")


def operations() -> str:
    """Return every operation, by tag: path, roles, parameters, request and response."""
    found = document("")
    tags: dict[str, list[str]] = {}
    for path, methods in found["paths"].items():
        for method in METHODS:
            if method in methods:
                one = methods[method]
                tags.setdefault(one["tags"][0], []).append(_operation(method, path, one))
    return "\n\n".join(
        f"## {tag.replace('_', ' ').capitalize()}\n\n" + "\n\n".join(parts) for tag, parts in sorted(tags.items())
    )


def objects() -> str:
    """Return every object of requests and responses, with its fields."""
    parts = []
    for name, schema in sorted(document("")["components"]["schemas"].items()):
        text = [f"## {name}"]
        if description := schema.get("description", "").split("\n\n")[0]:
            text.append(_wrapped(" ".join(description.split())))
        if schema.get("type") == "object":
            required = set(schema.get("required", ()))
            fields = [
                _item(f"`{field}`: {_type(kind)}" + (", required" if field in required else ""))
                for field, kind in schema.get("properties", {}).items()
            ]
            text.append("\n".join(fields) or "No fields.")
        else:
            text.append(_wrapped(_type(schema).capitalize() + "."))
        parts.append("\n\n".join(text))
    return "\n\n".join(parts)


def metrics() -> str:
    """Return every metric with its type, its labels and its help."""
    helps = _helps()
    parts = []
    for line in KINDS.read_text(encoding="utf-8").splitlines():
        name, kind, labels = re.fullmatch(r"(\S+) (\w+):(.*)", line).groups()  # type: ignore[union-attr]
        if name.startswith("forebay_"):
            text = helps.get(name) or helps[f"{name}_total"]
            shown = ", ".join(f"`{label}`" for label in labels.split() if label != "le")
            full = f"{name}_total" if kind == "counter" else name
            parts.append(_item(f"`{full}` ({kind}{f'; {shown}' if shown else ''}): {text}"))
    return "\n".join(parts)


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    roles = ", ".join(operation["x-roles"]) or "everyone"
    lines = [f"### `{method.upper()} {path}`", _wrapped(operation["summary"]), _wrapped(f"Roles: {roles}.")]
    items = [_item(f"`{one['name']}`: {one['description']}") for one in operation["parameters"] if one["in"] == "query"]
    if items:
        lines.append("Query parameters:\n\n" + "\n".join(items))
    if "requestBody" in operation:
        lines.append(_wrapped(f"Request: {_content(operation['requestBody'])}."))
    status, response = next((code, one) for code, one in operation["responses"].items() if code.startswith("2"))
    lines.append(_wrapped(f"Response {status}: {_content(response)}."))
    return "\n\n".join(lines)


def _content(body: dict[str, Any]) -> str:
    ((kind, content),) = body["content"].items()
    return _type(content["schema"], "http-objects.md") if kind == "application/json" else f"`{kind}`"


def _type(schema: dict[str, Any], page: str = "") -> str:
    """Return a type of JSON Schema in words, with links to the objects on a page."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}]({page}#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type(one, page) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"array of {_type(schema['items'], page)}" if schema.get("items") else "array"
    if schema.get("type") == "object" and schema.get("additionalProperties"):
        return f"object with values of {_type(schema['additionalProperties'], page)}"
    return str(schema.get("type", "any value"))


def _helps() -> dict[str, str]:
    """Return the help of each metric: the string after its name in a call."""
    found = {}
    for path in modules():
        if path.parts[:2] == ("cluster", "api"):
            for node in ast.walk(ast.parse(text_of(path))):
                if isinstance(node, ast.Call) and len(node.args) > 1:
                    name, text = node.args[:2]
                    if isinstance(name, ast.Constant) and isinstance(text, ast.Constant):
                        found[str(name.value)] = " ".join(str(text.value).split())
    return found


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def _item(text: str) -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )

"""Names that others rely on: in ledgers, answers, metrics, the command line and files. One golden file for each kind.

With FOREBAY_REWRITE_GOLDEN=1 the files under names/ are written again: look at the difference before it is committed.
Where a table can be asked from outside, it is asked by what it does, so that it may move.
"""

from __future__ import annotations

import ast
import asyncio
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import NoneType
from typing import Any

import click
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from forebay.cluster.api.web.openapi import document
from forebay.cluster.api.web.problems import STATUS_OF
from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import (
    BBF_LINE,
    INVALID_REQUEST_LINE,
    MEANINGS,
    NODE_COUNT_LINE,
    PERMISSION_LINE,
    SERVE_MEANINGS,
)
from forebay.cluster.cli.submission.sbatch_options import OPTIONS
from forebay.cluster.config.config import Config
from forebay.cluster.config.toml import NOBODYS, ConfigError
from forebay.cluster.schemas.event_kinds import kind_name
from forebay.cluster.schemas.operations import OPERATIONS, ApiOperation
from forebay.cluster.schemas.requests import BulkCommand
from forebay.replica.decide.configuration import file_value
from forebay.replica.decide.decide import decide
from forebay.replica.grammar.settings import KEYS, SettingOwner
from forebay.replica.messages import commands as c
from forebay.replica.messages.events import EVENTS, Event
from forebay.replica.model.accounts import ACCOUNT_REASONS, QOS_REASONS
from forebay.replica.model.buffers import BufferState
from forebay.replica.model.configuration import DEFAULT_SITE, FLAGS, PROVIDERS, RESTART_POLICIES
from forebay.replica.model.job_states import JobState
from forebay.replica.model.jobs import Hold
from forebay.replica.model.mail import MAIL_TYPES
from forebay.replica.model.requests import DependencyKind
from forebay.replica.model.stages import Stage
from forebay.replica.state.state import EMPTY
from forebay.replica.values.errors import Rejection, RejectionCode
from forebay.replica.values.units import Instant
from forebay.replica.values.verdicts import Reason
from forebay.snapshots.image import WORDS
from tests.cluster.harness import Harness, make_cluster, placed
from tests.contract.golden import HERE, compare

ROOT = HERE.parents[1]


def kinds(union: Any) -> tuple[Any, ...]:
    """Return the members of a union of records."""
    return typing.get_args(union)


def made(kind: Any) -> Any:
    """Return a record of this kind with the text `x` in each field: only its type and its names matter here."""
    return kind(*["x"] * len(kind.__struct_fields__))


def who_may(kind: Any) -> list[str]:
    """Return the roles of those whom `decide` does not send away because of who they are."""
    return [role.name.lower() for role in c.ActorRole if not _is_denied(c.Actor(role, "x"), made(kind))]


def _is_denied(actor: c.Actor, command: c.Command) -> bool:
    try:
        decided = decide(EMPTY, c.Request(b"", actor, command), Instant(1))
    except Exception:  # whoever may send it is believed before what it says, and these say nothing
        return False
    return isinstance(decided, Rejection) and decided.code is RejectionCode.PERMISSION_DENIED


def test_every_command_has_the_name_in_the_ledger_and_the_senders_that_it_had() -> None:
    compare(
        "names/commands.txt", sorted(f"{c.kind_of(made(kind))}: {' '.join(who_may(kind))}" for kind in kinds(c.Command))
    )


def test_every_event_has_the_name_that_it_had() -> None:
    compare("names/events.txt", sorted(kind_name(kind) for kind in kinds(Event)))


def test_every_event_shows_the_details_that_it_showed() -> None:
    compare(
        "names/event_details.txt",
        sorted(f"{kind_name(kind)}: {' '.join(kind.__struct_fields__)}" for kind in kinds(Event)),
    )


def test_every_event_has_the_tag_and_every_table_the_section_that_it_had() -> None:
    compare("names/event_tags.txt", [f"{tag:3} {kind_name(kind)}" for tag, kind in sorted(tagged(EVENTS))])
    compare("names/snapshot_sections.txt", [f"{section:3} {word}" for section, word in sorted(WORDS.items())])


def tagged(events: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the tag of each event with the event."""
    return ((event.__struct_config__.tag, event) for event in events)


def test_the_words_in_bulk_and_in_reports_are_what_they_were() -> None:
    tags = [("command in bulk", kind) for kind in kinds(BulkCommand)]
    tags += [("result in a report", kind) for kind in kinds(c.OperationResult)]
    compare(
        "names/tags.txt",
        sorted(f"{what}: {kind.__struct_config__.tag_field}={kind.__struct_config__.tag}" for what, kind in tags),
    )


def test_the_words_for_states_and_reasons_are_what_they_were() -> None:
    words = {
        "account reason": [*ACCOUNT_REASONS.values()],
        "burst buffer state": [state.word for state in BufferState],
        "burst buffer type": PROVIDERS,
        "dependency": sorted({kind.word for kind in DependencyKind}),
        "flag": FLAGS,
        "hold": [hold.name.lower() for hold in Hold],
        "job state": [state.name for state in JobState],
        "mail type": MAIL_TYPES,
        "qos reason": [*QOS_REASONS.values()],
        "reason": [*Reason],
        "restart policy": RESTART_POLICIES,
        "stage": [stage.word for stage in Stage],
    }
    compare("names/words.txt", (f"{what}: {word}" for what in words for word in words[what]))


def test_every_exit_code_means_what_it_meant() -> None:
    rows = [f"forebay {int(code)} {code.name}: {meaning}" for code, meaning in MEANINGS.items()]
    rows += [f"forebay run replica {code}: {meaning}" for code, meaning in SERVE_MEANINGS.items()]
    rows += [f"last line: {line}" for line in (INVALID_REQUEST_LINE, PERMISSION_LINE, NODE_COUNT_LINE, BBF_LINE)]
    compare("names/exits.txt", rows)


# Refusals and problems


def test_every_rejection_has_the_number_the_code_and_the_status_that_it_had() -> None:
    compare(
        "names/refusals.txt", (f"{int(code)} {code.name.lower()}: {STATUS_OF.get(code, 409)}" for code in RejectionCode)
    )


def test_every_problem_of_the_api_has_the_code_that_it_had() -> None:
    found = {row for path in (ROOT / "cluster").rglob("*.py") for row in problems_in(ast.parse(path.read_text()))}
    compare("names/problems.txt", sorted(found))


def problems_in(tree: ast.Module) -> Iterator[str]:
    """Yield status and code of every problem that a module makes, where they are written there."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("Problem", "bad_request")
        ):
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            given = dict(
                zip(("status", "code") if node.func.id == "Problem" else ("", "", "", "code"), node.args, strict=False)
            )
            code = named.get("code", given.get("code"))
            status = named.get("status", given.get("status"))
            text = constants.get(code.id) if isinstance(code, ast.Name) else getattr(code, "value", None)
            if isinstance(text, str):
                yield f"{getattr(status, 'value', 'any') if node.func.id == 'Problem' else 400} {text}"


# What people type


def test_every_command_of_the_command_line_takes_what_it_took() -> None:
    rows = [*typed(cli, ("forebay",))]
    rows += [
        f"#SBATCH {option.long} {option.short or '-'} {option.value} {option.treatment}"
        f"{f' alone {option.alone}' if option.alone else ''}"
        for option in OPTIONS
    ]
    compare("names/command_line.txt", rows)


def typed(command: click.Command, words: tuple[str, ...]) -> Iterator[str]:
    """Yield a line for a command, one for each of its parameters, and those of the commands below it."""
    yield f"{' '.join(words)}{' (hidden)' if command.hidden else ''}"
    for parameter in command.params:
        names = "/".join(
            [" ".join(parameter.opts), *([" ".join(parameter.secondary_opts)] if parameter.secondary_opts else [])]
        )
        marks = [parameter.param_type_name, parameter.type.name, f"nargs={parameter.nargs}"]
        marks += [word for word, holds in (("required", parameter.required), ("multiple", parameter.multiple)) if holds]
        marks += [f"default={parameter.default!r}"] if isinstance(parameter.default, str | int | float | bool) else []
        marks += [f"environment={parameter.envvar}"] if parameter.envvar else []
        marks += (
            [f"one of {','.join(map(str, parameter.type.choices))}"] if isinstance(parameter.type, click.Choice) else []
        )
        marks += ["hidden"] if getattr(parameter, "hidden", False) else []
        yield f"    {names}: {', '.join(marks)}"
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            yield from typed(command.commands[name], (*words, name))


# What programs ask


def test_every_route_is_where_it_was_for_whom_it_was() -> None:
    compare(
        "names/routes.txt",
        (route_text(route) for route in sorted(OPERATIONS.values(), key=lambda route: (route.path, route.method))),
    )


def route_text(route: ApiOperation[Any, Any]) -> str:
    """Return method, path, roles, operation id, status, query and records of a route."""
    records = [getattr(kind, "__name__", str(kind)) for kind in (route.request, route.answer) if kind is not NoneType]
    words = [route.method, route.path, ",".join(sorted(route.roles)), route.name, str(route.status), f"tag={route.tag}"]
    words += [f"query={','.join(sorted(route.query))}"] if route.query else []
    return " ".join([*words, " -> ".join(records)])


def test_every_body_and_answer_has_the_fields_that_it_had() -> None:
    schemas = document("test")["components"]["schemas"]
    compare("names/schemas.txt", (row for name in sorted(schemas) for row in schema_rows(name, schemas[name])))


def schema_rows(name: str, schema: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each field of a record, or one for what is no record."""
    if "properties" not in schema:
        yield f"{name}: {shape(schema)}"
        return
    extra = "" if schema.get("additionalProperties", True) else " (no others)"
    yield f"{name}{extra}"
    for field, of in schema["properties"].items():
        needed = " required" if field in schema.get("required", ()) else ""
        default = f" = {msgspec.json.encode(of['default']).decode()}" if "default" in of else ""
        yield f"    {field}: {shape(of)}{default}{needed}"


def shape(schema: dict[str, Any]) -> str:
    """Return what a field holds, in one line without sentences."""
    plain = {key: value for key, value in schema.items() if key not in ("description", "title", "default", "examples")}
    text = msgspec.json.encode(plain).decode()
    return text.replace("#/components/schemas/", "").replace('"', "")


# What operators write


def test_every_key_of_burst_buffer_conf_is_there_with_its_default() -> None:
    rows = [
        f"{key.name}: {key.kind.value}"
        + ("" if key.owner is SettingOwner.FLAG else f" = {file_value(key, DEFAULT_SITE)}")
        for key in KEYS
    ]
    compare("names/burst_buffer_conf.txt", rows)


EVERY_KEY = (HERE / "forebay-every-key.toml").read_text(encoding="utf-8")


def test_a_configuration_with_every_key_says_what_it_said(tmp_path: Path) -> None:
    file = tmp_path / "forebay.toml"
    file.write_text(EVERY_KEY, encoding="utf-8")
    config = msgspec.structs.replace(Config.load(file), owner_uid=NOBODYS)  # whoever runs this
    said = msgspec.json.format(msgspec.json.encode(config, enc_hook=str), indent=2).decode()
    compare("names/forebay_toml.txt", said.replace(str(tmp_path), "").splitlines())


def test_a_configuration_with_another_key_is_refused_with_the_words_of_before(tmp_path: Path) -> None:
    file, rows = tmp_path / "forebay.toml", []
    headings = [line for line in EVERY_KEY.splitlines() if line.startswith("[")]
    for number, heading in enumerate(headings):
        before, _, after = EVERY_KEY.partition(heading) if number == 0 else _parted(EVERY_KEY, headings, number)
        file.write_text(f"{before}{heading}\nqqqqq = 1{after}", encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            Config.load(file)
        rows.append(f"{caught.value.key}: {caught.value.sentence}; {caught.value.remedy}")
    file.write_text(f"qqqqq = 1\n{EVERY_KEY}", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        Config.load(file)
    compare(
        "names/forebay_toml_unknown.txt", [*rows, f"{caught.value.key}: {caught.value.sentence}; {caught.value.remedy}"]
    )


def _parted(text: str, headings: list[str], number: int) -> tuple[str, str, str]:
    """Part a text at the heading with this number; some are written twice."""
    nth, start = headings[:number].count(headings[number]), -1
    for _ in range(nth + 1):
        start = text.index(headings[number], start + 1)
    return text[:start], headings[number], text[start + len(headings[number]) :]


# What is scraped


def test_every_metric_has_the_name_the_type_and_the_labels_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registries: set[CollectorRegistry] = set()
    collect = CollectorRegistry.collect

    def noted(registry: CollectorRegistry) -> Iterable[Metric]:
        registries.add(registry)
        return collect(registry)

    monkeypatch.setattr(CollectorRegistry, "collect", noted)
    rows: set[str] = set()

    async def scrape() -> None:
        async with Harness(placed(make_cluster(tmp_path / "cluster"), tmp_path)) as harness:
            # What is told of only where there is such a thing: a limit, a snapshot, a rejection, a sync.
            limit = {
                "command_id": harness.new_id(),
                "settings": [{"key": "TransferRate", "value": "1MiB"}],
                "partial": True,
            }
            assert (await harness.ask("POST", "/v1/configuration", limit)).status == 200
            assert (await harness.ask("POST", "/v1/snapshots")).status == 200
            assert (await harness.ask("GET", "/v1/nothing")).status == 404
            harness.service.metrics.record_sync(0.001)
            assert (await harness.ask("GET", "/metrics")).status == 200
            for registry in registries:
                for family in collect(registry):
                    rows.add(f"{family.name} {family.type}: {' '.join(sorted(labels_of(family)))}".rstrip())

    asyncio.run(scrape())
    compare("names/metrics.txt", sorted(rows))


def labels_of(family: Metric) -> set[str]:
    """Return the names of a family's labels, those of one without samples too."""
    return {*getattr(family, "_labelnames", ()), *(label for sample in family.samples for label in sample.labels)}

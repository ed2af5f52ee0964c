"""The JSON shapes: what is sent is strict, what is read is tolerant, and both come back as they went."""

import inspect
from typing import Any

import msgspec
import pytest

from forebay.cluster.schemas import accounts, burst, configuration, jobs, ledger, requests, transfers
from forebay.cluster.schemas.agents import OperationReport, ReportsRequest
from forebay.cluster.schemas.base import View
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.requests import BulkRequest, CancelCommand, SubmitCommand
from forebay.replica.messages.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from forebay.replica.model.job_states import JobState

ID = "017f22e279b07cc398c4dc0c0c07398f"


MODULES = (accounts, burst, configuration, jobs, ledger, requests, transfers)


def shapes(base: type) -> list[type[msgspec.Struct]]:
    found = (kind for module in MODULES for _, kind in inspect.getmembers(module, inspect.isclass))
    return list(dict.fromkeys(kind for kind in found if issubclass(kind, base)))


@pytest.mark.parametrize("kind", shapes(requests.Request), ids=lambda kind: kind.__name__)
def test_every_request_refuses_unknown_fields(kind: type[msgspec.Struct]) -> None:
    assert kind.__struct_config__.forbid_unknown_fields
    assert kind.__struct_config__.frozen
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(b'{"colour": "blue"}', type=kind)


@pytest.mark.parametrize("kind", shapes(View), ids=lambda kind: kind.__name__)
def test_every_view_tolerates_fields_of_a_newer_server(kind: type[msgspec.Struct]) -> None:
    assert not kind.__struct_config__.forbid_unknown_fields
    assert kind.__struct_config__.frozen


@pytest.mark.parametrize("kind", [*shapes(requests.Request), *shapes(View)])
def test_every_shape_has_a_json_schema_for_the_openapi_document(kind: type[msgspec.Struct]) -> None:
    schema = msgspec.json.schema(kind)
    assert kind.__name__ in schema["$defs"]


def test_bulk_commands_are_told_apart_by_their_type() -> None:
    sent = BulkRequest(
        commands=(
            SubmitCommand(command_id=ID, script="#!/bin/sh\n", time_limit_s=60, workdir="/", bb="capacity=1"),
            CancelCommand(command_id=ID, job_id=4, hurry=True),
        )
    )
    encoded = msgspec.json.encode(sent)
    assert msgspec.json.decode(encoded, type=BulkRequest) == sent
    assert [command["type"] for command in msgspec.json.decode(encoded)["commands"]] == ["submit_job", "cancel_job"]


@pytest.mark.parametrize("command_id", ["", "x", ID.upper(), ID + "0", f"{ID}\n", f"../{ID[3:]}"])
def test_a_command_id_is_exactly_32_hexadecimal_digits(command_id: str) -> None:
    body = {"command_id": command_id, "script": "", "time_limit_s": 1, "workdir": "/"}
    with pytest.raises(msgspec.ValidationError, match="command_id"):
        msgspec.json.decode(msgspec.json.encode(body), type=SubmitRequest)


@pytest.mark.parametrize(
    ("result", "word"),
    [
        (OperationDone(files=3, size_bytes=9, digest="d"), "done"),
        (OperationFailed(message="no"), "failed"),
        (ScriptStarted(), "started"),
        (ScriptEnded(result=JobState.TIMEOUT, signal=15), "ended"),
    ],
)
def test_a_report_carries_every_kind_of_result(result: Any, word: str) -> None:
    sent = ReportsRequest(reports=(OperationReport(command_id=ID, job=1, attempt=2, stage="run", result=result),))
    encoded = msgspec.json.encode(sent)
    assert msgspec.json.decode(encoded)["reports"][0]["result"]["type"] == word
    assert msgspec.json.decode(encoded, type=ReportsRequest) == sent

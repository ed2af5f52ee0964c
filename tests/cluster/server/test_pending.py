"""Waiting commands are weighed by the memory that they take."""

import pytest

from forebay.cluster.server.pending import weight_bytes
from forebay.replica.messages.commands import CONTROLLER, CancelJob, Command, Request, SubmitJob, UpdateJob
from forebay.replica.model.requests import BufferRequest, JobRequest

TEXT = "#BB_LUA " + "x" * 50_000
DIRECTIVES = BufferRequest("", 0, (), "scratch", (), (), TEXT)


@pytest.mark.parametrize(
    ("command", "least_bytes"),
    [
        (CancelJob(1), 0),
        (SubmitJob(JobRequest("a", "alice", "#!/bin/sh\n" * 100, "/out", 60)), 1_000),
        (SubmitJob(JobRequest("a", "alice", "", "/out", 60, buffer=DIRECTIVES)), len(TEXT)),
        (UpdateJob(1, buffer=DIRECTIVES), len(TEXT)),
        (UpdateJob(1), 0),
    ],
)
def test_command_weight_includes_its_texts_and_an_allowance(command: Command, least_bytes: int) -> None:
    weight = weight_bytes(Request(b"", CONTROLLER, command))
    assert least_bytes < weight < least_bytes + 1_000

"""Errors of the Python API: one class for each kind, with code, message and remedy; nothing else is raised."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.testing
from forebay import Client, ForebayError
from forebay.cluster.client import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.sdk.errors import error_of_call


@pytest.mark.parametrize(
    ("status", "code", "outcome", "kind"),
    [
        (0, "unreachable", "rejected", forebay.UnavailableError),
        (0, "untrusted", "rejected", forebay.PermissionDeniedError),
        (0, "outcome_unknown", "unknown", forebay.OutcomeUnknownError),
        (400, "unknown_pool", "rejected", forebay.InvalidRequestError),
        (401, "not_identified", "rejected", forebay.PermissionDeniedError),
        (403, "permission_denied", "rejected", forebay.PermissionDeniedError),
        (404, "unknown_job", "rejected", forebay.NotFoundError),
        (404, "unknown_job", "unknown", forebay.OutcomeUnknownError),
        (409, "wrong_state", "rejected", forebay.RejectedError),
        (410, "history_not_held", "rejected", forebay.NotFoundError),
        (413, "limit_exceeded", "rejected", forebay.InvalidRequestError),
        (429, "queue_full", "rejected", forebay.RejectedError),
        (500, "internal_error", "unknown", forebay.OutcomeUnknownError),
        (503, "no_leader", "rejected", forebay.UnavailableError),
        (507, "journal_full", "rejected", forebay.RejectedError),
    ],
)
def test_each_kind_of_failure_has_its_class(status: int, code: str, outcome: Any, kind: type[ForebayError]) -> None:
    error = error_of_call(ApiError(status, code, "it failed", remedy="do this", outcome=outcome, command_id="c"))
    assert type(error) is kind
    assert (error.code, error.message, error.remedy, error.command_id) == (code, "it failed", "do this", "c")
    assert str(error) == "it failed; do this"


@pytest.mark.parametrize(
    "arguments",
    [
        {"config": "nowhere/forebay.toml"},
        {"urls": ["https://127.0.0.1:1"]},
        {"urls": [], "authority": "ca.pem", "certificate": "a.pem"},
        {"urls": "http://127.0.0.1:1", "authority": "ca.pem", "certificate": "a.pem"},
        {"urls": "https://127.0.0.1:1/v1", "authority": "ca.pem", "certificate": "a.pem"},
        {"urls": "https://127.0.0.1:1", "authority": "ca.pem", "certificate": "a.pem"},
        {"urls": "https://127.0.0.1:1", "config": "forebay.toml"},
        {"certificate": "a.pem"},
    ],
)
def test_incomplete_access_is_a_configuration_error(arguments: dict[str, Any]) -> None:
    with pytest.raises(forebay.ConfigurationError) as caught:
        Client.connect(**arguments)
    assert caught.value.code == "configuration"
    assert caught.value.remedy


def test_an_identity_without_a_certificate_is_a_configuration_error(config: Config) -> None:
    with pytest.raises(forebay.ConfigurationError):
        Client.connect(config.file, identity="nobody")


def test_the_variables_of_the_command_line_are_read(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CONFIG", str(config.file))
    monkeypatch.setenv("FOREBAY_IDENTITY", "alice")
    Client.connect().close()
    monkeypatch.setenv("FOREBAY_IDENTITY", "nobody")
    with pytest.raises(forebay.ConfigurationError):
        Client.connect()


def test_an_unreachable_cluster_is_unavailable_after_the_deadline(config: Config) -> None:
    with Client.connect(config.file, identity="alice", deadline_s=0.3) as client:
        with pytest.raises(forebay.UnavailableError) as caught:
            client.pools()
        with pytest.raises(forebay.UnavailableError):
            client.wait(1)
    assert caught.value.code == "unreachable"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("true\n", {}),
        ("#!/bin/sh\n#SBATCH --nonsense\n", {}),
        (Path("nowhere.sh"), {}),
        ("#!/bin/sh\n", {"begin_at": datetime.datetime(2026, 1, 1)}),  # noqa: DTZ001
    ],
)
def test_a_bad_script_or_option_is_an_invalid_request(script: Any, options: Any) -> None:
    with forebay.testing.cluster() as cluster:
        client = cluster.client()
        with pytest.raises(forebay.InvalidRequestError):
            client.submit(script, **options)
        assert client.jobs() == []


def test_options_that_do_not_exist_or_have_another_type_are_errors_of_the_program() -> None:
    with forebay.testing.cluster() as cluster:
        client, unknown = cluster.client(), {"memory": 1}
        with pytest.raises(TypeError, match="memory"):
            client.submit("#!/bin/sh\n", **unknown)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="licenses"):
            client.submit("#!/bin/sh\n", licenses="matlab")


def test_every_error_has_one_base_and_is_exported() -> None:
    errors = [getattr(forebay, name) for name in forebay.__all__ if name.endswith("Error")]
    assert len(errors) == 10
    assert all(issubclass(error, ForebayError) for error in errors)

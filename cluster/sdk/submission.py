"""Submits from Python: a script with its `#SBATCH` lines, and options that take precedence over them."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypedDict

from forebay.cluster.cli import Failure, prepare, read_bounded
from forebay.cluster.schemas import SubmitRequest
from forebay.cluster.sdk.errors import INVALID_SCRIPT, InvalidRequestError
from forebay.replica.values import SUBMITTED_SCRIPT_BYTES_MAX, Instant

_TEXT: Final = "-"
"""Name of a script that is not a file."""


class SubmitOptions(TypedDict, total=False):
    """Options of a submit, named as in the HTTP API. Each takes precedence over the script's `#SBATCH` lines."""

    name: str
    bb: str
    """Burst-buffer request, for example `capacity=10GiB pool=fast`, in addition to the script's directives."""
    bbf: str | Path
    """File with directives."""
    cpus: int
    tasks: int
    exclusive: bool
    nodes: int
    time_limit_s: int
    begin_at: datetime.datetime
    """Earliest start; a time with a zone."""
    deadline: datetime.datetime
    """Time by which the job must be able to end; a time with a zone."""
    dependencies: Sequence[str]
    """For example `["afterok:12"]`."""
    dependency_any: bool
    array: str
    """Tasks, for example `1-10%2`."""
    account: str
    qos: str
    partition: str
    reservation: str
    licenses: Sequence[str]
    priority: int
    nice: int
    requeue: bool
    hold: bool
    comment: str
    signal: str
    workdir: str | Path
    output: str | Path
    error: str | Path
    input: str | Path
    open_mode: str
    mail_types: Sequence[str]
    mail_user: str


def submit_request(
    script: str | os.PathLike[str],
    options: SubmitOptions,
    *,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    user: str | None,
    command_id: str,
    now: Instant,
) -> tuple[SubmitRequest, tuple[str, ...]]:
    """Return the request for a script, and warnings about its options.

    `script` is the text of a script if it is a `str`, else the path of its file.

    Raises:
        InvalidRequestError: The script cannot be read or is invalid, or an option has the wrong type.
        TypeError: An option is unknown.
    """
    unknown = sorted(options.keys() - SubmitOptions.__annotations__.keys())
    if unknown:
        known = ", ".join(sorted(SubmitOptions.__annotations__))
        raise TypeError(f"submit() has no option {unknown[0]!r} (available: {known})")
    try:
        if isinstance(script, str):
            name, data = _TEXT, script.encode("utf-8", "surrogateescape")
        else:
            name = os.fspath(script)
            data = read_bounded(Path(script), SUBMITTED_SCRIPT_BYTES_MAX, "the script", "")
        prepared = prepare(
            data, name, {}, arguments=tuple(arguments), directory=Path.cwd(), environment=os.environ, now=now
        )
        given = {field: _value_of(field, value) for field, value in options.items()}
        if "bbf" in given:
            given["bbf"] = read_bounded(Path(given["bbf"]), SUBMITTED_SCRIPT_BYTES_MAX, "the file", "bbf").decode()
    except Failure as failure:
        raise InvalidRequestError(INVALID_SCRIPT, failure.sentence, failure.remedy, place=failure.place) from failure
    fields = {**prepared.fields, **given}
    fields["environment"] = {**fields["environment"], **environment}
    # Values of the script alone are dropped with a warning if the site does not define them; options are not.
    fields["if_defined"] = tuple(field for field in fields["if_defined"] if field not in given)
    return SubmitRequest(command_id=command_id, user=user, **fields), prepared.warnings


def _value_of(field: str, value: Any) -> Any:
    """Return an option as the request has it.

    Raises:
        Failure: A time has no zone.
        TypeError: A text is given for a list.
    """
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            remedy = "pass for example datetime.now(timezone.utc) + timedelta(hours=1)"
            raise InvalidRequestError(INVALID_SCRIPT, f"the time {value} has no zone", remedy, place=field)
        return value.isoformat()
    if isinstance(value, Path):
        return str(value)
    if "Sequence" in str(SubmitOptions.__annotations__[field]):
        if isinstance(value, str):
            raise TypeError(f"{field} is the text {value!r}; pass a list")
        return tuple(value)
    return value

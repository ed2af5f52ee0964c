"""Files for a provider call: the job's script, the script with symbols replaced, an empty path file, and the node list.

The files are in the caller's private directory.
"""

from __future__ import annotations

import os
import re
from typing import Final

from forebay.cluster.providers.interface import OperationError, Subject
from forebay.cluster.providers.limits import PATH_FILE_BYTES_MAX, PATH_VARIABLES_MAX
from forebay.replica.grammar import DirectiveRejected, read_request
from forebay.replica.model import Provision

SCRIPT: Final = "script"
REPLACED: Final = "script.replaced"
PATHS: Final = "path"
NODES: Final = "client_nids"

NO_ARRAY_TASK: Final = 4294967294
"""Value of `%a` for a job without an array in Slurm: its NO_VAL."""

_SYMBOL: Final = re.compile(r"%[%AadjuxbB]|\\\\")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RESERVED: Final = "FOREBAY_"


def replace_symbols(script: str, subject: Subject, directives: tuple[str, ...]) -> str:
    """Replace the symbols in a script's directive lines, as documented for users.

    Directive lines start with one of `directives` and precede the first command.
    """
    lines = script.split("\n")
    for number, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            break
        if line.startswith(directives):
            lines[number] = _replace_symbols(line, subject)
    return "\n".join(lines)


def whole_script(subject: Subject, provider: str, directive: str) -> str:
    """Return the job's script with all directives; those from --bb and --bbf follow its first line, as in Slurm."""
    if not subject.directives:
        return subject.script
    try:
        own = read_request(subject.script, "", "", provider=provider, directive=directive).request
    except DirectiveRejected:
        own = None  # rejected alone, but accepted together with the other directives
    there = [] if own is None else own.text.split("\n")
    missing = [line for line in subject.directives.split("\n") if line and line not in there]
    if not missing:
        return subject.script
    lines = subject.script.split("\n")
    after = 1 if lines[0].startswith("#!") else 0
    return "\n".join([*lines[:after], *missing, *lines[after:]])


def _replace_symbols(line: str, subject: Subject) -> str:
    values = {
        "%%": "%",
        "%A": str(subject.array_job or subject.job),
        "%a": str(subject.array_task if subject.array_job else NO_ARRAY_TASK),
        "%d": subject.workdir,
        "%j": str(subject.job),
        "%u": subject.user,
        "%x": subject.name,
    }
    parts: list[str] = []
    rest = 0
    for found in _SYMBOL.finditer(line):
        parts.append(line[rest : found.start()])
        rest = found.end()
        if found.group() == "\\\\":
            break
        parts.append(values.get(found.group(), found.group()))
    return "".join(parts) + line[rest:]


def write_scripts(
    directory: str, subject: Subject, directives: tuple[str, ...], provision: Provision
) -> tuple[str, str]:
    """Write the job's script and, if symbols occur in it, a second script with the symbols replaced.

    Return both paths.
    """
    whole = whole_script(subject, provision.provider, provision.directive)
    script = _write(directory, SCRIPT, whole, 0o700)
    replaced = replace_symbols(whole, subject, directives)
    return script, script if replaced == whole else _write(directory, REPLACED, replaced, 0o700)


def write_nodes(directory: str, subject: Subject) -> str:
    """Write the names of the job's nodes, one per line; return the file's path."""
    return _write(directory, NODES, f"{subject.node}\n", 0o600)


def make_path_file(directory: str) -> str:
    """Create the empty path file; return its path."""
    return _write(directory, PATHS, "", 0o600)


def _write(directory: str, name: str, text: str, mode: int) -> str:
    path = os.path.join(directory, name)
    temporary = path + ".new"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(text.encode("utf-8", "surrogateescape"))
    os.rename(temporary, path)
    return path


def read_paths(path: str) -> tuple[tuple[str, str], ...]:
    """Return the variables in a path file, one `NAME=value` per line.

    Raises:
        OperationError: A line is invalid; the message names it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return ()
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(PATH_FILE_BYTES_MAX + 1)
    if len(data) > PATH_FILE_BYTES_MAX:
        raise OperationError("paths", f"the path file has more than {PATH_FILE_BYTES_MAX} bytes", final=True)
    try:
        lines = data.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise OperationError("paths", f"the path file is not UTF-8 at byte {error.start}", final=True) from None
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or _NAME.fullmatch(name) is None or "\0" in value:
            raise OperationError("paths", f"line {number} of the path file is not NAME=value", final=True)
        if name.startswith(_RESERVED):
            raise OperationError(
                "paths",
                f"line {number} of the path file sets {name}; names that begin with {_RESERVED} are reserved",
                final=True,
            )
        found[name] = value
    if len(found) > PATH_VARIABLES_MAX:
        raise OperationError("paths", f"the path file has more than {PATH_VARIABLES_MAX} variables", final=True)
    return tuple(found.items())

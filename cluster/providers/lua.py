"""Provider that runs a site's unmodified burst_buffer.lua.

SLURM-OBSERVED.md, section 5, lists functions, arguments and return values. Arguments added by newer Slurm releases are
passed too; a script that does not declare them ignores them.

Each call runs in a process created by `guard` and loads the script anew, as Slurm does. The interpreter has no access
to Python. Its table `slurm` has the same entries as Slurm's. Printed output is captured.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from forebay.cluster.providers import files, guard
from forebay.cluster.providers.commands import environment_for, log_output, timed_out
from forebay.cluster.providers.interface import Local, OperationError, PoolReport, Provider, Subject, parse_pools
from forebay.cluster.providers.job_table import JobContext, Value, job_table, job_text
from forebay.cluster.providers.limits import LUA_MEMORY_BYTES_MAX, RETURNED_BYTES_MAX
from forebay.cluster.providers.lua_json import json_functions
from forebay.cluster.providers.lua_modules import prepare_modules
from forebay.cluster.providers.slurm_constants import CONSTANTS, error_codes
from forebay.cluster.providers.trusted_programs import ProgramRefused, read_trusted
from forebay.cluster.system import Clock, write_all
from forebay.replica.model import Provision
from forebay.replica.values import SizeError, parse_size

PRELUDE: Final = b"""
local constants, to_json, from_json = ...
local format, select, tostring, tonumber, pcall = string.format, select, tostring, tonumber, pcall
local stderr, write = io.stderr, io.stderr.write
local function format_message(text, ...)
  if select("#", ...) > 0 then return format(text, ...) end
  local ok, plain = pcall(format, text)
  return ok and plain or tostring(text)
end
local function say(level)
  return function(...) write(stderr, level, ": ", format_message(...), "\\n") end
end
local LEVELS = {[0] = "info", "verbose", "debug", "debug2", "debug3"}
local function converter(convert)
  return function(value)
    local text, fault = convert(value)
    if fault then error(fault, 2) end
    return text
  end
end
local function without_yaml(name)
  return function() error("slurm." .. name .. " has no YAML library here: use JSON instead", 2) end
end
slurm = {
  log_error = say("error"), log_info = say("info"), log_verbose = say("verbose"), log_debug = say("debug"),
  log_debug2 = say("debug2"), log_debug3 = say("debug3"), log_debug4 = say("debug4"), log_user = say("user"),
  user_msg = say("user"), error = say("error"),
  log = function(level, ...) say(LEVELS[tonumber(level) or 0] or "debug4")(...) end,
  to_json = converter(to_json), from_json = converter(from_json),
  to_yaml = without_yaml("to_yaml"), from_yaml = without_yaml("from_yaml"),
  get_qos_priority = function(name) say("error")("Invalid QOS name: " .. tostring(name)) end,
  time_str2mins = function(text)
    text = tostring(text)
    local days, rest = text:match("^(%d+)%-(.*)$")
    local parts = {}
    for part in (rest or text):gmatch("[^:]+") do
      local number = part:match("^%d+$") and tonumber(part)
      if not number then return 4294967294 end
      parts[#parts + 1] = number
    end
    local h, m, s = 0, 0, 0
    if days then h, m, s = parts[1] or 0, parts[2] or 0, parts[3] or 0
    elseif #parts == 1 then m = parts[1]
    elseif #parts == 2 then m, s = parts[1], parts[2]
    elseif #parts == 3 then h, m, s = parts[1], parts[2], parts[3]
    else return 4294967294 end
    return ((days and tonumber(days) or 0) * 24 + h) * 60 + m + (s > 0 and 1 or 0)
  end,
}
for name, value in pairs(constants) do slurm[name] = value end
python = nil
unpack = unpack or table.unpack

local of_job
function slurm.job_info_to_string(info)
  if of_job == nil or getmetatable(info) ~= of_job then
    return slurm.ERROR, "job_info_to_string needs the job_info table of the call as its argument"
  end
  return slurm.SUCCESS, of_job._text
end
local function job_info(fields, text)
  of_job = {__index = fields, _text = text}
  return setmetatable({}, of_job)
end
local function count_and_values(...)
  local first, second = ...
  local kind = type(first)
  return select("#", ...), (kind == "number" or kind == "string") and tonumber(first) or nil, second
end
return job_info, function(called, ...) return count_and_values(called(...)) end
"""
"""Prelude of every script: the table `slurm`, whose `log_*` functions write to standard error and so to the caller's
log. Returns two functions: one creates a job table; the other calls a function and returns the number of its results,
the first as a number, and the second.
"""

POSIX: Final = b"""
local open_pipe, wait, leave = ...
local is_old = _VERSION == "Lua 5.1"
local function status(code)
  if code == nil then return nil end
  if is_old then return true end
  if code >= 0 then return code == 0 or nil, "exit", code end
  return nil, "signal", -code
end
local execute, files, pids = os.execute, getmetatable(io.stderr).__index, setmetatable({}, {__mode = "k"})
function os.execute(command)
  if command == nil then return execute() end
  local ok, how, code = execute(command)
  if is_old then return ok end
  if type(code) == "number" and code > 0 then
    return status(code % 128 == 0 and math.floor(code / 256) or -(code % 128))
  end
  return ok, how, code
end
function os.exit(code)
  if code == nil or code == true then code = 0 elseif code == false then code = 1 end
  io.stdout:flush()
  leave(math.floor(tonumber(code) or 1))
end
function io.popen(command, mode)
  mode = mode or "r"
  if mode ~= "r" and mode ~= "w" then error("bad argument #2 to 'popen' (invalid mode)", 2) end
  local path, descriptor, pid = open_pipe(tostring(command), mode)
  if not path then return nil, "popen: " .. tostring(descriptor), 12 end
  local file, why = io.open(path, mode)
  wait(-1, descriptor)
  if not file then return nil, why end
  pids[file] = pid
  return file
end
local close = files.close
function files.close(file)
  local pid = pids[file]
  if not pid then return close(file) end
  pids[file] = nil
  close(file)
  return status(wait(pid, -1))
end
local close_default = io.close
function io.close(file)
  if file == nil then return close_default() end
  return file:close()
end
"""
"""Replacements for Lua functions that do not work here: io.popen, exit codes from os.execute, and os.exit.

os.exit must not run the parent's exit handlers in the fork. `open_pipe`, `wait` and `leave` are functions of this
module. In Lua 5.1, the functions return less detail about the end of a command.
"""

_PRECOMPILED: Final = b"\x1b"

_TRACEBACK: Final = "\nstack traceback:"

_INTEGER_MAX: Final = 2**63 - 1


class LuaResult(msgspec.Struct, array_like=True):
    """Result of a Lua function, or the error that prevented it."""

    error: str = ""
    """Error that prevented a return; empty if the function returned."""
    code: int = 0
    text: str | None = None
    """Second return value, or None."""
    missing: bool = False
    """True if the script does not define the function."""


def call(
    source: bytes,
    path: str,
    function: str,
    arguments: Sequence[str],
    job: JobContext | None,
    local: Local,
    environment: Mapping[str, str],
) -> LuaResult:
    """Load the script and call the function with string arguments, followed by the job table unless `job` is None."""
    import lupa

    with lupa.allow_lua_module_loading():
        lua: Any = importlib.import_module(f"lupa.lua{local.lua_version.replace('.', '')}")
    runtime = lua.LuaRuntime(
        encoding=None,
        register_eval=False,
        register_builtins=False,
        unpack_returned_tuples=True,
        max_memory=LUA_MEMORY_BYTES_MAX,
    )
    try:
        constants = {name: _lua_value(value) for name, value in CONSTANTS.items()}
        constants |= error_codes() | {"CLUSTER_NAME": local.cluster.encode()}
        to_json, from_json = json_functions(runtime, lua.lua_type)
        named = runtime.table_from({name.encode(): value for name, value in constants.items()})
        job_info, invoke = runtime.execute(PRELUDE, named, to_json, from_json)
        runtime.execute(POSIX, _open_pipe, _wait, _leave)
        prepare_modules(runtime, local.lua_version, environment, local)
        script = strip_first_line(source)
        if script.removeprefix(b"\n").startswith(_PRECOMPILED):
            return LuaResult(error=f"{path} is precompiled Lua, which is not supported; provide the script as text")
        # Load text only: Lua does not verify precompiled code, which could corrupt this process.
        name = b"@" + os.fsencode(os.path.basename(path))
        loaded = _code(runtime.execute(script, name=name, mode=b"t"))
        if loaded:
            return LuaResult(error=f"{path} returned {loaded} when it was loaded; return nothing or slurm.SUCCESS")
        found = runtime.globals()[function.encode()]
        if lua.lua_type(found) != "function":
            return LuaResult(error=f"the function {function} is missing in {path}", missing=True)
        values: list[Any] = [argument.encode("utf-8", "surrogateescape") for argument in arguments]
        if job is not None:
            fields = {name.encode(): _lua_value(value, runtime) for name, value in job_table(job).items()}
            values.append(job_info(runtime.table_from(fields), _lua_value(job_text(job))))
        count, code, text = invoke(found, *values)
    except lua.LuaMemoryError:
        return LuaResult(error=f"the script needs more than {LUA_MEMORY_BYTES_MAX >> 20} MiB of memory")
    except lua.LuaError as error:
        return LuaResult(error=str(error).split(_TRACEBACK, 1)[0] or "an error without a message")
    return _read_result(count, code, text, function)


def _open_pipe(command: bytes, mode: bytes) -> tuple[bytes | None, int | bytes, int]:
    """Start a shell command for io.popen; return the path of its pipe, the descriptor to close afterwards, and its
    process ID.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC)
    ours, theirs, standard = (reading, writing, 1) if mode == b"r" else (writing, reading, 0)
    try:
        pid = os.posix_spawn(
            "/bin/sh", ("sh", "-c", command), os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, theirs, standard)]
        )
    except OSError as error:
        os.close(ours)
        return None, str(error.strerror).encode(), 0
    finally:
        os.close(theirs)
    return f"/proc/self/fd/{ours}".encode(), ours, pid


def _leave(code: int) -> None:
    """Exit this process, like Lua's os.exit."""
    os._exit(code & 0xFF)


def _wait(pid: int, descriptor: int) -> int | None:
    """Close a non-negative descriptor; wait for a non-negative process ID and return its exit code."""
    if descriptor >= 0:
        os.close(descriptor)
    return None if pid < 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def strip_first_line(source: bytes) -> bytes:
    """Return a script without a BOM, and with an empty first line if it begins with `#`, as in `#!/usr/bin/lua`."""
    source = source.removeprefix(b"\xef\xbb\xbf")
    return b"\n" + source.partition(b"\n")[2] if source.startswith(b"#") else source


def _lua_value(value: Value, runtime: Any = None) -> Any:
    """Convert a value of the job table for the interpreter."""
    if isinstance(value, tuple):
        return runtime.table_from([_lua_value(one) for one in value])
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return min(value, _INTEGER_MAX) if isinstance(value, int) else value


def _read_result(count: int, code: Any, second: Any, function: str) -> LuaResult:
    """Interpret return values as Slurm does.

    Without a value, the call succeeded. A number or numeric string is the code, and a string may follow.
    """
    text: str | None = None
    if count > 1:
        if isinstance(second, bool) or not isinstance(second, bytes | int | float):
            return LuaResult(error=f"{function} returned a second value that is not a string")
        raw = second if isinstance(second, bytes) else f"{second}".encode()
        if len(raw) > RETURNED_BYTES_MAX // 2:
            return LuaResult(error=f"{function} returned a string of more than {RETURNED_BYTES_MAX // 2} bytes")
        text = raw.decode("utf-8", "replace")
    if count and code is None:
        said = text or f"{function} returned a first value that is not a number; return slurm.SUCCESS or slurm.ERROR"
        return LuaResult(code=_ERROR, text=said)
    return LuaResult(code=_code(code), text=text)


_ERROR: Final = -1


def _code(value: Any) -> int:
    """Truncate a number as C does; 0 for anything else."""
    try:
        return int(value) if isinstance(value, int | float) else 0
    except (ValueError, OverflowError):
        return _ERROR


NO_POOL: Final = "(null)"
"""Pool name that is passed for a job without a pool, as in Slurm."""

BUSY: Final = "BUSY"

POLL_EXCEEDED: Final = "Poll exceeded time limit"


class LuaProvider(Provider):
    """Provider for a site's Lua script."""

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare; the script is read for each call."""
        super().__init__(provision, local, clock)
        self._local = local
        self._path = local.lua_script or provision.lua_script or local.lua_script_beside
        self._status_identity = local.status_identity
        self._environment = environment_for(local.environment)
        self._directives = (f"#{provision.directive}",)

    def process(self, subject: Subject, directory: str) -> str:
        """Call slurm_bb_job_process."""
        script, _ = self._scripts(directory, subject)
        timeout_s = self._provision.validate_timeout_s
        return self._call("process", (script, *_ids(subject)), timeout_s, subject, function="job_process") or ""

    def pools(self, directory: str) -> tuple[PoolReport, ...] | None:
        """Call slurm_bb_pools."""
        text = self._call("pools", (), self._provision.other_timeout_s)
        if not text:
            return None
        return parse_pools(text.encode("utf-8", "surrogateescape"), operation="pools", bytes_by_default=True)

    def get_status(self, arguments: tuple[str, ...], uid: int, gid: int, directory: str) -> str:
        """Call slurm_bb_get_status."""
        given = (str(uid), str(gid), *arguments) if self._status_identity else arguments
        return self._call("get_status", given, self._provision.other_timeout_s) or ""

    def setup(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_setup."""
        _, script = self._scripts(directory, subject)
        space = (subject.pool or NO_POOL, str(subject.size if subject.pool else 0))
        arguments = (str(subject.job), *_ids(subject), *space, script)
        self._call("setup", arguments, self._provision.other_timeout_s, subject)

    def data_in(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_data_in, then slurm_bb_test_data_in until it no longer returns BUSY."""
        self._move(subject, directory, "data_in", self._provision.stage_in_timeout_s)

    def real_size(self, subject: Subject, directory: str) -> int | None:
        """Call slurm_bb_real_size if the job requested space in a pool."""
        if not subject.pool or not subject.has_size:
            return None
        arguments = (str(subject.job), *_ids(subject))
        text = self._call("real_size", arguments, self._provision.stage_in_timeout_s, subject)
        if not text:
            return None
        try:
            return parse_size(text.strip())
        except SizeError as error:
            raise OperationError("real_size", f"slurm_bb_real_size did not return a size: {error.sentence}") from error

    def paths(self, subject: Subject, directory: str) -> tuple[tuple[str, str], ...]:
        """Call slurm_bb_paths and read its path file."""
        script, _ = self._scripts(directory, subject)
        path_file = files.make_path_file(directory)
        arguments = (str(subject.job), script, path_file, *_ids(subject))
        self._call("paths", arguments, self._provision.other_timeout_s, subject)
        return files.read_paths(path_file)

    def pre_run(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_pre_run."""
        script, _ = self._scripts(directory, subject)
        self._call("pre_run", _of_job(subject, script), self._provision.other_timeout_s, subject)

    def post_run(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_post_run."""
        _, script = self._scripts(directory, subject)
        self._call("post_run", _of_job(subject, script), self._provision.other_timeout_s, subject)

    def data_out(self, subject: Subject, directory: str) -> None:
        """Call slurm_bb_data_out, then slurm_bb_test_data_out until it no longer returns BUSY."""
        self._move(subject, directory, "data_out", self._provision.stage_out_timeout_s)

    def teardown(self, subject: Subject, hurry: bool, directory: str) -> None:
        """Call slurm_bb_job_teardown."""
        script, _ = self._scripts(directory, subject)
        arguments = (str(subject.job), script, "true" if hurry else "false", *_ids(subject))
        self._call("teardown", arguments, self._provision.other_timeout_s, function="job_teardown")

    def _scripts(self, directory: str, subject: Subject) -> tuple[str, str]:
        return files.write_scripts(directory, subject, self._directives, self._provision)

    def _move(self, subject: Subject, directory: str, operation: str, timeout_s: int) -> None:
        """Start a transfer and poll it every PollInterval; the stage's time limit covers both."""
        _, script = self._scripts(directory, subject)
        arguments = _of_job(subject, script)
        deadline_s = self._clock.monotonic_s() + timeout_s
        self._call(operation, arguments, timeout_s, subject)
        while True:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0:
                raise OperationError(operation, POLL_EXCEEDED)
            answer = self._call(operation, arguments, left_s, subject, function=f"test_{operation}", optional=True)
            if answer is None or answer.upper() != BUSY:  # Slurm ignores case here
                return
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s > 0:
                guard.pause(min(self._provision.poll_interval_s, left_s))

    def _call(
        self,
        operation: str,
        arguments: tuple[str, ...],
        timeout_s: float,
        subject: Subject | None = None,
        *,
        function: str = "",
        optional: bool = False,
    ) -> str | None:
        """Call the operation's function, or another function, and return its string result.

        The function receives the job table if `subject` is given. An `optional` function may be missing.

        Raises:
            OperationError: The call failed.
        """
        function = f"slurm_bb_{function or operation}"
        job = None if subject is None else JobContext(subject, self._local)
        try:
            source = read_trusted(self._path, self._local)
        except ProgramRefused as error:
            raise OperationError(operation, str(error), final=True) from error

        def perform(returned: int) -> None:
            # Remove variables that only this interpreter needs, because a site's program may also use Python.
            os.environ.clear()
            os.environ.update(self._environment)
            answer = call(source, self._path, function, arguments, job, self._local, self._environment)
            write_all(returned, msgspec.json.encode(answer))
            os._exit(0)

        try:
            finished = guard.run(perform, timeout_s=timeout_s, clock=self._clock)
        except OSError as error:
            raise OperationError(operation, f"{function} cannot be called: {error.strerror}") from error
        log_output(function, finished)
        if finished.timed_out:
            raise OperationError(operation, timed_out(timeout_s, finished))
        answer = _decode_result(finished)
        if answer is None:
            raise OperationError(operation, f"{function} {guard.describe_exit(finished.code)} before it returned")
        if answer.missing and optional:
            return None
        if answer.error:
            raise OperationError(operation, answer.error)
        if answer.code != 0:
            raise OperationError(operation, answer.text or f"{function} returned {answer.code} and no message")
        return answer.text


def _ids(subject: Subject) -> tuple[str, str]:
    return str(subject.uid), str(subject.gid)


def _of_job(subject: Subject, script: str) -> tuple[str, ...]:
    return (str(subject.job), script, *_ids(subject))


def _decode_result(finished: guard.CallResult) -> LuaResult | None:
    try:
        return msgspec.json.decode(finished.returned, type=LuaResult) if finished.code == 0 else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


PROVIDER: Final = LuaProvider

"""One call of one function of a site's burst_buffer.lua, in the process that `guard` made for it.

The script is read and loaded anew for each call, as Slurm does. It runs in an interpreter of its own that knows nothing
of Python; the table `slurm` has what Slurm's has for a burst-buffer script. What it prints is captured.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from cluster.providers.limits import LUA_MEMORY_BYTES_MAX, RETURNED_BYTES_MAX

PRELUDE: Final = b"""
local write, format, select, tostring = io.stderr.write, string.format, select, tostring
local stderr = io.stderr
local function say(level)
  return function(text, ...)
    if select("#", ...) > 0 then text = format(text, ...) end
    write(stderr, level, ": ", tostring(text), "\\n")
  end
end
slurm = {
  SUCCESS = 0, ERROR = -1, FAILURE = -1,
  log_error = say("error"), log_info = say("info"), log_verbose = say("verbose"), log_debug = say("debug"),
  log_debug2 = say("debug2"), log_debug3 = say("debug3"), log_debug4 = say("debug4"), log_user = say("user"),
  user_msg = say("user"), error = say("error"),
  log = function(level, text, ...) say("info")(text, ...) end,
  NO_VAL = 4294967294, NO_VAL64 = 18446744073709551614.0, INFINITE = 4294967295,
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
python = nil
unpack = unpack or table.unpack
"""
"""What every script finds. `slurm.log_*` write to standard error, which goes to the log of whoever made the call."""

POSIX: Final = b"""
local open_pipe, wait, leave = ...
local function status(code)
  if code == nil then return nil end
  if code >= 0 then return code == 0 or nil, "exit", code end
  return nil, "signal", -code
end
local execute, files, pids = os.execute, getmetatable(io.stderr).__index, setmetatable({}, {__mode = "k"})
function os.execute(command)
  if command == nil then return execute() end
  local ok, how, code = execute(command)
  if math.type(code) == "integer" and code > 0 then
    return status(code % 128 == 0 and code // 256 or -(code % 128))
  end
  return ok, how, code
end
function os.exit(code)
  if code == nil or code == true then code = 0 elseif code == false then code = 1 end
  io.stdout:flush()
  leave(math.tointeger(code) or 1)
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
"""What the interpreter was built without and Slurm's has: io.popen, and exit codes from os.execute. C's exit would run
what this process registered for its end, in a fork, so os.exit ends it at once. `open_pipe`, `wait` and `leave` are
functions of this module."""

_TRACEBACK: Final = "\nstack traceback:"

_INTEGER_MAX: Final = 2**63 - 1


class Returned(msgspec.Struct, array_like=True):
    """What the function returned, or why it did not."""

    error: str = ""
    """What went wrong before it returned; empty if it returned."""
    code: int = 0
    text: str | None = None
    """Its second value; None if there was none."""
    missing: bool = False
    """Whether the script has no such function."""


def call(
    source: bytes, path: str, function: str, arguments: Sequence[str], job_info: Mapping[str, str | int] | None
) -> Returned:
    """Load the script and call the function with texts, and a table after them unless `job_info` is None."""
    import lupa

    with lupa.allow_lua_module_loading():
        from lupa import lua54

    runtime = lua54.LuaRuntime(
        encoding=None,
        register_eval=False,
        register_builtins=False,
        unpack_returned_tuples=True,
        max_memory=LUA_MEMORY_BYTES_MAX,
    )
    try:
        runtime.execute(PRELUDE)
        runtime.execute(POSIX, _open_pipe, _wait, _leave)
        # Text only: precompiled code is not checked by Lua and can do anything to this process.
        runtime.execute(source, name=b"@" + os.fsencode(os.path.basename(path)), mode=b"t")
        found = runtime.globals()[function.encode()]
        if lua54.lua_type(found) != "function":
            return Returned(error=f"the function {function} is missing in {path}", missing=True)
        values: list[Any] = [argument.encode("utf-8", "surrogateescape") for argument in arguments]
        if job_info is not None:
            values.append(runtime.table_from({key.encode(): _lua_value(value) for key, value in job_info.items()}))
        returned = found(*values)
    except lua54.LuaMemoryError:
        return Returned(error=f"the script needs more than {LUA_MEMORY_BYTES_MAX >> 20} MiB of memory")
    except lua54.LuaError as error:
        return Returned(error=str(error).split(_TRACEBACK, 1)[0] or "an error that is no text")
    return _read(returned if isinstance(returned, tuple) else (returned,), function)


def _open_pipe(command: bytes, mode: bytes) -> tuple[bytes | None, int | bytes, int]:
    """Start a shell command for io.popen: the path to open its pipe by, a descriptor to close then, its process id."""
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
    """End this process with the code, as Lua's os.exit."""
    os._exit(code & 0xFF)


def _wait(pid: int, descriptor: int) -> int | None:
    """Close a descriptor that is not negative; wait for a process that is not negative and return how it ended."""
    if descriptor >= 0:
        os.close(descriptor)
    return None if pid < 0 else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _lua_value(value: str | int) -> bytes | int:
    return value.encode("utf-8", "surrogateescape") if isinstance(value, str) else min(value, _INTEGER_MAX)


def _read(values: tuple[Any, ...], function: str) -> Returned:
    """Read what was returned as Slurm does: nothing is success, a number (or its text) the code, then a text."""
    text: str | None = None
    if len(values) > 1:
        second = values[1]
        if isinstance(second, bool) or not isinstance(second, bytes | int | float):
            return Returned(error=f"{function} returned a second value that is no string")
        raw = second if isinstance(second, bytes) else f"{second}".encode()
        if len(raw) > RETURNED_BYTES_MAX // 2:
            return Returned(error=f"{function} returned a string of more than {RETURNED_BYTES_MAX // 2} bytes")
        text = raw.decode("utf-8", "replace")
    return Returned(code=_code(values[0] if values else 0), text=text)


def _code(value: Any) -> int:
    """Return the code that a first value is; one that is no number counts as success, as in Slurm."""
    try:
        if isinstance(value, bool) or not isinstance(value, bytes | int | float):
            return 0
        return int(float(value))
    except (ValueError, OverflowError):
        return 0

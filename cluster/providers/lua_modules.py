"""Lua modules of a site's script: search paths like those of the distribution's Lua, and checks of module files.

The machine's configuration selects the Lua release, because C modules are built for one release. A module file must
pass the same trust check as the script.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any, Final

from forebay.cluster.providers.interface import LUA_VERSIONS, Local
from forebay.cluster.providers.trusted_programs import ProgramRefused, check_module

LUA_DIRECTORIES: Final = ("/usr/local/share/lua", "/usr/local/lib/lua", "/usr/share/lua", "/usr/lib64/lua")
"""Directories of modules written in Lua, with a subdirectory per release: Debian's and Red Hat's."""

C_DIRECTORIES: Final = ("/usr/local/lib/lua", "/usr/lib/{multiarch}/lua", "/usr/lib64/lua", "/usr/lib/lua")
"""Directories of C modules."""

SEARCHERS: Final = b"""
local check, others = ...
local searchers, io_open, error = package.searchers or package.loaders, io.open, error
local function locate(name, path)
  name = name:gsub("%.", "/")
  for template in path:gmatch("[^;]+") do
    local path = template:gsub("%?", function() return name end)
    local file = io_open(path)
    if file then file:close() return path end
  end
end
local function checking(search, place, root)
  return function(name)
    local path = package[place]
    local file = type(path) == "string" and locate(root and name:match("^[^.]*") or name, path)
    local fault = file and check(file)
    if fault then error(fault, 0) end
    return search(name)
  end
end
searchers[2] = checking(searchers[2], "path")
searchers[3] = checking(searchers[3], "cpath")
searchers[4] = checking(searchers[4], "cpath", true)
searchers[#searchers + 1] = function(name)
  for version, path in pairs(others) do
    if locate(name, path) or locate(name:match("^[^.]*"), path) then
      return "\\n\\tthe module exists for Lua " .. version .. ": set lua_version = \\"" .. version
        .. "\\" in [provider] of forebay.toml"
    end
  end
  return ""
end
"""
"""Replacement searchers for `require` that check a file before loading it.

Parameters are the check function, and the search paths of other Lua releases, which serve to suggest another release.
"""


def prepare_modules(runtime: Any, version: str, environment: Mapping[str, str], local: Local) -> None:
    """Set the interpreter's module paths to those of the distribution's Lua of this release."""
    package = runtime.globals()[b"package"]
    package[b"path"] = search_path("LUA_PATH", default_path(version), version, environment).encode()
    package[b"cpath"] = search_path("LUA_CPATH", default_cpath(version), version, environment).encode()
    others = {
        other.encode(): f"{default_path(other)};{default_cpath(other)}".encode()
        for other in LUA_VERSIONS
        if other != version
    }
    runtime.execute(SEARCHERS, _checker(local), runtime.table_from(others))


def default_path(version: str) -> str:
    """Return the search path of modules written in Lua."""
    places = [f"{directory}/{version}" for directory in LUA_DIRECTORIES]
    return ";".join(f"{place}/{end}" for place in places for end in ("?.lua", "?/init.lua"))


def default_cpath(version: str) -> str:
    """Return the search path of C modules."""
    multiarch = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    places = [f"{directory.format(multiarch=multiarch)}/{version}" for directory in C_DIRECTORIES]
    return ";".join([*(f"{place}/?.so" for place in places), f"{places[0]}/loadall.so"])


def search_path(variable: str, default: str, version: str, environment: Mapping[str, str]) -> str:
    """Return a search path as Lua derives it from its variable, in which `;;` stands for the default path.

    Lua 5.1 has no release-specific variables.
    """
    names = (variable,) if version == "5.1" else (f"{variable}_{version.replace('.', '_')}", variable)
    found = next((environment[name] for name in names if name in environment), ";;")
    before, mark, after = found.partition(";;")
    return ";".join(part for part in (before, default, after) if part) if mark else found


def _checker(local: Local) -> Callable[[bytes], bytes | None]:
    def check(path: bytes) -> bytes | None:
        """Return the fault of a module file, or None."""
        try:
            check_module(path.decode("utf-8", "surrogateescape"), local)
        except ProgramRefused as error:
            return str(error).encode("utf-8", "surrogateescape")
        return None

    return check

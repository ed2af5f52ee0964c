"""Lua releases and modules of a site's script: search paths as in the distribution's Lua, and trust checks."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.providers import OperationError
from forebay.cluster.providers.interface import LUA_VERSIONS
from forebay.cluster.providers.limits import LUA_MEMORY_BYTES_MAX
from forebay.cluster.providers.lua_modules import default_cpath, default_path, search_path
from tests.cluster.providers.conftest import HERE, Programs
from tests.cluster.providers.test_lua import JOB, perform

DOUBLE = """
extern void lua_pushinteger(void *, {integer});
int luaopen_double_(void *L) {{ lua_pushinteger(L, 42); return 1; }}
int luaopen_double__inner(void *L) {{ lua_pushinteger(L, 43); return 1; }}
"""
INTEGERS = {"5.1": "long", "5.2": "long", "5.3": "long long", "5.4": "long long"}
"""The C type of lua_Integer in each release."""


def text_of(programs: Programs, body: str) -> str:
    """Return the text that the body of a function returns."""
    programs.script.write_text(f"function slurm_bb_setup(...)\n{body}\nend\n")
    with pytest.raises(OperationError) as raised:
        programs.provider("lua").setup(programs.subject(), str(programs.directory))
    return raised.value.message


def require(programs: Programs, name: str, field: str = "") -> str:
    """Return the text of a module, or of a field of it."""
    return text_of(programs, f"return slurm.ERROR, tostring(require('{name}'){field})")


def interpreter(version: str) -> str:
    """Return the distribution's interpreter of a release; skip the test if it is missing."""
    found = shutil.which(f"lua{version}")
    if found is None:
        pytest.skip(f"there is no program lua{version}: install the package lua{version}")
    return found


def of_distribution(version: str, expression: str) -> str:
    """Return what the distribution's Lua prints of an expression."""
    argv = [interpreter(version), "-e", f"print({expression})"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LUA_")}
    return subprocess.run(argv, capture_output=True, text=True, check=True, env=environment).stdout.strip()


# Releases of Lua -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", LUA_VERSIONS)
def test_a_script_runs_with_the_configured_lua_release(programs: Programs, version: str) -> None:
    programs.lua_version = version
    assert text_of(programs, "return slurm.ERROR, _VERSION") == f"Lua {version}"


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize("name", ["every_field.lua", "plain"])
def test_every_operation_runs_with_every_release(programs: Programs, version: str, name: str) -> None:
    programs.lua_version = version
    if name != "plain":
        shutil.copyfile(HERE / "scripts" / name, programs.script)
    lua, directory = programs.provider("lua"), str(programs.directory)
    for operation in JOB:
        perform(lua, operation, programs.subject(), directory)
    lua.real_size(programs.subject(), directory)
    assert [pool.name for pool in lua.pools(directory) or ()] == ["fast"]


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("fail:no_space", "no space"),
        ("code:3", "returned 3 and no message"),
        ("none", "returned a first value that is not a number"),
        ("raise:broken", ": broken"),
        ("leave", "ended with code 7 before it returned"),
    ],
)
def test_failures_are_the_same_with_every_release(programs: Programs, version: str, action: str, message: str) -> None:
    programs.lua_version = version
    with pytest.raises(OperationError) as raised:
        programs.provider("lua").setup(programs.subject(f"setup:{action}"), str(programs.directory))
    assert message in raised.value.message


@pytest.mark.parametrize("version", LUA_VERSIONS)
def test_memory_is_bounded_with_every_release(programs: Programs, version: str) -> None:
    programs.lua_version = version
    grown = f"return slurm.ERROR, #('x'):rep({LUA_MEMORY_BYTES_MAX + 1})"
    assert text_of(programs, grown) == f"the script needs more than {LUA_MEMORY_BYTES_MAX >> 20} MiB of memory"


@pytest.mark.parametrize("version", LUA_VERSIONS)
def test_every_release_rejects_precompiled_lua(programs: Programs, version: str) -> None:
    programs.lua_version = version
    for head in (b"", b"#!/bin/lua\n"):
        programs.script.write_bytes(head + b"\x1bLua" + bytes(40))
        with pytest.raises(OperationError, match="is precompiled Lua, which is not supported"):
            programs.provider("lua").setup(programs.subject(), str(programs.directory))


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize(
    "expression",
    [
        "os.execute('exit 3')",
        "os.execute('exit 0')",
        "os.execute('kill -9 $$')",
        "os.execute()",
        "io.popen('exit 3'):close()",
        "io.popen('true'):close()",
        "io.popen('kill -15 $$'):close()",
        "io.popen('echo read'):read()",
        "string.format('%s %5.1f', nil and 1 or 'x', 2.25)",
        "select('#', (unpack or table.unpack)({1, 2, 3}))",
    ],
)
def test_program_exits_are_reported_as_by_the_distributions_lua(
    programs: Programs, version: str, expression: str
) -> None:
    programs.lua_version = version
    each = "for i = 1, select('#', ...) do t[i] = tostring((select(i, ...))) end"
    shown = f"(function(...) local t = {{}} {each} return table.concat(t, ' ') end)"
    expected = of_distribution(version, f"{shown}({expression})")
    assert text_of(programs, f"return slurm.ERROR, {shown}({expression})") == expected


# Modules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize("kind", ["path", "cpath"])
def test_modules_are_searched_as_by_the_distributions_lua(version: str, kind: str) -> None:
    theirs = of_distribution(version, f"package.{kind}").split(";")
    ours = (default_path if kind == "path" else default_cpath)(version).split(";")
    # Relative paths depend on the directory in which the service was started.
    assert [place for place in theirs if place.startswith("/") and place not in ours] == []


@pytest.mark.parametrize("version", LUA_VERSIONS)
def test_the_search_path_matches_the_lua_release(programs: Programs, version: str) -> None:
    programs.lua_version = version
    found = text_of(programs, "return slurm.ERROR, package.path .. ' ' .. package.cpath")
    assert found == f"{default_path(version)} {default_cpath(version)}"


@pytest.mark.parametrize(
    ("environment", "version", "path"),
    [
        ({}, "5.4", "D"),
        ({"V": "/a/?.lua"}, "5.4", "/a/?.lua"),
        ({"V": "/a/?.lua;;"}, "5.4", "/a/?.lua;D"),
        ({"V": ";;/a/?.lua"}, "5.4", "D;/a/?.lua"),
        ({"V": "/a;;/b"}, "5.4", "/a;D;/b"),
        ({"V": "/a", "V_5_4": "/b"}, "5.4", "/b"),
        ({"V": "/a", "V_5_3": "/b"}, "5.4", "/a"),
        ({"V": "/a", "V_5_1": "/b"}, "5.1", "/a"),
    ],
)
def test_lua_path_variables_are_used(environment: dict[str, str], version: str, path: str) -> None:
    assert search_path("V", "D", version, environment) == path


@pytest.mark.parametrize(
    ("place", "name"), [("m.lua", "m"), ("sub/m.lua", "sub.m"), ("m/init.lua", "m"), ("a%b.lua", "a%b")]
)
def test_a_lua_module_is_found_in_the_configured_directory(
    programs: Programs, tmp_path: Path, place: str, name: str
) -> None:
    file = tmp_path / "lib" / place
    file.parent.mkdir(parents=True)
    file.write_text("return {answer = 42}\n")
    programs.variables["LUA_PATH"] = f"{tmp_path}/lib/?.lua;{tmp_path}/lib/?/init.lua;;"
    assert require(programs, name, ".answer") == "42"


def test_a_script_can_extend_its_search_path(programs: Programs, tmp_path: Path) -> None:
    (tmp_path / "mine.lua").write_text("return 7\n")
    add = f"package.path = package.path .. ';{tmp_path}/?.lua'"
    assert text_of(programs, f"{add} return slurm.ERROR, tostring(require('mine'))") == "7"


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize(("name", "value"), [("double_", "42"), ("double_.inner", "43")])
def test_a_c_module_of_the_same_release_is_loaded(
    programs: Programs, tmp_path: Path, version: str, name: str, value: str
) -> None:
    built = c_module(tmp_path, version)
    programs.lua_version = version
    programs.variables["LUA_CPATH"] = f"{built.parent}/?.so"
    assert require(programs, name) == value
    assert "no module 'double_.deeper' in file" in require(programs, "double_.deeper")


def c_module(directory: Path, version: str) -> Path:
    """Build a C module with the value 42; skip the test without a compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler: install the package gcc")
    source, built = directory / "double_.c", directory / "double_.so"
    source.write_text(DOUBLE.format(integer=INTEGERS[version]))
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(built), str(source)], check=True)
    return built


@pytest.mark.parametrize("kind", ["lua", "c"])
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("file", "others may write to {file}; run chmod go-w on it"),
        ("directory", "others may write to {directory}; run chmod go-w on it"),
        ("closed", "it is below {directory}, where this service stores data of others; move it elsewhere"),
    ],
)
def test_a_module_that_others_can_change_is_not_loaded(
    programs: Programs, tmp_path: Path, kind: str, fault: str, says: str
) -> None:
    directory = tmp_path / "lib"
    directory.mkdir()
    if kind == "lua":
        file = directory / "double_.lua"
        file.write_text("return 42\n")
        programs.variables["LUA_PATH"] = f"{directory}/?.lua"
    else:
        file = c_module(directory, "5.4")
        programs.variables["LUA_CPATH"] = f"{directory}/?.so"
    assert require(programs, "double_") == "42"
    if fault == "closed":
        programs.closed = (str(directory),)
    else:
        (file if fault == "file" else directory).chmod(0o777)
    expected = f"the Lua module {file} is not loaded: {says.format(file=file, directory=directory)}"
    assert require(programs, "double_") == expected


@pytest.mark.parametrize("kind", ["lua", "c"])
def test_a_nested_module_that_others_can_change_is_not_loaded(programs: Programs, tmp_path: Path, kind: str) -> None:
    if kind == "lua":
        file = tmp_path / "double_" / "inner.lua"
        file.parent.mkdir()
        file.write_text("return 43\n")
        programs.variables["LUA_PATH"] = f"{tmp_path}/?.lua"
    else:
        file = c_module(tmp_path, "5.4")
        programs.variables["LUA_CPATH"] = f"{tmp_path}/?.so"
    assert require(programs, "double_.inner") == "43"
    file.chmod(0o666)
    assert f"the Lua module {file} is not loaded: others may write to {file}" in require(programs, "double_.inner")


def test_a_module_with_a_relative_path_is_not_loaded(programs: Programs) -> None:
    programs.variables["LUA_PATH"] = "./proc/self/?"
    assert "the path of the Lua module ./proc/self/cmdline is not absolute" in require(programs, "cmdline")


def test_a_module_of_another_release_is_named_with_the_setting(
    programs: Programs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "5.3").mkdir()
    (tmp_path / "5.3" / "only.lua").write_text("return 5\n")
    monkeypatch.setattr("forebay.cluster.providers.lua_modules.LUA_DIRECTORIES", (str(tmp_path),))
    error = require(programs, "only")
    assert "module 'only' not found" in error
    assert 'the module exists for Lua 5.3: set lua_version = "5.3" in [provider] of forebay.toml' in error
    programs.lua_version = "5.3"
    assert require(programs, "only") == "5"
    assert "is there for" not in require(programs, "no_such_module")


@pytest.mark.parametrize("version", LUA_VERSIONS)
@pytest.mark.parametrize(("name", "package"), [("posix.unistd", "lua-posix"), ("socket", "lua-socket")])
def test_modules_of_distribution_packages_are_found(programs: Programs, version: str, name: str, package: str) -> None:
    probe = [interpreter(version), "-e", f"require('{name}')"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip(f"lua{version} has no module {name}: install the package {package}")
    programs.lua_version = version
    use = ".getpid()" if name == "posix.unistd" else "._VERSION:match('%a+')"
    found = require(programs, name, use)
    assert found.isdecimal() if name == "posix.unistd" else found == "LuaSocket"

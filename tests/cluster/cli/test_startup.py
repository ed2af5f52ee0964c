"""Deferred modules behave like loaded ones."""

import importlib
import inspect
import os
import platform
import string
import subprocess
import sys
import threading
import typing

import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.cli import startup

TEXTS = st.text(st.sampled_from("ab \t\n\f\r\x0b\u00a0\u2028"), max_size=12)


@given(TEXTS | st.text())
def test_help_is_cleaned_as_by_inspect(text: str) -> None:
    assert startup._cleandoc(text) == inspect.cleandoc(text)


def test_placeholder_attributes_equal_the_module_attributes() -> None:
    had = {(module, name): value for module, own in startup.DEFERRED.items() for name, value in own.items()}
    assert {name: had.pop(("string", name)) for name in startup.DEFERRED["string"]} == {
        name: getattr(string, name) for name in startup.DEFERRED["string"]
    }
    assert had.pop(("platform", "system"))() == platform.system()
    assert had.pop(("inspect", "cleandoc")) is startup._cleandoc
    assert had.pop(("gettext", "gettext"))("a word") == "a word"
    assert [had[("gettext", "ngettext")]("one", "several", number) for number in (0, 1, 2)] == [
        "several", "one", "several",
    ]  # fmt: skip
    del had["gettext", "ngettext"]
    assert had == {("typing_extensions", name): getattr(typing, name) for _, name in had}
    assert all(
        value is getattr(typing_extensions, name) for (_, name), value in had.items() if name != "get_type_hints"
    )


def run(program: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment
    ).stdout


@pytest.mark.parametrize("name", startup.DEFERRED)
def test_a_deferred_module_is_loaded_on_first_access(name: str) -> None:
    real = importlib.import_module(name)
    attribute = next(one for one in sorted(vars(real)) if not one.startswith("_") and one not in startup.DEFERRED[name])
    said = run(
        "import sys, importlib\n"
        "import forebay.cluster.cli.startup as startup\n"
        f"sys.modules.pop({name!r}, None)\n"
        "startup.defer_imports()\n"
        f"stand_in = importlib.import_module({name!r})\n"
        "assert isinstance(stand_in, startup._LazyModule)\n"
        f"found = stand_in.{attribute}\n"
        f"real = importlib.import_module({name!r})\n"
        "assert not isinstance(real, startup._LazyModule)\n"
        f"assert found is real.{attribute}\n"
        "print(real.__name__)\n"
    )
    assert said.strip() == name


def test_a_missing_attribute_of_a_deferred_module_raises_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = startup._LazyModule("fnmatch").no_such_name
    with pytest.raises(AttributeError):
        _ = startup._LazyModule("fnmatch").__path__


def test_concurrent_threads_load_a_deferred_module_once(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "this_is_deferred"
    began = threading.Barrier(8)
    loaded, found = [], []

    class Finder:
        def find_spec(self, wanted: str, path: object = None, target: object = None) -> object:
            if wanted != name:
                return None
            return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

        def create_module(self, spec: object) -> None:
            return None

        def exec_module(self, module: object) -> None:
            loaded.append(module)
            threading.Event().wait(0.05)
            module.value = 7  # type: ignore[attr-defined]

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    stand_in = startup._LazyModule(name)
    monkeypatch.setitem(sys.modules, name, stand_in)

    def look() -> None:
        began.wait()
        found.append(stand_in.value)

    threads = [threading.Thread(target=look) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [7] * 8 and len(loaded) == 1

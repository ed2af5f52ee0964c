"""Each rule of tests/repo/rules.py is shown what it must find, and what it must leave alone."""

import pytest

from tests.repo import rules


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.pool",
        "eval('1')",
        "import os\nos.system('true')",
        "import os as o\no.popen('true')",
        "from os import system as run\nrun('true')",
        "import subprocess\nsubprocess.run('true', shell=True)",
        "import ssl\ncontext.verify_mode = ssl.CERT_NONE",
        "from ssl import CERT_NONE\ncontext.verify_mode = CERT_NONE",
        "session.get(url, ssl=False)",
        "import asyncio\nasyncio.get_event_loop()",
        "import hashlib\nhashlib.md5(b'')",
    ],
)
def test_a_banned_name_is_found_and_its_replacement_is_given(source: str) -> None:
    [found] = rules.banned_names(rules.parse(source))
    assert "; instead: " in found


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('a')",
        "model.eval()",
        "subprocess.run(['true'], shell=False)",
        "import hashlib\nhashlib.sha256(b'')",
        "import ssl\nverify_mode = ssl.CERT_REQUIRED",
    ],
)
def test_what_only_looks_like_a_banned_name_is_left_alone(source: str) -> None:
    assert rules.banned_names(rules.parse(source)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "from time import monotonic",
        "import time as t",
        "import datetime\ndatetime.datetime.now()",
        "import datetime as d\nd.date.today()",
        "from datetime import datetime\ndatetime.utcnow()",
        "from datetime import datetime as dt\nread = dt.now",
        "def f():\n    import time",
    ],
)
def test_every_way_to_read_the_clock_is_found(source: str) -> None:
    assert rules.clock_reads(rules.parse(source))


def test_arithmetic_with_dates_reads_no_clock() -> None:
    assert rules.clock_reads(rules.parse("import datetime\ndatetime.datetime.fromtimestamp(1, tz=datetime.UTC)")) == []
    assert rules.clock_reads(rules.parse("from forebay.cluster.system.clock import Clock\nClock().now()")) == []


@pytest.mark.parametrize(
    "module", ["datetime", "os", "socket", "random", "logging", "threading", "asyncio", "aiohttp", "forebay.wal"]
)
def test_the_pure_core_may_import_only_what_is_on_its_list(module: str) -> None:
    assert rules.impure_imports(rules.parse(f"import {module}"))
    assert (
        rules.impure_imports(
            rules.parse(
                "from collections.abc import Mapping\nimport msgspec\nfrom forebay.replica.model.jobs import Job"
            )
        )
        == []
    )


def test_relative_imports_are_found() -> None:
    assert rules.relative_imports(rules.parse("from . import a"))
    assert rules.relative_imports(rules.parse("from ..wal import journal"))
    assert rules.relative_imports(rules.parse("from wal import journal")) == []


def test_forbidden_imports_are_found_by_prefix_and_exceptions_hold() -> None:
    forbidden, allowed = frozenset({"forebay.cluster", "forebay.wal"}), frozenset({"forebay.cluster.client"})

    def found(source: str) -> list[str]:
        return rules.forbidden_imports(rules.parse(source), forbidden, allowed)

    assert found("from forebay.cluster.client.client import Client") == []
    assert found("from forebay.cluster import proposer")
    assert found("import forebay.wal")
    assert found("import forebay.walrus") == []


def test_builtins_that_differ_between_two_processes_are_found() -> None:
    assert rules.calls_of(rules.parse("hash(name)"), rules.PURE_BANNED_CALLS)
    assert rules.calls_of(rules.parse("sorted(names)"), rules.PURE_BANNED_CALLS) == []
    assert rules.calls_of(rules.parse("from os import fork\nfork()"), rules.FORKING_CALLS)


def test_a_test_without_an_assertion_is_found_and_helpers_count() -> None:
    helpers = "def check(x):\n    assert x\ndef deeper(x):\n    check(x)\n"
    source = helpers + "def test_a():\n    deeper(1)\ndef test_b():\n    print(1)\n"
    code = rules.parse(source)
    [found] = rules.tests_that_prove_nothing(code, rules.proving_helpers([code]))
    assert "test_b" in found

"""What the Debian packages hold: the application in a directory of its own, units that know its exit codes, no more."""

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from forebay.cluster import serve
from forebay.cluster.agent import service as agent
from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import SERVE_MEANINGS
from forebay.cluster.config.accounts import SOCKET
from forebay.cluster.gateway import __main__ as gateway
from tests.packages.build import PYTHON_VERSION, SOURCES, SUMMARIES, build, is_supported, runtime
from tests.packages.document import USER, documented, sampled
from tests.packages.image import documented as image_commands
from tests.packages.manual import pages
from tests.repo.tree import NAME, PACKAGES, ROOT, repository_files

AT = 1_700_000_000
SERVICES = tuple(name for name in SUMMARIES if name != "forebay-client")

MAYBE_AGAIN = {serve.EXIT_OK, serve.EXIT_ADDRESS_UNUSABLE, serve.EXIT_STOPPED_ITSELF}
"""Codes of a replica after which a start may help: what holds the address ends, a disk has room again."""


class File(NamedTuple):
    """What tar says of one entry."""

    mode: int
    owner: str
    at: int
    is_directory: bool


class Package(NamedTuple):
    """What is in one package: by path, with a leading slash; and its control files."""

    path: Path
    files: dict[str, File]
    control: str


def read(path: Path) -> Package:
    data = subprocess.run(("dpkg-deb", "--fsys-tarfile", path), capture_output=True, check=True).stdout
    spooled = path.with_suffix(".tar")
    spooled.write_bytes(data)
    with tarfile.open(spooled) as found:
        files = {
            one.name.removeprefix(".").rstrip("/") or "/": File(
                one.mode, f"{one.uname}:{one.gname}", int(one.mtime), one.isdir()
            )
            for one in found.getmembers()
        }
    control = subprocess.run(("dpkg-deb", "--field", path), capture_output=True, text=True, check=True).stdout
    return Package(path, files, control)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Package]]:
    directory = tmp_path_factory.mktemp("packages")
    umask = os.umask(0o077)  # a builder's own says nothing of what is installed
    try:
        made = build(directory, directory / "work", version="1.2.3", at=AT, compression=("-Znone",))
    finally:
        os.umask(umask)
    yield {path.name.partition("_")[0]: read(path) for path in made}


pytestmark = pytest.mark.skipif(not is_supported(), reason="packages are built with Python 3.11 to 3.14")


def test_nothing_is_installed_outside_of_forebay_s_own_places(packages: dict[str, Package]) -> None:
    own = (
        "/lib/systemd/system/forebay-",
        "/usr/bin/forebay",
        "/usr/lib/forebay/",
        "/usr/lib/sysusers.d/forebay.conf",
        "/usr/lib/tmpfiles.d/forebay.conf",
        "/usr/share/bash-completion/completions/forebay",
        "/usr/share/doc/forebay-",
        "/usr/share/fish/vendor_completions.d/forebay.fish",
        "/usr/share/man/man1/forebay",
        "/usr/share/zsh/vendor-completions/_forebay",
    )
    for package in packages.values():
        strangers = [path for path, one in package.files.items() if not one.is_directory and not path.startswith(own)]
        assert strangers == [], package.path


def test_packages_contain_the_documents_examples_and_alert_rules(packages: dict[str, Package]) -> None:
    documents = "/usr/share/doc/forebay-client"
    docs = [path.relative_to("docs") for path in repository_files() if path.parts[0] == "docs"]
    expected = {f"{documents}/{path}" for path in docs if path.name != "conf.py"}
    assert {Path("index.md"), Path("examples/sum.sh")} <= set(docs)
    assert expected <= set(packages["forebay-client"].files)
    monitoring = "/usr/share/doc/forebay-controller/examples/monitoring"
    expected = {f"{monitoring}/{path.name}" for path in (ROOT / "packaging/monitoring").iterdir()}
    assert expected <= set(packages["forebay-controller"].files)


def test_files_are_root_s_nobody_else_writes_them_and_all_are_of_one_second(packages: dict[str, Package]) -> None:
    for package in packages.values():
        for path, one in package.files.items():
            assert one.owner == "root:root" and one.at == AT, path
            assert one.mode & 0o022 == 0 or one.mode == 0o777, path  # links are 0777
            assert one.mode & 0o044 == 0o044, path


def test_the_client_holds_every_file_of_the_tree_and_each_package_that_it_runs_with(
    packages: dict[str, Package],
) -> None:
    site = f"/usr/lib/forebay/lib/python{PYTHON_VERSION}/site-packages/"
    files = packages["forebay-client"].files
    expected = {f"{site}{NAME}/{path}" for path in repository_files() if path.parts[0] in PACKAGES}
    assert (expected | {f"{site}{NAME}/__init__.py"}) - files.keys() == set()
    names = {found.metadata["Name"].lower() for found in runtime()}
    assert {"aiohttp", "cryptography", "lmdb", "msgspec", "pysyncobj", "uvloop"} <= names
    assert not names & {"pytest", "mypy", "hypothesis", "ruff", "hatchling", "setuptools", "pip"}
    tag = sys.implementation.cache_tag
    uncompiled = [
        path for path in files
        if path.startswith(site) and path.endswith(".py")
        and f"{os.path.dirname(path)}/__pycache__/{os.path.basename(path)[:-3]}.{tag}.pyc" not in files
    ]  # fmt: skip
    assert uncompiled == [], "a service that may not write there would compile it at each start"


def test_two_builds_are_the_same_byte_for_byte(packages: dict[str, Package], tmp_path: Path) -> None:
    plain = ("-Znone",)
    built = build(tmp_path, tmp_path / "elsewhere", version="1.2.3", at=AT, only=SERVICES, compression=plain)
    for path in built:
        assert path.read_bytes() == packages[path.name.partition("_")[0]].path.read_bytes()


def test_the_services_need_the_client_of_their_own_version(packages: dict[str, Package]) -> None:
    for name in SERVICES:
        assert "forebay-client (= 1.2.3)" in packages[name].control
    major, minor = sys.version_info[:2]
    control = packages["forebay-client"].control
    assert f"python3 (>= {major}.{minor}), python3 (<< {major}.{minor + 1})" in control


def setting(unit: str, key: str) -> list[str]:
    text = (SOURCES / f"{unit}@.service").read_text()
    return [word for line in re.findall(rf"^{key}=(.*)$", text, re.MULTILINE) for word in line.split()]


def test_a_replica_is_not_started_again_after_exactly_the_codes_that_no_start_helps_against() -> None:
    codes = {value for name, value in vars(serve).items() if name.startswith("EXIT_")}
    assert codes == set(SERVE_MEANINGS)
    assert {int(word) for word in setting("forebay-controller", "RestartPreventExitStatus")} == codes - MAYBE_AGAIN


STUBS = {
    "systemctl": 'case $1 in list-units) printf "%s loaded active running\\n" {units} ;; esac',
    "deb-systemd-invoke": "echo $2 >> restarted; case $2 in *@{fails}.*) exit 1 ;; esac",
    "timeout": 'shift; exec "$@"',
    "sleep": ":",
    "runuser": 'shift 3; exec "$@"',
    "date": "echo . >> looks; echo $(($(wc -l < looks) * 10))",
    "forebay": 'case $4 in {unready}) echo "{{\\"ready\\": false}}" ;; *) echo "{{\\"ready\\": true}}" ;; esac',
}
"""Programs in the place of those of a machine that runs systemd, for the script of a package."""


@pytest.mark.parametrize(
    ("service", "fails", "unready", "code", "restarted"),
    [
        ("controller", "none", "none", 0, ["r1", "r2", "r3"]),
        ("controller", "r2", "none", 1, ["r1", "r2"]),
        ("controller", "none", "r1", 1, ["r1"]),
        ("agent", "r1", "none", 0, ["r1", "r2", "r3"]),
    ],
)
def test_an_upgrade_stops_at_the_first_replica_that_does_not_come_back(
    tmp_path: Path, service: str, fails: str, unready: str, code: int, restarted: list[str]
) -> None:
    package = f"forebay-{service}"
    units = " ".join(f"{package}@{name}.service" for name in ("r1", "r2", "r3"))
    for name, text in STUBS.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!/bin/sh\n{text.format(units=units, fails=fails, unready=unready)}\n")
        program.chmod(0o755)
    script = (SOURCES / "service.postinst").read_text().replace("/run/systemd/system", str(tmp_path))
    script = script.replace("@UNIT@", package).replace("@PACKAGE@", package)
    done = subprocess.run(
        ("/bin/sh", "-c", script, "postinst", "configure", "0.9.0"),
        cwd=tmp_path, env={"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    told = (tmp_path / "restarted").read_text().split()
    assert (done.returncode, told) == (code, [f"{package}@{name}.service" for name in restarted]), done.stderr
    assert ("dpkg --configure -a" in done.stderr) is bool(code)


@pytest.mark.parametrize("unit", SERVICES)
def test_reload_sends_sighup_to_the_main_process(unit: str) -> None:
    assert setting(unit, "ExecReload") == ["/bin/sh", "-c", '"kill', "-HUP", '$MAINPID"']


def test_only_a_replica_comes_before_other_services() -> None:
    """A unit without the setting has the weight 100."""
    for unit in SERVICES:
        for name in ("CPUWeight", "IOWeight"):
            assert setting(unit, name) == (["500"] if unit == "forebay-controller" else []), (unit, name)


def test_an_agent_is_not_started_again_after_exactly_the_codes_that_no_start_helps_against() -> None:
    codes = {value for name, value in vars(agent).items() if name.startswith("EXIT_")}
    stays = {int(word) for word in setting("forebay-agent", "RestartPreventExitStatus")}
    assert stays == codes - {agent.EXIT_OK, agent.EXIT_FAILED}


def test_a_gateway_is_not_started_again_after_exactly_the_codes_that_no_start_helps_against() -> None:
    codes = {value for name, value in vars(gateway).items() if name.startswith("EXIT_")}
    stays = {int(word) for word in setting("forebay-gateway", "RestartPreventExitStatus")}
    assert stays == codes - {gateway.EXIT_OK, gateway.EXIT_FAILED}


def test_a_gateway_s_unit_makes_the_directory_of_the_socket_that_clients_look_for() -> None:
    [directory] = setting("forebay-gateway", "RuntimeDirectory")
    assert Path("/run", directory) == SOCKET.parent


def test_units_wait_for_their_processes_watch_them_and_leave_scripts_alone() -> None:
    for unit in SERVICES:
        assert setting(unit, "Type") == ["notify"] and setting(unit, "Restart") == ["always"]
        [home, *words] = setting(unit, "ExecStart")
        assert home == "/usr/lib/forebay/bin/python" and words[0] == "-I" and "/etc/forebay/forebay.toml" in words
    for unit in ("forebay-controller", "forebay-agent"):
        assert int(setting(unit, "WatchdogSec")[0]) >= 30
    assert setting("forebay-agent", "KillMode") == ["process"] and setting("forebay-agent", "Delegate") == ["yes"]
    assert setting("forebay-agent", "OOMPolicy") == ["continue"], "a job out of memory would end all jobs of its node"
    assert setting("forebay-controller", "User") == ["forebay"]


def test_an_agent_s_unit_keeps_from_jobs_nothing_that_a_login_has() -> None:
    text = (SOURCES / "forebay-agent@.service").read_text()
    kept = ("Protect", "Private", "RestrictA", "RestrictN", "RestrictS", "SystemCall", "NoNewPrivileges", "MemoryDeny")
    assert [line for line in text.splitlines() if line.startswith((*kept, "ReadOnly", "Inaccessible"))] == []


def test_each_command_has_a_page_that_man_can_read(packages: dict[str, Package]) -> None:
    found = dict(pages("1.2.3", "2026-01-31"))
    assert set(found) == {"forebay", *(f"forebay-{name}" for name in cli.commands)}
    installed = {path for path in packages["forebay-client"].files if path.startswith("/usr/share/man/man1/forebay")}
    assert installed == {f"/usr/share/man/man1/{name}.1.gz" for name in found}
    for name, text in found.items():
        assert text.startswith('.TH "') and "\n.SH SYNOPSIS\n" in text, name
        requests = {line.split()[0] for line in text.splitlines() if line[:1] in (".", "'")}
        assert requests <= {".TH", ".SH", ".B", ".BR", ".TP", ".PP", ".I"}, f"{name}: a line of text is a request"
    assert "earlier incarnation of the cluster" in found["forebay-run"]


def test_the_document_has_whole_statements_for_each_way_that_is_typed() -> None:
    blocks = {name: [*documented(name)] for name in ("one machine", "three machines", "first drill")}
    assert all(blocks.values())
    one = [typed.text for typed in blocks["one machine"] if typed.user == USER]
    assert one[0].startswith("cd ") and "grep 42" in one[-1], "the first job is a user's"
    loops = [typed.text for typed in blocks["three machines"] if typed.text.startswith("for ")]
    assert len(loops) == 2 and all(text.endswith("\ndone") for text in loops)
    assert {"Writes stopped", "Acknowledged writes lost"} <= set(sampled("first drill"))


def test_the_head_of_the_image_s_definition_has_what_its_check_types() -> None:
    image, founding, serving, asking = image_commands()
    assert image[:2] == ["podman", "build"] and founding[founding.index("forebay") + 1 :][:2] == ["cluster", "init"]
    assert serving.count("r1") == 2 and serving[-4:] == ["run", "replica", "--name", "r1"]
    assert asking[:2] == ["podman", "exec"] and "operator" in asking and "r1" in asking

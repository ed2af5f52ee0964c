"""Debian packages from the tree: forebay-client, which has the application, and forebay-controller, -agent, -gateway.

The application is a directory of its own, /usr/lib/forebay, laid out as a virtual environment: Debian's interpreter,
and beside it what requirements.lock pins. `scripts/setup` installs that with its hashes checked; here each file is
held once more against the digest in its RECORD. All three machines need the command, so the package that has it is the
one that the others depend on, and nothing is carried thrice.

`dpkg-deb` alone makes them: debhelper would add its helpers for Python, which is what must not happen to this tree,
and a dozen build dependencies for four lists of files. Two builds of one tree are the same byte for byte.
"""

import argparse
import base64
import compileall
import gzip
import hashlib
import os
import py_compile
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packages.manual import pages
from tests.repo.tree import NAME, PACKAGES, ROOT, repository_files

HOME: Final = Path("usr/lib/forebay")
PYTHON_VERSION: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
"""The interpreter that the packages are for: that of .venv, which must be the distribution's own."""

SITE: Final = HOME / f"lib/python{PYTHON_VERSION}/site-packages"
UNITS: Final = Path("lib/systemd/system")
SOURCES: Final = ROOT / "packaging" / "debian"
MAINTAINER: Final = "The Forebay authors <forebay@localhost>"

PYTHONS: Final = ((3, 11), (3, 14))
"""The oldest and the newest interpreter supported: Debian 12 has the first, 13 has 3.13, sid the last."""

SUMMARIES: Final = {
    "forebay-client": "command line of Forebay, and the application that its services run",
    "forebay-controller": "replica of Forebay's controller, as a service",
    "forebay-agent": "agent of Forebay on a node, as a service",
    "forebay-gateway": "gateway of Forebay for the users of a login node, as a service",
}
DESCRIPTION: Final = """\
 Forebay is a highly available burst-buffer controller: it gives out space on
 fast storage, has agents stage files there before a job and home after it, and
 keeps every event in a ledger that its replicas agree on by Raft.
"""
COMPRESSION: Final = ("-Zxz", "-z2")
"""How dpkg-deb compresses: xz at its own default takes six times as long for a fifth less."""

DEPENDS: Final = f"python3 (>= {PYTHON_VERSION}), python3 (<< 3.{sys.version_info.minor + 1}), libc6 (>= 2.34)"
"""What is installed has compiled modules, so it is for one interpreter: each suite has a build of its own."""


ALL: Final = "all"
"""Extra of Forebay that the packages have."""


class BuildRefused(Exception):
    """The packages cannot be built from this; a sentence with the remedy."""


def is_supported() -> bool:
    """Return whether packages can be built for the interpreter that runs."""
    return PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]


def runtime(root: str = "forebay", extra: str = ALL, *, itself: bool = False) -> list[Distribution]:
    """Return what the application needs when it runs, by name: not what builds or tests it."""
    todo, found, seen = [(root, extra)], dict[str, Distribution](), set[tuple[str, str]]()
    while todo:
        name, named = canonicalize_name(todo[-1][0]), todo.pop()[1]
        if (name, named) in seen:
            continue
        seen.add((name, named))
        found[name] = distribution(name)
        for one in (Requirement(text) for text in found[name].requires or ()):
            if one.marker is None or one.marker.evaluate({"extra": named}):
                todo += [(one.name, wanted) for wanted in ("", *one.extras)]
    if not itself:
        del found[canonicalize_name(root)]
    return [found[name] for name in sorted(found)]


def install(found: Distribution, site: Path) -> None:
    """Copy one distribution, without its commands; BuildRefused where a file is not the one that was installed."""
    for file in found.files or ():
        if (
            ".." in file.parts
            or file.suffix == ".pyc"
            or file.name in ("RECORD", "direct_url.json", "INSTALLER", "REQUESTED")
        ):
            continue
        data = Path(str(file.locate())).read_bytes()
        if file.hash is not None:
            digest = base64.urlsafe_b64encode(hashlib.new(file.hash.mode, data).digest()).rstrip(b"=").decode()
            if digest != file.hash.value:
                raise BuildRefused(f"{file.locate()} was changed since it was installed; run scripts/setup --force")
        _write(site / file, data)


def application(tree: Path, version: str) -> None:
    """Lay out /usr/lib/forebay below `tree`."""
    site = tree / SITE
    for found in runtime():
        install(found, site)
    for path in repository_files():
        if path.parts[0] in PACKAGES:
            _write(site / NAME / path, (ROOT / path).read_bytes())
    _write(site / NAME / "__init__.py", (ROOT / NAME / "__init__.py").read_bytes())
    released = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    information = site / f"forebay-{released}.dist-info"
    _write(information / "METADATA", f"Metadata-Version: 2.1\nName: forebay\nVersion: {released}\n".encode())
    _write(information / "entry_points.txt", b"[console_scripts]\nforebay = forebay.cluster.cli:main\n")
    _write(tree / HOME / "pyvenv.cfg", b"home = /usr/bin\ninclude-system-site-packages = false\n")
    (tree / HOME / "bin").mkdir(parents=True)
    (tree / HOME / "bin/python").symlink_to("/usr/bin/python3")
    # -I: neither the present directory nor a variable of the caller's says what is imported.
    command = "#!/usr/lib/forebay/bin/python -I\nfrom forebay.cluster.cli import main\n\nmain()\n"
    _write(tree / HOME / "bin/forebay", command.encode(), 0o755)
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/forebay").symlink_to("../lib/forebay/bin/forebay")
    compileall.compile_dir(
        site, quiet=1, stripdir=str(tree), prependdir="/",
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def client(tree: Path, version: str, date: str) -> None:
    """Lay out forebay-client: the application, its pages for man(1), and what shells complete."""
    application(tree, version)
    for name, text in pages(version, date):
        _write(tree / f"usr/share/man/man1/{name}.1.gz", _zipped(text.encode()))
    for shell, place in (
        ("bash", "bash-completion/completions/forebay"),
        ("zsh", "zsh/vendor-completions/_forebay"),
        ("fish", "fish/vendor_completions.d/forebay.fish"),
    ):
        words = (sys.executable, "-m", "forebay.cluster.cli", "support", "completion", shell)
        script = subprocess.run(words, cwd=ROOT, capture_output=True, check=True).stdout
        _write(tree / "usr/share" / place, script)
    _write(tree / "usr/lib/tmpfiles.d/forebay.conf", (SOURCES / "forebay.tmpfiles").read_bytes())
    for directory in ("etc/forebay", "var/lib/forebay"):
        (tree / directory).mkdir(parents=True)


def service(tree: Path, package: str) -> None:
    """Lay out a package of a service: its unit, and for the controller its account."""
    _write(tree / UNITS / f"{package}@.service", (SOURCES / f"{package}@.service").read_bytes())
    if package == "forebay-controller":
        _write(tree / "usr/lib/sysusers.d/forebay.conf", (SOURCES / "forebay.sysusers").read_bytes())
    for script in ("postinst", "prerm", "postrm"):
        text = (SOURCES / f"service.{script}").read_text()
        text = text.replace("@UNIT@", package).replace("@PACKAGE@", package)
        _write(tree / "DEBIAN" / script, text.encode(), 0o755)


def build(
    output: Path,
    work: Path,
    *,
    version: str,
    at: int,
    only: Iterable[str] = tuple(SUMMARIES),
    compression: tuple[str, ...] = COMPRESSION,
) -> list[Path]:
    """Build the four packages, or `only` some, into `output`; `at` is the second of all their files."""
    if not is_supported():
        raise BuildRefused(f"packages are built with Python 3.11 to 3.14, and .venv has {sys.version.split()[0]}")
    date = datetime.fromtimestamp(at, UTC)
    made = []
    for package in only:
        tree = work / package
        shutil.rmtree(tree, ignore_errors=True)
        tree.mkdir(parents=True)
        if package == "forebay-client":
            client(tree, version, f"{date:%Y-%m-%d}")
        else:
            service(tree, package)
        change = (
            f"forebay ({version}) unstable; urgency=medium\n\n  * CHANGELOG.md has what is new.\n\n -- {MAINTAINER}  "
        )
        documents = tree / "usr/share/doc" / package
        stamp = f"{date:%a, %d %b %Y %H:%M:%S} +0000"
        _write(documents / "changelog.gz", _zipped(f"{change}{stamp}\n".encode()))
        _write(documents / "copyright", (SOURCES / "copyright").read_bytes())
        for name, source in _documents(package):
            _write(documents / name, source.read_bytes())
        architecture = _architecture() if package == "forebay-client" else "all"
        needs = (
            DEPENDS if package == "forebay-client" else f"forebay-client (= {version}), systemd, init-system-helpers"
        )
        size = sum(path.lstat().st_size for path in tree.rglob("*") if path.is_file()) // 1024
        control = (
            f"Package: {package}\nSource: forebay\nVersion: {version}\nArchitecture: {architecture}\n"
            f"Maintainer: {MAINTAINER}\nInstalled-Size: {size}\nDepends: {needs}\nSection: admin\nPriority: optional\n"
            f"Description: {SUMMARIES[package]}\n{DESCRIPTION}"
        )
        _write(tree / "DEBIAN/control", control.encode())
        _write(tree / "DEBIAN/md5sums", "".join(_digests(tree)).encode())
        for path in (tree, *tree.rglob("*")):
            if path.is_dir():
                path.chmod(0o755)
            elif path.suffix == ".pyc":
                path.chmod(0o644)  # whatever the umask is
            os.utime(path, (at, at), follow_symlinks=False)
        target = output / f"{package}_{version}_{architecture}.deb"
        words = ("dpkg-deb", "--root-owner-group", *compression, "--build", str(tree), str(target))
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(at)}
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=environment)
        made.append(target)
    return made


def _documents(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the documents of a package: path below its directory in /usr/share/doc, and the source file."""
    folders = {
        "forebay-client": ("docs", "."),
        "forebay-controller": ("packaging/monitoring", "examples/monitoring"),
    }
    if package in folders:
        folder, target = folders[package]
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix not in (".py", ".pyc"):  # not the configuration of Sphinx
                yield f"{target}/{path.relative_to(ROOT / folder)}", path


def _architecture() -> str:
    words = ("dpkg", "--print-architecture")
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def _digests(tree: Path) -> Iterator[str]:
    for path in sorted(tree.rglob("*")):
        name = path.relative_to(tree)
        if path.is_file() and not path.is_symlink() and name.parts[0] != "DEBIAN":
            yield f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {name}\n"


def _zipped(data: bytes) -> bytes:
    return gzip.compress(data, 9, mtime=0)


def _write(path: Path, data: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def committed_at() -> int:
    """Return when the tree was committed, seconds; SOURCE_DATE_EPOCH if it is set."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given is not None:
        return int(given)
    words = ("git", "-C", str(ROOT), "log", "-1", "--format=%ct")
    return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    """Build what the command line asks for."""
    released = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    parser = argparse.ArgumentParser(prog="scripts/package", description="Build packages for this machine's Debian.")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="where the packages are put")
    parser.add_argument("--version", default=released, help="of the packages, for Debian")
    chosen = parser.parse_args()
    output: Path = chosen.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    work = output / "packages.tmp"
    try:
        for path in build(output, work, version=chosen.version, at=committed_at()):
            print(path)
    except BuildRefused as error:
        print(f"scripts/package: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

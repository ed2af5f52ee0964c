"""Laws that each adapter keeps, on programs and attributes that answer as documented."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay.cluster.agent.adapters import (
    BAD_OUTPUT,
    EXIT_CODE,
    NOT_APPLIED,
    NOT_INSTALLED,
    UNUSABLE,
    AdapterFailed,
    BufferLimit,
    QuotaAdapter,
    QuotaUsage,
    Stripes,
    Tools,
    cephfs,
    layout_adapter,
    quota_adapter,
    registry,
)
from forebay.cluster.agent.adapters.gpfs import fileset_of
from forebay.cluster.agent.files import capacity
from forebay.cluster.system import closing, open_directory
from forebay.replica.model import LAYOUT_NONE, LAYOUTS, QUOTA_AUTO, QUOTA_NONE, QUOTAS
from tests.cluster.agent.adapters.fakes import BEEGFS, BEEGFS_CTL, GPFS, GPFS_PROGRAMS, LFS, FakePrograms

MIB = 1024**2

COMMAND = """
limits = state.setdefault("limits", {})
operation, path = words
request = json.load(sys.stdin)
assert request["version"] == 1
if operation == "apply":
    fields = ("size_bytes", "inodes")
    limits.setdefault(path, {}).update({key: request[key] for key in fields if request[key] is not None})
elif operation == "usage":
    size, count = used(path)
    print(json.dumps({"size_bytes": size, "inodes": count, "size_limit_bytes": limits[path]["size_bytes"]}))
elif operation == "remove":
    limits.pop(path, None)
elif operation == "layout":
    state["layout"] = [request["stripe_count"], request["stripe_bytes"], request["pool"]]
if operation != "usage":
    print("{}")
keep()
"""


class Attributes:
    """Extended attributes of CephFS in memory. Layout and quota cannot be listed, as on CephFS."""

    def __init__(self) -> None:
        self.values: dict[tuple[int, str], bytes] = {}

    def set(self, directory: int, name: str, value: bytes) -> None:
        self.values[os.fstat(directory).st_ino, name] = value

    def get(self, directory: int, name: str) -> bytes:
        if name == cephfs.USED_BYTES:
            files = (os.path.join(at, one) for at, _, names in os.walk(f"/proc/self/fd/{directory}/.") for one in names)
            return str(sum(os.lstat(one).st_size for one in files)).encode()
        if name == cephfs.USED_ENTRIES:
            return b"1"
        try:
            return self.values[os.fstat(directory).st_ino, name]
        except KeyError:
            raise OSError(errno.ENODATA, "no such attribute") from None


@pytest.fixture
def attributes(monkeypatch: pytest.MonkeyPatch) -> Attributes:
    kept = Attributes()
    monkeypatch.setattr(cephfs.os, "setxattr", kept.set)
    monkeypatch.setattr(cephfs.os, "getxattr", kept.get)
    return kept


def _lustre(programs: FakePrograms) -> Tools:
    programs.write("lfs", LFS)
    return programs.tools()


def _beegfs(programs: FakePrograms) -> Tools:
    programs.write("beegfs", BEEGFS)
    return programs.tools(quota_groups=(2_000_000, 2_000_009))


def _beegfs_7(programs: FakePrograms) -> Tools:
    programs.write("beegfs-ctl", BEEGFS_CTL)
    return programs.tools(quota_groups=(2_000_000, 2_000_009))


def _gpfs(programs: FakePrograms) -> Tools:
    for name in GPFS_PROGRAMS:
        programs.write(name, GPFS)
    return programs.tools()


def _command(programs: FakePrograms) -> Tools:
    return programs.tools(command=str(programs.write("site-quota", COMMAND)))


def _cephfs(programs: FakePrograms) -> Tools:
    return programs.tools()


KINDS: dict[str, tuple[str, Callable[[FakePrograms], Tools]]] = {
    "lustre": ("lustre", _lustre),
    "cephfs": ("cephfs", _cephfs),
    "beegfs": ("beegfs", _beegfs),
    "beegfs-7": ("beegfs", _beegfs_7),
    "gpfs": ("gpfs", _gpfs),
    "command": ("command", _command),
}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="groups of buffers need root")


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, programs: FakePrograms, attributes: Attributes) -> tuple[str, Tools]:
    if request.param.startswith("beegfs") and os.geteuid() != 0:
        pytest.skip("groups of buffers need root")
    word, prepare = KINDS[request.param]
    return word, prepare(programs)


def test_each_word_of_the_configuration_has_an_adapter() -> None:
    assert set(registry._QUOTAS) == set(QUOTAS) - {QUOTA_AUTO, QUOTA_NONE}
    assert set(registry._LAYOUTS) == set(LAYOUTS) - {LAYOUT_NONE}
    assert all(quota_adapter(word, Tools()).word == word for word in registry._QUOTAS)
    assert all(layout_adapter(word, Tools()).word == word for word in registry._LAYOUTS)


def test_a_buffer_is_created_limited_measured_and_removed(kind: tuple[str, Tools], parent: int) -> None:
    word, tools = kind
    control = capacity.find_control(parent, word, tools).word
    assert control == word
    for seed in ("first", "second"):
        capacity.make(parent, seed, control, 4 * MIB, tools)
        with pytest.raises(FileExistsError):
            capacity.make(parent, seed, control, 4 * MIB, tools)
        with closing(open_directory(seed, dir_fd=parent)) as directory:
            assert os.fstat(directory).st_mode & 0o777 == 0o700
            for _ in range(2):
                capacity.hold(directory, control, seed, 4 * MIB, tools)
                capacity.hold_inodes(directory, control, seed, 100, tools)
            before = quota_adapter(word, tools).usage(directory).size_bytes
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=directory))
            with open(f"/proc/self/fd/{directory}/file", "wb") as file:
                file.write(b"x" * MIB)
            used = quota_adapter(word, tools).usage(directory)
            # BeeGFS collects usage only now and then.
            assert used.size_bytes - before == (0 if word == "beegfs" else MIB)
    capacity.remove(parent, "first", shown="first", quota=word, tools=tools)
    os.unlink("second/file", dir_fd=parent)
    capacity.remove_empty(parent, "second", shown="second", quota=word, tools=tools)
    for name in ("first", "second"):
        with pytest.raises(FileNotFoundError):
            os.stat(name, dir_fd=parent)
        # Once more, as a repeated operation does.
        capacity.remove(parent, name, shown=name, quota=word, tools=tools)


def test_nothing_is_left_in_the_state_of_a_removed_buffers_program(kind: tuple[str, Tools], parent: int) -> None:
    word, tools = kind
    adapter = quota_adapter(word, tools)
    adapter.create(parent, "7")
    with closing(open_directory("7", dir_fd=parent)) as directory:
        adapter.apply(directory, "seed", BufferLimit(MIB, 10))
        handle = adapter.find(parent, "7")
        assert handle or word == "cephfs"
    capacity.remove(parent, "7", shown="7", quota=word, tools=tools)
    adapter.create(parent, "8")
    with closing(open_directory("8", dir_fd=parent)) as directory:
        # The same seed gets the same ID, because the first buffer's is free again.
        adapter.apply(directory, "seed", BufferLimit(MIB, 10))
    if word in ("lustre", "beegfs"):
        assert adapter.find(parent, "8") == handle


def test_two_buffers_with_the_same_seed_never_share_an_id(programs: FakePrograms, parent: int) -> None:
    adapter = quota_adapter("lustre", _lustre(programs))
    found = set()
    for name in ("a", "b", "c"):
        adapter.create(parent, name)
        with closing(open_directory(name, dir_fd=parent)) as directory:
            adapter.apply(directory, "seed", BufferLimit(MIB))
        found.add(adapter.find(parent, name))
    assert len(found) == 3 and all(int(one) >= 1 << 30 for one in found)


def test_an_id_of_the_site_is_replaced_and_never_released(programs: FakePrograms, parent: int, tmp_path: Path) -> None:
    tools = _lustre(programs)
    programs.state.write_text(f'{{"ids": {{"{tmp_path}/fs/7": 42}}}}')
    os.mkdir("7", dir_fd=parent)
    adapter = quota_adapter("lustre", tools)
    assert adapter.find(parent, "7") == ""
    with closing(open_directory("7", dir_fd=parent)) as directory:
        assert adapter.usage(directory) == QuotaUsage(0, 0)
        adapter.apply(directory, "seed", BufferLimit(MIB))
    assert int(adapter.find(parent, "7")) >= 1 << 30


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("print('garbage')", BAD_OUTPUT),
        ("", BAD_OUTPUT),
        ("print('/fs [12] 0 5 - [3] 0 0 -')", BAD_OUTPUT),
        ("print('/fs x 0 5 - 3 0 0 -')", BAD_OUTPUT),
        ("sys.exit('lfs: quota: Operation not permitted')", EXIT_CODE),
    ],
)
def test_an_lfs_that_prints_something_else_is_reported(
    programs: FakePrograms, parent: int, said: str, code: str
) -> None:
    programs.write("lfs", f"if words[0] == 'project':\n    print('1073741824 P /fs/7')\nelse:\n    {said or 'pass'}\n")
    os.mkdir("7", dir_fd=parent)
    adapter = quota_adapter("lustre", programs.tools())
    assert adapter.check(parent)
    with closing(open_directory("7", dir_fd=parent)) as directory, pytest.raises(AdapterFailed) as caught:
        adapter.usage(directory)
    assert caught.value.code == code


def _lying(word: str, programs: FakePrograms) -> Tools:
    """FakePrograms that accept each limit and keep none."""
    if word == "lustre":
        programs.write("lfs", LFS.replace("found.update(", "dict("))
    elif word == "beegfs":
        programs.write("beegfs", BEEGFS.replace("= [space, inode]", "= ['1', '1']"))
    elif word == "gpfs":
        for name in GPFS_PROGRAMS:
            programs.write(name, GPFS.replace('fileset["block"] = int', "int"))
    else:
        program = programs.write("site-quota", COMMAND.replace('limits[path]["size_bytes"]', "7"))
        return programs.tools(command=str(program))
    return programs.tools(quota_groups=(2_000_000, 2_000_009))


@needs_root
@pytest.mark.parametrize("word", ["lustre", "beegfs", "gpfs", "command"])
def test_a_limit_that_the_filesystem_does_not_report_is_a_failure(
    programs: FakePrograms, parent: int, word: str
) -> None:
    adapter = quota_adapter(word, _lying(word, programs))
    adapter.create(parent, "7")
    with closing(open_directory("7", dir_fd=parent)) as directory, pytest.raises(AdapterFailed) as caught:
        adapter.apply(directory, "seed", BufferLimit(MIB))
    assert caught.value.code == NOT_APPLIED


def test_a_ceph_client_that_drops_a_quota_or_may_not_set_it_is_reported(
    parent: int, attributes: Attributes, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = quota_adapter("cephfs", Tools())
    monkeypatch.setattr(cephfs.os, "setxattr", lambda *_: None)
    with pytest.raises(AdapterFailed) as dropped:
        adapter.apply(parent, "", BufferLimit(MIB))
    assert dropped.value.code == NOT_APPLIED

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(cephfs.os, "setxattr", refuse)
    with pytest.raises(AdapterFailed) as refused:
        adapter.apply(parent, "", BufferLimit(MIB))
    assert refused.value.code == UNUSABLE and "rwp" in str(refused.value)


def test_another_filesystem_is_no_cephfs(parent: int) -> None:
    assert "mount CephFS" in quota_adapter("cephfs", Tools()).check(parent)


@pytest.mark.parametrize("word", ["lustre", "beegfs", "gpfs", "command"])
def test_missing_tools_are_named(programs: FakePrograms, parent: int, word: str) -> None:
    tools = programs.tools(quota_groups=(2_000_000, 2_000_009))
    with pytest.raises(AdapterFailed) as caught:
        capacity.find_control(parent, word, tools)
    assert caught.value.code == UNUSABLE
    adapter: QuotaAdapter = quota_adapter(word, tools)
    with pytest.raises(AdapterFailed) as missing:
        adapter.apply(parent, "", BufferLimit(MIB))
    assert missing.value.code == NOT_INSTALLED


@needs_root
def test_a_beegfs_without_groups_for_buffers_is_refused(programs: FakePrograms, parent: int) -> None:
    programs.write("beegfs", BEEGFS)
    assert "quota_groups" in quota_adapter("beegfs", programs.tools()).check(parent)


@needs_root
def test_files_in_a_buffer_on_beegfs_belong_to_its_group(programs: FakePrograms, parent: int) -> None:
    tools = _beegfs(programs)
    adapter = quota_adapter("beegfs", tools)
    adapter.create(parent, "7")
    with closing(open_directory("7", dir_fd=parent)) as directory:
        adapter.apply(directory, "seed", BufferLimit(MIB))
        os.mkdir("below", dir_fd=directory)
        os.close(os.open("below/file", os.O_CREAT, dir_fd=directory))
        group = os.stat("below/file", dir_fd=directory).st_gid
    assert 2_000_000 <= group <= 2_000_009 and adapter.find(parent, "7") == str(group)
    assert capacity.keeps_group("beegfs", tools) and not capacity.keeps_group("lustre", tools)


def test_an_interrupted_creation_or_removal_of_a_fileset_is_completed(
    programs: FakePrograms, parent: int, tmp_path: Path
) -> None:
    tools = _gpfs(programs)
    adapter = quota_adapter("gpfs", tools)
    # Killed between mmcrfileset and mmlinkfileset.
    fileset = fileset_of(f"{tmp_path}/fs/7")
    programs.state.write_text(f'{{"filesets": {{"{fileset}": {{"block": 0, "files": 0}}}}}}')
    adapter.create(parent, "7")
    assert os.stat("7", dir_fd=parent).st_mode & 0o777 == 0o700
    # Killed between mmunlinkfileset and mmdelfileset.
    programs.state.write_text(f'{{"filesets": {{"{fileset}": {{"block": 0, "files": 0}}}}}}')
    os.rmdir("7", dir_fd=parent)
    capacity.remove_empty(parent, "7", shown="7", quota="gpfs", tools=tools)
    assert fileset not in programs.state.read_text()


LAYOUTS_SET = {
    "lustre": ("lfs setstripe -c 4 -S 1048576 -p flash", "lfs setstripe -c -1"),
    "beegfs": ("beegfs entry set --num-targets=4 --chunk-size=1048576 --pool=flash", ""),
    "beegfs-7": ("beegfs-ctl --setpattern --numtargets=4 --chunksize=1048576 --storagepoolid=flash", ""),
    "command": ("site-quota layout", "site-quota layout"),
}


@pytest.mark.parametrize("name", LAYOUTS_SET)
def test_stripes_are_set_with_the_options_of_the_tool(programs: FakePrograms, parent: int, name: str) -> None:
    word, prepare = KINDS[name]
    layout = layout_adapter(word, prepare(programs))
    assert layout.check(parent) == ""
    expected, all_targets = LAYOUTS_SET[name]
    layout.apply(parent, Stripes(4, MIB, "flash"))
    assert programs.calls()[-1].startswith(expected)
    if all_targets:
        layout.apply(parent, Stripes(-1))
        assert programs.calls()[-1].startswith(all_targets)
    else:
        with pytest.raises(AdapterFailed) as caught:
            layout.apply(parent, Stripes(-1))
        assert caught.value.code == UNUSABLE
    if word == "command":
        assert '"layout": [-1, 0, ""]' in programs.state.read_text()


@pytest.mark.parametrize("size_bytes", [MIB, 8 * MIB])
def test_a_layout_of_cephfs_keeps_its_unit_within_its_objects(
    parent: int, attributes: Attributes, size_bytes: int
) -> None:
    layout_adapter("cephfs", Tools()).apply(parent, Stripes(3, size_bytes, "ssd"))
    found = {name.removeprefix("ceph.dir.layout."): value for (_, name), value in attributes.values.items()}
    objects = {"object_size": b"8388608"} if size_bytes > 4 * MIB else {}
    assert found == {"pool": b"ssd", "stripe_unit": b"%d" % size_bytes, "stripe_count": b"3"} | objects
    with pytest.raises(AdapterFailed) as caught:
        layout_adapter("cephfs", Tools()).apply(parent, Stripes(3, 3 * MIB))
    assert caught.value.code == UNUSABLE

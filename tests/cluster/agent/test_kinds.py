"""Lists, commands and persistent buffers, through an agent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.files.paths import PathRefused, identity_of
from forebay.cluster.agent.worker.items import LIST_LINES_MAX, read_list
from forebay.cluster.agent.worker.staging import measure_content
from forebay.cluster.system.descriptors import open_directory
from forebay.cluster.system.processes import all_pids, environment_variables
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order, SpecialTransfers
from forebay.replica.model.requests import CreatePersistent, ListTransfer
from forebay.replica.model.transfers import TransferChoice, TransferRules
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import ControllerDouble

KIB = 1024


def special(site: Site, **fields: object) -> SpecialTransfers:
    standard: dict[str, object] = {"list_roots": (str(site.sources),)}
    return SpecialTransfers(**(standard | fields))  # type: ignore[arg-type]


async def done(controller: ControllerDouble, order: Order) -> OperationDone:
    await controller.order(order)
    result = await controller.result(order.job, order.attempt)
    assert isinstance(result, OperationDone), result
    return result


async def failed(controller: ControllerDouble, order: Order) -> OperationFailed:
    await controller.order(order)
    result = await controller.result(order.job, order.attempt)
    assert isinstance(result, OperationFailed), result
    return result


def inside(site: Site, job: int = 7) -> Path:
    return site.home / "buffers" / str(job) / "striped"


def test_what_a_list_names_comes_into_the_buffer_and_goes_out_again(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            (site.sources / "deep").mkdir()
            (site.sources / "a b").write_text("first")
            (site.sources / "deep" / "c").write_text("second")
            (site.sources / "list").write_text(f"# inputs\n{site.sources}/a b\n\n{site.sources}/deep/c\r\n")
            (site.sources / "back").write_text("$DW_JOB_STRIPED/l/c\n${DW_JOB_STRIPED}/made\n")
            coming = ListTransfer(False, str(site.sources / "list"), "$DW_JOB_STRIPED/l")
            result = await done(controller, site.order(7, 1, "stage_in", special=special(site, lists=(coming,))))
            assert (result.files, result.size_bytes) == (2, 11)
            assert {path.name: path.read_text() for path in (inside(site) / "l").iterdir()} == {
                "a b": "first",
                "c": "second",
            }
            (inside(site) / "made").write_text("result")
            going = ListTransfer(True, str(site.sources / "back"), str(site.destinations / "out"))
            await done(controller, site.order(7, 2, "stage_out", special=special(site, lists=(going,))))
            assert {path.name: path.read_text() for path in (site.destinations / "out").iterdir()} == {
                "c": "second",
                "made": "result",
            }

    asyncio.run(story())


def test_a_line_that_cannot_be_fails_the_transfer_by_its_number_and_leaves_nothing(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            (site.sources / "a").write_text("x")
            transfer = ListTransfer(False, str(site.sources / "list"), "$DW_JOB_STRIPED/l")
            for attempt, (line, says) in enumerate(
                (
                    ("/etc/passwd", "line 2 of the list: /etc/passwd lies outside the directories"),
                    (f"{site.sources}/../n1/storage-id", "line 2: "),
                    (f"{site.sources}/gone", "gone does not exist"),
                    (f"{site.sources}/sub/a", "lines 1 and 2: both would become 'a'"),
                    (f"{site.sources}/sub/", "does not name a file"),
                    ("relative", "not an absolute path"),
                ),
                start=1,
            ):
                (site.sources / "list").write_text(f"{site.sources}/a\n{line}\n")
                order = site.order(7, attempt, "stage_in", special=special(site, lists=(transfer,)))
                result = await failed(controller, order)
                assert says in result.message and result.final, result

    asyncio.run(story())


def test_a_list_is_a_regular_file_beneath_the_roots_and_bounded(tmp_path: Path) -> None:
    home = open_directory(tmp_path)
    barred = identity_of(home)
    os.close(home)
    roots = tmp_path / "roots"
    roots.mkdir()
    where = (str(roots),)
    (roots / "link").symlink_to("/etc/passwd")
    (roots / "directory").mkdir()
    os.mkfifo(roots / "pipe")
    (roots / "many").write_text("".join(f"/x/{number}\n" for number in range(LIST_LINES_MAX + 1)))
    for name, says in (
        ("gone", "does not exist"),
        ("directory", "is a directory"),
        ("link", "is a symbolic link"),
        ("pipe", "is a named pipe"),
        ("many", f"more than {LIST_LINES_MAX} files"),
    ):
        with pytest.raises(PathRefused, match=says):
            read_list(where, str(roots / name), barred)
    with pytest.raises(PathRefused, match="lies outside"):
        read_list(where, "/etc/passwd", barred)


def test_commands_stage_as_the_user_with_the_variables_of_the_script(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            (site.sources / "a").write_text("data")
            commands = (
                f'cp "{site.sources}/a" "$DW_JOB_STRIPED/a"',
                'echo "$FOREBAY_JOB_ID $SLURM_JOB_USER $GREETING $(pwd)" >"$DW_JOB_STRIPED/said"',
            )
            order = site.order(
                7,
                1,
                "stage_in",
                special=special(site, commands=commands, environment=(("GREETING", "hello"),)),
                capacity_bytes=1 << 20,
            )
            result = await done(controller, order)
            assert (inside(site) / "a").read_text() == "data"
            assert (inside(site) / "said").read_text() == f"7 alice hello {site.destinations}\n"
            assert (result.files, result.size_bytes) == (2, sum(held_of(inside(site))))
            out = special(site, commands=('tar cf out.tar -C "$DW_JOB_STRIPED" a',))
            await done(controller, site.order(7, 2, "stage_out", special=out, capacity_bytes=1 << 20))
            assert (site.destinations / "out.tar").stat().st_size > 0 and (inside(site) / "a").exists()

    asyncio.run(story())


def held_of(directory: Path) -> list[int]:
    return [path.stat().st_size for path in directory.iterdir()]


def test_a_command_that_fails_says_its_last_words_and_the_buffer_stays(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await done(controller, site.order(7, 1, "stage_in"))
            (inside(site) / "result").write_text("only copy")
            out = special(site, commands=("echo starting; echo no such bucket >&2; exit 3",))
            result = await failed(controller, site.order(7, 2, "stage_out", special=out))
            assert result.message == "the command of stage_out ended with code 3: no such bucket"
            assert not result.final and (inside(site) / "result").read_text() == "only copy"

    asyncio.run(story())


def test_what_a_command_left_running_is_ended_with_it(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            commands = ("setsid sh -c 'trap \"\" TERM; sleep 600' & echo done",)
            await done(controller, site.order(7, 1, "stage_in", special=special(site, commands=commands)))
            assert not left_of(site)

    asyncio.run(story())


def left_of(site: Site) -> list[int]:
    """Return the processes of this site's operations that live."""
    storage_id = (site.home / "storage-id").read_text().strip()
    wanted = f"FOREBAY_STEP={storage_id}.".encode()
    return [pid for pid in all_pids() if any(one.startswith(wanted) for one in environment_variables(pid))]


def test_a_command_is_ended_whole_when_its_job_is_cancelled_or_its_agent_killed(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            started = site.destinations / "started"
            commands = (f"setsid sh -c 'sleep 600' & touch {started}; sleep 600",)
            order = site.order(7, 1, "stage_in", special=special(site, commands=commands))
            await controller.order(order)
            await until(started.exists)
            await controller.withdraw(7)
            await until(lambda: not left_of(site))
            started.unlink()
            await controller.order(site.order(8, 1, "stage_in", special=special(site, commands=commands)))
            await until(started.exists)
            await site.kill_agent(agent)
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) > 1)
            await done(controller, site.order(8, 2, "stage_in", special=special(site, commands=("true",))))
            await until(lambda: not left_of(site))

    asyncio.run(story())


async def until(true: object) -> None:
    assert callable(true)
    for _ in range(600):
        if true():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come to that in 30 s")


def test_a_command_that_fills_the_buffer_beyond_its_capacity_fails(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            commands = ('head -c 3000 /dev/zero >"$DW_JOB_STRIPED/x"; ln "$DW_JOB_STRIPED/x" "$DW_JOB_STRIPED/y"',)
            order = site.order(7, 1, "stage_in", capacity_bytes=2000, special=special(site, commands=commands))
            result = await failed(controller, order)
            assert "the buffer holds 3KB (3000 bytes), but its capacity is 2KB (2000 bytes)" in result.message
            again = msgspec.structs.replace(order, attempt=2, capacity_bytes=3000)
            assert (await done(controller, again)).size_bytes == 3000

    asyncio.run(story())


def test_a_capacity_that_counts_something_else_than_bytes_bounds_no_bytes(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            (site.sources / "in").write_text("more than four")
            coming = Transfer(TransferKind.FILE, str(site.sources / "in"), "$DW_JOB_STRIPED/in")
            order = site.order(7, 1, "stage_in", capacity_bytes=4, pool_is_bytes=False, transfers=(coming,))
            assert (await done(controller, order)).files == 1

    asyncio.run(story())


def test_transfers_go_into_and_out_of_persistent_buffers_within_what_they_were_granted(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await done(controller, site.order(7, 1, "stage_in", creates=(CreatePersistent("lake", 4 * KIB),)))
            lake = site.home / "persistent" / "lake"
            (lake / "old").write_bytes(bytes(3 * KIB))
            (site.sources / "in").write_bytes(b"y" * KIB)
            coming = Transfer(TransferKind.FILE, str(site.sources / "in"), "$DW_PERSISTENT_STRIPED_lake/d/in")
            order = site.order(
                8,
                1,
                "stage_in",
                uses=("lake",),
                transfers=(coming,),
                special=special(site, granted=(("lake", 4 * KIB),)),
            )
            assert (await done(controller, order)).size_bytes == KIB
            assert (lake / "d" / "in").read_bytes() == b"y" * KIB and (lake / "old").exists()
            over = msgspec.structs.replace(
                order,
                job=9,
                transfers=(msgspec.structs.replace(coming, inside="$DW_PERSISTENT_STRIPED_lake/more"),),
            )
            result = await failed(controller, over)
            assert "1KiB (1024 bytes) in the persistent buffer lake, which has 4KiB (4096 bytes)" in result.message
            assert result.final and not (lake / "more").exists()
            going = Transfer(TransferKind.FILE, str(site.destinations / "o"), "${DW_PERSISTENT_STRIPED_lake}/d/in")
            out = site.order(
                8,
                2,
                "stage_out",
                uses=("lake",),
                transfers=(going,),
                special=special(site, choices=(TransferChoice(move=True),)),
            )
            await done(controller, out)
            assert (site.destinations / "o").read_bytes() == b"y" * KIB
            assert not (lake / "d" / "in").exists() and (lake / "old").exists()

    asyncio.run(story())


def test_a_persistent_buffer_that_the_job_does_not_use_is_no_place_for_a_transfer(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await done(controller, site.order(7, 1, "stage_in", creates=(CreatePersistent("lake", 4 * KIB),)))
            (site.sources / "in").write_text("x")
            coming = Transfer(TransferKind.FILE, str(site.sources / "in"), "$DW_PERSISTENT_STRIPED_lake/in")
            result = await failed(controller, site.order(8, 1, "stage_in", transfers=(coming,)))
            assert "is not a path in the buffer" in result.message
            gone = site.order(9, 1, "stage_in", transfers=(coming,), uses=("lake",))
            (site.home / "persistent" / "lake").rmdir()
            result = await failed(controller, gone)
            assert "the persistent buffer is not on this node" in result.message

    asyncio.run(story())


def test_a_site_program_moves_what_the_rules_say_and_the_receipt_names_it(site: Site) -> None:
    site.configure(more='[provider]\nallowed_programs = ["/bin/cp", "/bin/true"]')

    async def story() -> None:
        async with site.serving() as controller:
            (site.sources / "d").mkdir()
            (site.sources / "d" / "a").write_text("x")
            rules = TransferRules(backends=("template",), template="/bin/cp -aT {source} {destination}")
            coming = Transfer(TransferKind.DIRECTORY, str(site.sources / "d"), "$DW_JOB_STRIPED/d")
            result = await done(controller, site.order(7, 1, "stage_in", transfers=(coming,), rules=rules))
            assert result.receipt is not None and result.receipt.backends == ("template",)
            assert (inside(site) / "d" / "a").read_text() == "x"
            liar = msgspec.structs.replace(rules, template="/bin/true {source} {destination}")
            result_2 = await failed(controller, site.order(8, 1, "stage_in", transfers=(coming,), rules=liar))
            assert "template reported success but did not copy" in result_2.message

    asyncio.run(story())


def test_an_agent_that_dies_under_a_program_leaves_the_old_file_and_the_next_attempt_puts_it_right(site: Site) -> None:
    site.configure(more='[provider]\nallowed_programs = ["/bin/cp", "/bin/sh"]')

    async def story() -> None:
        async with site.running() as (controller, agent):
            await done(controller, site.order(7, 1, "stage_in"))
            (inside(site) / "a").write_text("result")
            old = site.destinations / "a"
            old.write_text("old")
            started = site.destinations / "started"
            half = f"head -c 3 $0 >$1; touch {started}; setsid sleep 600 & sleep 600"
            rules = TransferRules(backends=("template",), template=f"/bin/sh -c '{half}' {{source}} {{destination}}")
            going = Transfer(TransferKind.FILE, str(old), "$DW_JOB_STRIPED/a")
            order = site.order(7, 2, "stage_out", transfers=(going,), rules=rules)
            await controller.order(order)
            await until(started.exists)
            await site.kill_agent(agent)
            assert old.read_text() == "old"
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) > 1)
            whole = msgspec.structs.replace(rules, template="/bin/cp -T {source} {destination}")
            again = await done(controller, msgspec.structs.replace(order, attempt=3, rules=whole))
            assert again.files == 1 and old.read_text() == "result"
            assert sorted(path.name for path in site.destinations.iterdir()) == ["a", "started"]
            await until(lambda: not operations_of(site))

    asyncio.run(story())


def operations_of(site: Site) -> list[int]:
    """Return the processes of this site's attempt 2 of job 7 that live."""
    storage_id = (site.home / "storage-id").read_text().strip()
    wanted = f"FOREBAY_OPERATION={storage_id}.7.2".encode()
    return [pid for pid in all_pids() if wanted in environment_variables(pid)]


def test_each_file_counts_once_and_links_count_nothing(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").write_bytes(bytes(100))
    os.link(tmp_path / "d" / "a", tmp_path / "b")
    (tmp_path / "l").symlink_to("/etc")
    descriptor = open_directory(tmp_path)
    assert measure_content(descriptor) == (1, 100)
    os.close(descriptor)

"""Mail equals Slurm's, reaches a real server or program, and never waits for one that does not respond."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email import message_from_bytes, policy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.config.mail import MailConfig
from forebay.cluster.server.mail import Undeliverable, sender_of
from forebay.cluster.server.mail import sending as sending_module
from forebay.cluster.server.mail.sending import SendFailed
from forebay.cluster.server.mail.text import letter_of, message_of, subject_of
from forebay.cluster.system.address import Address
from forebay.replica.model.job_states import JobState
from forebay.replica.model.mail import Mail, MailKind
from forebay.replica.values.units import Instant
from tests.cluster.harness import story

AT = Instant(1_790_000_000_000_000)
STAGED_OUT = Mail(12, MailKind.STAGE_OUT, 7, "alice", "my_app", AT, 307, JobState.COMPLETED)


def mail(**changes: Any) -> Mail:
    fields = {name: getattr(STAGED_OUT, name) for name in STAGED_OUT.__struct_fields__}
    return Mail(**{**fields, **changes})


def test_stage_out_subject_equals_the_guide() -> None:
    assert subject_of(STAGED_OUT) == "SLURM Job_id=12 Name=my_app Staged Out, StageOut time 00:05:07"


@pytest.mark.parametrize(
    ("changes", "subject"),
    [
        ({"kind": MailKind.BEGIN}, "SLURM Job_id=12 Name=my_app Began, Queued time 00:05:07"),
        ({"kind": MailKind.END}, "SLURM Job_id=12 Name=my_app Ended, Run time 00:05:07, COMPLETED, ExitCode 0"),
        (
            {"kind": MailKind.FAIL, "result": JobState.FAILED, "exit_code": 3},
            "SLURM Job_id=12 Name=my_app Failed, Run time 00:05:07, FAILED, ExitCode 3",
        ),
        (
            {"kind": MailKind.FAIL, "result": JobState.FAILED, "signal": 9},
            "SLURM Job_id=12 Name=my_app Failed, Run time 00:05:07, FAILED, Signal 9",
        ),
        (
            {"kind": MailKind.FAIL, "result": JobState.TIMEOUT, "duration_s": 90_061},
            "SLURM Job_id=12 Name=my_app Failed, Run time 1-01:01:01, TIMEOUT",
        ),
        (
            {"kind": MailKind.END, "result": JobState.CANCELLED, "duration_s": 0},
            "SLURM Job_id=12 Name=my_app Ended, CANCELLED",
        ),
        (
            {"array_job": 10, "array_task": 3},
            "SLURM Array Task Job_id=10_3 (12) Name=my_app Staged Out, StageOut time 00:05:07",
        ),
    ],
)
def test_other_subjects_have_the_same_form(changes: dict[str, Any], subject: str) -> None:
    assert subject_of(mail(**changes)) == subject


@given(st.text(min_size=1, max_size=200))
def test_job_name_cannot_become_a_header_or_a_second_message(name: str) -> None:
    raw = message_of(letter_of("demo", "cafe", mail(name=name)), sender="forebay", recipient="alice")
    assert raw.isascii() and b"\r\n.\r\n" not in raw
    read = message_from_bytes(raw, policy=policy.default)
    assert list(read.keys()) == [
        "From", "To", "Subject", "Message-ID", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding",
        "MIME-Version",
    ] or sorted(read.keys()) == sorted(
        ["From", "To", "Subject", "Message-ID", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding",
         "MIME-Version"]
    )  # fmt: skip
    assert read["Message-ID"] == "<12.stage_out.7.cafe@forebay>"


class Post:
    """Mail server of the test: records its input, and replies as configured."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.commands: list[str] = []
        self.answers: dict[str, str] = {}
        self.silent = False
        self.address = Address("127.0.0.1", 0)

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.silent:
                await reader.read()
                return
            writer.write(b"220-hello\r\n220 ready\r\n")
            while line := await reader.readline():
                command = line.decode().strip()
                self.commands.append(command)
                verb = command.split(":")[0].split(" ")[0]
                answer = self.answers.get(verb, "354 go on" if verb == "DATA" else "250 ok")
                writer.write(answer.encode() + b"\r\n")
                if verb == "DATA" and answer.startswith("3"):
                    message = await reader.readuntil(b"\r\n.\r\n")
                    self.messages.append(message.removesuffix(b".\r\n"))
                    writer.write(self.answers.get("END", "250 taken").encode() + b"\r\n")
                if verb == "QUIT":
                    return
        finally:
            writer.close()


@asynccontextmanager
async def post_office() -> AsyncIterator[Post]:
    post = Post()
    server = await asyncio.start_server(post.talk, "127.0.0.1", 0)
    post.address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
    async with server:
        yield post


async def is_alice(name: str) -> bool:
    return name == "alice"


def by_smtp(post: Post, **more: Any) -> sending_module.Send:
    send = sender_of(MailConfig(smtp=post.address, **more), "demo", "cafe", is_alice)
    assert send is not None
    return send


@story
async def test_smtp_server_gets_the_message_with_its_envelope() -> None:
    async with post_office() as post:
        await by_smtp(post, sender="forebay@hpc.example", domain="example.org")(mail(name=".dots\n.and lines"))
        assert post.commands[:4] == [
            "EHLO localhost",
            "MAIL FROM:<forebay@hpc.example>",
            "RCPT TO:<alice@example.org>",
            "DATA",
        ]
        (raw,) = post.messages
        read = message_from_bytes(raw, policy=policy.default)
        assert read["Subject"].startswith("SLURM Job_id=12 Name=.dots\\n.and lines Staged Out, StageOut time 00:05:07")
        assert read["To"] == "alice@example.org"


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ({"RCPT": "550 no such user"}, Undeliverable),
        ({"RCPT": "451 later"}, SendFailed),
        ({"EHLO": "421 busy"}, SendFailed),
        ({"DATA": "250 what"}, SendFailed),
        ({"END": "554 spam"}, Undeliverable),
    ],
)
def test_permanent_and_temporary_rejections_are_distinguished(answers: dict[str, str], error: type[Exception]) -> None:
    @story
    async def tell() -> None:
        async with post_office() as post:
            post.answers = answers
            with pytest.raises(error):
                await by_smtp(post)(STAGED_OUT)

    tell()


@story
async def test_silent_server_is_abandoned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "SEND_S", 0.1)
    async with post_office() as post:
        post.silent = True
        with pytest.raises(SendFailed, match="longer than"):
            await by_smtp(post)(STAGED_OUT)


@pytest.mark.parametrize(
    "recipient",
    [
        "|/bin/sh${IFS}#",
        "|/bin/sh${IFS}#@example.org",
        "/etc/passwd",
        "decode",
        "",
        "-f",
        "a b",
        "a@b>",
        "a\r\nRCPT TO:<b>",
        "ä@example.org",
        "a@",
        "@b",
        "a@b@c",
        "x" * 300,
    ],
)
def test_invalid_address_receives_no_mail(recipient: str) -> None:
    @story
    async def tell() -> None:
        async with post_office() as post:
            with pytest.raises(Undeliverable):
                await by_smtp(post)(mail(recipient=recipient))
            assert not post.commands

    tell()


def program(directory: Path, text: str) -> Path:
    path = directory / "mailprog"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def by_program(path: Path) -> sending_module.Send:
    send = sender_of(MailConfig(program=str(path)), "demo", "cafe", is_alice)
    assert send is not None
    return send


def test_program_gets_subject_recipient_and_text(tmp_path: Path) -> None:
    path = program(
        tmp_path,
        f'printf "%s\\n" "$@" "$SLURM_JOB_ID" "$FOREBAY_MESSAGE_ID" "$HOME" > {tmp_path}/got; cat > {tmp_path}/text',
    )
    story(lambda: by_program(path)(STAGED_OUT))()
    assert (tmp_path / "got").read_text().splitlines() == [
        "-s", "SLURM Job_id=12 Name=my_app Staged Out, StageOut time 00:05:07", "alice", "12",
        "<12.stage_out.7.cafe@forebay>", "",
    ]  # fmt: skip
    assert "its results have been staged out" in (tmp_path / "text").read_text()


def test_failing_program_gives_its_reason(tmp_path: Path) -> None:
    path = program(tmp_path, "echo 'no route to host' >&2; exit 75")
    with pytest.raises(SendFailed, match="exited with 75: no route to host"):
        story(lambda: by_program(path)(STAGED_OUT))()
    with pytest.raises(SendFailed, match="cannot be run"):
        story(lambda: by_program(tmp_path / "nothing")(STAGED_OUT))()


def test_program_writable_by_others_is_not_run(tmp_path: Path) -> None:
    path = program(tmp_path, "echo ran >&2; exit 1")
    path.chmod(0o777)
    with pytest.raises(SendFailed, match="others may write to"):
        story(lambda: by_program(path)(STAGED_OUT))()


def test_program_that_floods_its_output_and_reads_nothing_succeeds(tmp_path: Path) -> None:
    path = program(tmp_path, "exec <&-; head -c 1000000 /dev/zero >&2; exit 0")
    story(lambda: by_program(path)(STAGED_OUT))()


@story
async def test_hanging_program_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending_module, "SEND_S", 1.0)
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    held = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    path = program(tmp_path, f"sleep 60 > {pipe} & sleep 60 > {pipe}")
    with pytest.raises(SendFailed, match="longer than"):
        await by_program(path)(STAGED_OUT)
    # Both ends of the fifo are closed once program and child are dead; a read then sees the end.
    for _ in range(500):
        try:
            if os.read(held, 1) == b"":
                break
        except BlockingIOError:
            await asyncio.sleep(0.01)
    else:
        raise AssertionError("a child of the mail program is alive")
    os.close(held)


def test_mail_is_disabled_unless_configured() -> None:
    assert sender_of(MailConfig(), "demo", "cafe", is_alice) is None

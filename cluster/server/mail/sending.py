"""Sending of mail by a program, as Slurm's MailProg, or by this machine's SMTP server. Each attempt has a time limit.

Both ways are asynchronous: a hanging program is killed with all its children, the connection to a hanging server is
closed, and the replica never blocks.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from forebay.cluster.config import MailConfig
from forebay.cluster.providers import Local, ProgramRefused, check_command
from forebay.cluster.server.mail.text import Letter, letter_of, message_of
from forebay.cluster.system import Address
from forebay.replica.model import Mail
from forebay.replica.values import is_mail_address

SEND_S: Final = 30.0
"""Time limit of one attempt, seconds: a mail server that delays its greeting on purpose takes up to 20."""

ERROR_BYTES_MAX: Final = 4096
"""Maximum size read of a program's output or a server's line, bytes."""

PROGRAM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"

_REPLY_LINES_MAX: Final = 64

Post = Callable[[Letter], Coroutine[Any, Any, None]]
"""Sends one letter; raises Undeliverable for permanent, SendFailed or OSError for temporary failures."""

Send = Callable[[Mail], Coroutine[Any, Any, None]]
"""Sends one mail about a job; raises as Post does."""


class Undeliverable(Exception):
    """Permanent failure of a mail; the message gives the reason."""


class SendFailed(Exception):
    """Temporary failure of a mail; the message gives the reason."""


IsUser = Callable[[str], Awaitable[bool]]
"""Returns whether a name is a user of this machine."""


def sender_of(config: MailConfig, cluster: str, cluster_id: str, is_user: IsUser) -> Send | None:
    """Return a function that sends job mail as configured, or None if mail is disabled."""
    post = post_of(config, is_user)
    if post is None:
        return None

    async def send(mail: Mail) -> None:
        await post(letter_of(cluster, cluster_id, mail))

    return send


def post_of(config: MailConfig, is_user: IsUser) -> Post | None:
    """Return a function that sends letters as configured, or None if mail is disabled."""
    if config.smtp is not None:
        address = config.smtp

        async def by_smtp(letter: Letter) -> None:
            recipient = await recipient_of(letter.recipient, config.domain, is_user)
            message = message_of(letter, sender=config.sender, recipient=recipient)
            await _bounded(send_by_smtp(address, config.sender, recipient, message))

        return by_smtp
    program = config.program
    if not program:
        return None

    async def by_program(letter: Letter) -> None:
        recipient = await recipient_of(letter.recipient, config.domain, is_user)
        await _bounded(send_by_program(program, letter, recipient))

    return by_program


async def _bounded(sending: Awaitable[None]) -> None:
    try:
        async with asyncio.timeout(SEND_S):
            await sending
    except TimeoutError as error:
        raise SendFailed(f"sending took longer than {SEND_S:.0f} s") from error


async def recipient_of(name: str, domain: str, is_user: IsUser) -> str:
    """Return the address of a recipient.

    A name without a domain must be a user of this machine: mail programs accept other names, even commands.

    Raises:
        Undeliverable: The recipient is invalid.
    """
    text = name if "@" in name or not domain else f"{name}@{domain}"
    if not is_mail_address(text):
        raise Undeliverable(f"{text[:64]!r} is not a mail address")
    if "@" not in text and not await is_user(text):
        raise Undeliverable(f"{text[:64]!r} is not a user of this machine, and [mail] names no domain")
    return text


async def send_by_program(program: str, letter: Letter, recipient: str) -> None:
    """Run `PROGRAM -s SUBJECT RECIPIENT` with the text on standard input.

    Raises:
        SendFailed: The program cannot be run, or its exit code is not 0.
    """
    environment = {
        "PATH": PROGRAM_PATH,
        "LANG": "C.UTF-8",
        **letter.variables,
        "FOREBAY_MESSAGE_ID": letter.message_id,
    }
    try:
        executable = check_command(program, Local(allowed_programs=(program,)))
        process = await asyncio.create_subprocess_exec(
            program, "-s", letter.subject, recipient, executable=executable,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            env=environment, cwd="/", start_new_session=True, limit=ERROR_BYTES_MAX,
        )  # fmt: skip
    except (OSError, ValueError, ProgramRefused) as error:
        raise SendFailed(f"{program} cannot be run: {error}") from error
    assert process.stdin is not None and process.stderr is not None
    try:
        # The exit code decides: a program that does not read its input has not failed. uvloop raises RuntimeError if
        # the pipe is already closed.
        with suppress(BrokenPipeError, ConnectionResetError, RuntimeError):
            process.stdin.write(letter.body.encode())
            await process.stdin.drain()
        with suppress(RuntimeError):
            process.stdin.close()
        said = await _head(process.stderr)
        code = await process.wait()
    finally:
        _end_group(process)
    if code != 0:
        words = said.decode(errors="replace").strip()
        raise SendFailed(f"{program} exited with {code}" + (f": {words}" if words else ""))


async def _head(stream: asyncio.StreamReader) -> bytes:
    """Read all of a stream, so that the writer never blocks; return its beginning."""
    kept = b""
    while chunk := await stream.read(ERROR_BYTES_MAX):
        kept = (kept + chunk)[:ERROR_BYTES_MAX]
    return kept


def _end_group(process: asyncio.subprocess.Process) -> None:
    """Kill the program and its remaining children, which form a process group of their own."""
    if process.returncode is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


async def send_by_smtp(address: Address, sender: str, recipient: str, message: bytes) -> None:
    """Send a message to the server at `address`.

    Raises:
        Undeliverable: The server rejects it permanently.
        SendFailed: The server rejects it for now, or breaks the protocol.
    """
    reader, writer = await asyncio.open_connection(address.host, address.port, limit=ERROR_BYTES_MAX)
    try:
        await _expect(reader, b"2", "the greeting")
        for line, wanted in (
            ("EHLO localhost", b"2"),
            (f"MAIL FROM:<{sender}>", b"2"),
            (f"RCPT TO:<{recipient}>", b"2"),
            ("DATA", b"3"),
        ):
            await _say(writer, line.encode("ascii"))
            await _expect(reader, wanted, line)
        # A line that begins with a dot gets a second dot, because a single dot ends the message.
        stuffed = b"\r\n".join(b"." + line if line.startswith(b".") else line for line in message.split(b"\r\n"))
        await _say(writer, stuffed.removesuffix(b"\r\n") + b"\r\n.")
        await _expect(reader, b"2", "the message")
        # The server has accepted the message, so errors no longer matter.
        with suppress(OSError, SendFailed):
            await _say(writer, b"QUIT")
    finally:
        writer.close()


async def _say(writer: asyncio.StreamWriter, line: bytes) -> None:
    writer.write(line + b"\r\n")
    await writer.drain()


async def _expect(reader: asyncio.StreamReader, wanted: bytes, said: str) -> None:
    for _ in range(_REPLY_LINES_MAX):
        try:
            line = await reader.readline()
        except ValueError as error:
            raise SendFailed(f"the mail server's answer to {said} is too long") from error
        if not line.endswith(b"\n"):
            raise SendFailed(f"the mail server hung up after {said}")
        if line[3:4] == b"-":
            continue
        if line.startswith(wanted):
            return
        words = line.decode("ascii", errors="replace").strip()
        kind = Undeliverable if line.startswith(b"5") else SendFailed
        raise kind(f"the mail server answered {said} with {words!r}")
    raise SendFailed(f"the mail server's answer to {said} has too many lines")

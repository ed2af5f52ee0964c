"""The table `[mail]` of a replica's configuration: how it sends mail, if it does. Off unless something says otherwise.

It is a machine's own, like the mail server it names: so it is no part of what replicas agree on. Whoever leads sends,
and where mail is on at one replica only, what is owed while another leads is not sent.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from cluster.config.toml import Table
from cluster.system import Address, AddressError

ADDRESS_CHARACTERS_MAX: Final = 254
"""Characters of a mail address: what SMTP allows (RFC 5321)."""

_ADDRESS: Final = re.compile(r"(?!-)[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}(@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*)?", re.ASCII)
_DOMAIN: Final = re.compile(r"[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*", re.ASCII)


class MailConfig(msgspec.Struct, frozen=True):
    """How one replica sends mail: by a `program` (MailProg), or to this machine's SMTP server. Neither: not at all."""

    program: str = ""
    """Absolute path; called as `PROGRAM -s SUBJECT RECIPIENT` with the text on standard input."""
    smtp: Address | None = None
    sender: str = "forebay"
    """Who it is from, for SMTP."""
    domain: str = ""
    """What is added to a recipient that has no domain (MailDomain); empty: nothing."""


NO_MAIL = MailConfig()


def is_address(text: str) -> bool:
    """Whether a text is a plain mail address or the name of a local user: nothing that could be read as more."""
    return len(text) <= ADDRESS_CHARACTERS_MAX and _ADDRESS.fullmatch(text) is not None


def read_mail(table: Table) -> MailConfig:
    """Return what the table says; ConfigError names the key that cannot be used."""
    program = table.text("program", "")
    if program and (not program.startswith("/") or ".." in program.split("/") or not program.isprintable()):
        raise table.refuse("program", f"found {program!r}", "write the absolute path of a program, without ..")
    smtp = _smtp(table)
    if program and smtp is not None:
        raise table.refuse("smtp", "there is a program, too", "leave out one of program and smtp")
    sender = table.text("sender", NO_MAIL.sender)
    if not is_address(sender):
        raise table.refuse("sender", f"found {sender!r}", "write a mail address, for example forebay@example.org")
    domain = table.text("domain", "")
    if domain and (len(domain) > ADDRESS_CHARACTERS_MAX or _DOMAIN.fullmatch(domain) is None):
        raise table.refuse("domain", f"found {domain!r}", "write a domain, for example example.org")
    table.finish()
    return MailConfig(program, smtp, sender, domain)


def _smtp(table: Table) -> Address | None:
    text = table.text("smtp", "")
    if not text:
        return None
    try:
        address = Address.parse(text)
    except AddressError as error:
        raise table.refuse("smtp", error.sentence, error.remedy) from error
    if not address.is_loopback:
        raise table.refuse(
            "smtp",
            f"{text!r} is another machine, and mail is sent without encryption",
            "name the mail server of this machine, for example 127.0.0.1:25",
        )
    return address

"""Table `[mail]` of a replica's configuration: how the replica sends mail; off by default.

The table names the machine's own mail server, so it is not replicated. Only the leader sends mail. Mail that is due
while a replica without this table leads is not sent.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from forebay.cluster.config.toml import InvalidValue, Text, Written
from forebay.cluster.system import Address
from forebay.replica.values import is_mail_address, is_mail_domain


class MailConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mail settings of one replica: a `program` (MailProg) or this machine's SMTP server; without either, mail is
    off.
    """

    program: Text = ""
    """Absolute path of a program called as `PROGRAM -s SUBJECT RECIPIENT`, with the text on standard input."""
    smtp: Annotated[Written[Address], Meta(examples=["127.0.0.1:25"])] | None = None
    sender: Text = "forebay"
    """Sender address for SMTP."""
    domain: Text = ""
    """Domain added to recipients without one (MailDomain); empty for none."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            InvalidValue: A setting is unusable.
        """
        program, smtp, domain = self.program, self.smtp, self.domain
        if program and (not program.startswith("/") or ".." in program.split("/") or not program.isprintable()):
            remedy = "write the absolute path of a program, without .."
            raise InvalidValue(f"found {program!r}", remedy, "program")
        if smtp is not None and not smtp.is_loopback:
            sentence = f"{str(smtp)!r} is another machine, and mail is sent without encryption"
            remedy = "name the mail server of this machine, for example 127.0.0.1:25"
            raise InvalidValue(sentence, remedy, "smtp")
        if program and smtp is not None:
            raise InvalidValue("program is set as well", "leave out one of program and smtp", "smtp")
        if not is_mail_address(self.sender):
            remedy = "write a mail address, for example forebay@example.org"
            raise InvalidValue(f"found {self.sender!r}", remedy, "sender")
        if domain and not is_mail_domain(domain):
            raise InvalidValue(f"found {domain!r}", "write a domain, for example example.org", "domain")


NO_MAIL = MailConfig()

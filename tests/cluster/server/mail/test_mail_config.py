"""The table [mail]: disabled by default, and strictly checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.cluster.config.mail import NO_MAIL, MailConfig
from forebay.cluster.config.toml import ConfigError, Document
from forebay.cluster.system.address import Address
from forebay.replica.values.names import is_mail_address


class File(msgspec.Struct):
    mail: MailConfig = NO_MAIL


def read(**values: str) -> MailConfig:
    lines = [f'{key} = "{value}"' for key, value in values.items()]
    return Document(Path("forebay.toml"), "\n".join(["[mail]", *lines])).decode(File).mail


def test_mail_is_disabled_by_default() -> None:
    assert read() == NO_MAIL == MailConfig()


def test_program_or_local_mail_server_may_be_configured() -> None:
    assert read(program="/usr/bin/mail").program == "/usr/bin/mail"
    found = read(smtp="127.0.0.1:25", sender="forebay@example.org", domain="example.org")
    assert found == MailConfig("", Address("127.0.0.1", 25), "forebay@example.org", "example.org")


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"program": "mail"}, "mail.program"),
        ({"program": "/usr/../bin/mail"}, "mail.program"),
        ({"program": "/usr/bin/mail", "smtp": "127.0.0.1:25"}, "mail.smtp"),
        ({"smtp": "10.0.0.5:25"}, "mail.smtp"),
        ({"smtp": "localhost"}, "mail.smtp"),
        ({"sender": "a b"}, "mail.sender"),
        ({"domain": "a..b"}, "mail.domain"),
        ({"smpt": "127.0.0.1:25"}, "mail.smpt"),
    ],
)
def test_invalid_value_is_rejected_by_its_key(values: dict[str, str], place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(**values)
    assert refused.value.key == place


@pytest.mark.parametrize("text", ["alice", "alice@example.org", "a.b+c@x-y.z"])
def test_address_is_plain(text: str) -> None:
    assert is_mail_address(text)


META = "|/${}#`'\"\\;&<>()[]*?!~%^,: \t\n\0"


@given(st.text(st.characters(codec="ascii"), min_size=1, max_size=70), st.sampled_from(["", "@example.org"]))
@example("|/bin/sh${IFS}#", "@example.org")
@example("/var/spool/mail/root", "")
@example("-f", "@example.org")
@example("a..b", "@example.org")
def test_address_has_no_character_special_to_a_mail_program_or_shell(mailbox: str, domain: str) -> None:
    if is_mail_address(mailbox + domain):
        assert mailbox[0].isalnum() or mailbox[0] == "_"
        assert not set(mailbox.partition("@")[0]) & set(META)
        assert ".." not in mailbox

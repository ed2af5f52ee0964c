"""Tables `[[sink]]`: receivers of the ledger's events, and the events that each is sent.

They are not replicated: write the same for each replica. The leader sends the events.
"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from forebay.cluster.config.https_urls import https_fault
from forebay.cluster.config.toml import Document, InvalidValue, Name, Text, Written, near
from forebay.cluster.security import unsafe_key

KINDS_MAX: Final = 64
"""Names in one filter, count: all groups and several single events."""

BATCH_EVENTS_MAX: Final = 1_000
"""Events in one request, count: a second of a busy cluster, and what a receiver stores in one transaction."""


class SinkConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Event sink: a receiver of events by HTTP POST, in CloudEvents format."""

    name: Annotated[Written[Name], Meta(examples=["audit"])]
    url: Annotated[Text, Meta(examples=["https://events.example.org/forebay"])]
    secret_file: Path
    """Key of the signatures; readable by the replica only."""
    kinds: Annotated[tuple[Text, ...], Meta(max_length=KINDS_MAX)] = ()
    """Groups of events, or single events; none for all but routine ones."""
    authority: Path | None = None
    """Issuer of the receiver's certificate; None for the system's authorities."""
    batch: Annotated[int, Meta(ge=1, le=BATCH_EVENTS_MAX)] = 100
    """Largest number of events in one request."""

    def __post_init__(self) -> None:
        """Check the address and the filter.

        Raises:
            InvalidValue: One of them is invalid.
        """
        sentence = https_fault(self.url, "to which nothing is sent without HTTPS")
        if "@" in self.url or "?" in self.url or "#" in self.url:
            # The value is not repeated: it may be a secret.
            sentence = "the URL has a user name, a query or a fragment, which every user could read"
        if sentence:
            remedy = "write https://HOST:PORT/PATH; http:// only for a receiver on this machine"
            raise InvalidValue(sentence, remedy, "url")
        if self.kinds:
            self._check_kinds()

    def _check_kinds(self) -> None:
        from forebay.cluster.schemas import EVENT_GROUPS, EVENT_KINDS

        for number, name in enumerate(self.kinds):
            if name not in EVENT_GROUPS and name not in EVENT_KINDS:
                known = near(name, (*EVENT_GROUPS, *EVENT_KINDS))
                remedy = f"write an event or one of {', '.join(sorted(EVENT_GROUPS))}"
                raise InvalidValue(f"found {name!r:.60}{known}", remedy, "kinds", number)


def check_sinks(document: Document, sinks: tuple[SinkConfig, ...]) -> None:
    """Check that names are unique, and that other accounts cannot read the keys, as far as this account can tell.

    Raises:
        ConfigError: A name is taken, or a key is not private.
    """
    taken: dict[str, int] = {}
    for number, sink in enumerate(sinks):
        if sink.name in taken:
            sentence = f"{sink.name!r} is taken by sink[{taken[sink.name] + 1}]"
            raise document.refuse(("sink", number, "name"), sentence, "give each sink a name of its own")
        taken[sink.name] = number
        fault = unsafe_key(sink.secret_file)
        if fault is not None:
            raise document.refuse(("sink", number, "secret_file"), *fault)

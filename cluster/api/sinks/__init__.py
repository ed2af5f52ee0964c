"""Event sinks: the leader sends the ledger's events to receivers by HTTP, in order and at least once."""

from forebay.cluster.api.sinks.delivery import SinkDelivery, SinkState
from forebay.cluster.api.sinks.sending import SinkClient
from forebay.cluster.api.sinks.sinks import EventSinks
from forebay.cluster.api.sinks.source import LedgerSource

"""Mail about jobs: what it says, what sends it, and the leader's round over what is owed."""

from cluster.server.mail.mailer import Mailer as Mailer
from cluster.server.mail.sending import Undeliverable as Undeliverable
from cluster.server.mail.sending import sender_of as sender_of

__all__ = ["Mailer", "Undeliverable", "sender_of"]

"""Mail about jobs and due drills: content, sending, and the leader's duty."""

from cluster.server.mail.drill_reminder import DrillReminder as DrillReminder
from cluster.server.mail.mailer import Mailer as Mailer
from cluster.server.mail.sending import Undeliverable as Undeliverable
from cluster.server.mail.sending import post_of as post_of
from cluster.server.mail.sending import sender_of as sender_of

__all__ = ["DrillReminder", "Mailer", "Undeliverable", "post_of", "sender_of"]

"""Mail about jobs and due drills: content, sending, and the leader's duty."""

from forebay.cluster.server.mail.drill_reminder import DrillReminder as DrillReminder
from forebay.cluster.server.mail.mailer import Mailer as Mailer
from forebay.cluster.server.mail.sending import Undeliverable as Undeliverable
from forebay.cluster.server.mail.sending import post_of as post_of
from forebay.cluster.server.mail.sending import sender_of as sender_of

__all__ = ["DrillReminder", "Mailer", "Undeliverable", "post_of", "sender_of"]

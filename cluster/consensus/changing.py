"""How membership changes (thesis 4), and how leadership is handed over (thesis 3.10): admission by the leader (H12)."""

import logging
from typing import Any, Final

from cluster.consensus.changes import Wanted, following
from cluster.consensus.configurations import may_be_later
from cluster.consensus.core import NEVER, SEQ_BITS, first_seq
from cluster.consensus.frames import AnyMessage, Removed, TimeoutNow
from cluster.consensus.interface import ChangeRefused, NotLeader, RemovedFromCluster, Role
from cluster.consensus.leading import Leading
from cluster.consensus.progress import Phase
from wal import Action, Configuration, Entry, encode_configuration, incarnation_of, name_of

_log = logging.getLogger(__name__)

PROMOTION_LAG_ENTRIES: Final = 64
"""Entries that a learner may be behind the commit index when it gets its vote: it would hold up commits for as long as
it needs for them, which is less than a heartbeat."""

HEIR_LAG_ENTRIES: Final = 512
"""Entries that the next leader may be behind when a transfer begins; nothing new is taken until it has them, so what it
misses must fit into a fraction of an election timeout. One append request."""


FORSAKEN_TIMEOUTS: Final = 5
"""How many of the longest election timeouts without a leader make a replica ask strangers too whether it is out."""


class Changing(Leading):
    """One change at a time, each committed and applied before the next; quorums of neighbours always meet."""

    def __init__(self, **given: Any) -> None:
        self._heir: str | None = None
        """Who is to lead next; None when no transfer is under way."""
        self._heir_told = False
        self._heir_deadline_s = NEVER
        super().__init__(**given)

    @property
    def ready(self) -> bool:
        """Whether a leader may take proposals: its own first entry is applied, and it does not hand over."""
        return self._has_begun and self._heir is None

    @property
    def hands_over(self) -> bool:
        """Whether a transfer of leadership is under way."""
        return self._heir is not None

    # ---- changes of membership ----

    def change(self, wanted: Wanted) -> tuple[int, int]:
        """Append the configuration that `wanted` makes; return (index, term). It is in force at once.

        NotLeader; ChangeRefused while another one is not committed and applied, for a learner that is not close enough,
        for a leader that would remove itself, and where too few of the voters that are left answer.
        """
        self._require_ready()
        if self._members.index > self.applied_index:
            raise ChangeRefused("change_under_way", "another change of the members is under way", "try again shortly")
        if self.configuration.version == 0:
            raise ChangeRefused("not_founded", "the cluster is not founded yet", "try again shortly")
        configuration = following(self.configuration, wanted, at=self._clock.now())
        self._admit(wanted, configuration)
        index = self._journal.last_index + 1
        with self._stopping_at_an_exception():
            self._append([Entry(index, self.term, encode_configuration(configuration))])
        who = name_of(configuration.change.member or "")
        _log.info("%s of %s: version %d of the configuration", wanted.action.word, who, configuration.version)
        return index, self.term

    def promotable(self) -> str | None:
        """Return a learner that `change` would promote now; None if there is none."""
        if not self._leads or not self.ready or self._members.index > self.applied_index:
            return None
        return next((one.id for one in self.configuration.learners if self._has_caught_up(one.id)), None)

    def _admit(self, wanted: Wanted, configuration: Configuration) -> None:
        me = self.configuration.member(self.me)
        if me is not None and not configuration.votes(me.id):
            raise ChangeRefused("leader", f"{me.name} leads", "transfer the leadership first")
        if wanted.action is Action.PROMOTE:
            subject = configuration.change.member or ""
            if not self._has_caught_up(subject):
                raise ChangeRefused(
                    "lagging", f"{name_of(subject)} has not caught up", "wait until it is close to the leader"
                )
        if configuration.voter_ids == self.configuration.voter_ids:
            return
        answering = sum(1 for one in configuration.voters if one.id == self.me or self._answers(one.id))
        if answering < configuration.majority:
            raise ChangeRefused(
                "no_majority",
                f"only {answering} of the {len(configuration.voters)} voters that there would be answer now, which is "
                f"no majority",
                "bring back those that do not answer, or remove them first",
            )

    def _answers(self, peer: str) -> bool:
        """Whether a peer answered this leader within the shortest election timeout."""
        known = self._progress[peer]
        silent_s = self._clock.monotonic_s() - known.answered_s
        return self._is_connected(peer) and known.acked_seq > 0 and silent_s < self._timing.election_min_s

    def _has_caught_up(self, peer: str) -> bool:
        known = self._progress[peer]
        behind = self.commit_index - known.match
        return known.phase is Phase.REPLICATE and behind <= PROMOTION_LAG_ENTRIES and self._answers(peer)

    # ---- who is no member (any more) ----

    def _concerns(self, peer: str, message: AnyMessage) -> bool:
        """Say whether a message is of somebody who counts; tell a replica that was removed that it was.

        Members of a configuration that a truncation could bring back count, and so does whoever may have been added by
        one that this replica has not heard of yet: it may lead.
        """
        if peer in self._progress:
            return True  # a member in force
        committed = self._members.committed(self.commit_index)
        if not committed.voters:
            return True  # this replica joins, and everybody knows more than it does
        if any(known.holds(peer) for known in self._members.known()) or may_be_later(peer, committed):
            return True
        if committed.version > 0 and not isinstance(message, Removed):
            self._send(peer, Removed(self.term, message.seq, committed.version))
        return False

    def _on_removed(self, peer: str, notice: Removed) -> None:
        """A peer says that this replica is out. Ids are never given again, so what a later version says is final.

        It must be one whom this replica knows for a member, unless it knows no voters or itself not for one: a removed
        replica has a certificate still, and can speak as somebody who may have been added later. Only where nobody has
        led for long a stranger is believed: all whom this replica knew may have left meanwhile.

        The notice has the number of what was said. One that is of no request of this member's, nor of a founder's
        leader to a founder, may be meant for its predecessor at this address; what it asks itself is answered soon.
        """
        if notice.seq >> SEQ_BITS != first_seq(self.me) >> SEQ_BITS:
            return
        known = self._members.known()
        is_member = any(each.holds(self.me) for each in known)
        is_stranger = bool(self.configuration.voters) and not any(each.holds(peer) for each in known)
        if is_member and is_stranger and not self._is_forsaken():
            return
        newer = notice.version > self.configuration.version or not self.configuration.holds(self.me)
        if newer and notice.version >= max(1, incarnation_of(self.me)):
            raise RemovedFromCluster(name_of(self.me), notice.version)

    def _is_forsaken(self) -> bool:
        """Say whether nobody has led this replica for so long that its members may all have left."""
        silence_s = self._clock.monotonic_s() - self._led_s
        return not self._leads and silence_s > FORSAKEN_TIMEOUTS * self._timing.election_max_s

    def _leave_if_removed(self) -> None:
        """Stop if the configuration that was just applied is later than the one that added this replica, without it."""
        committed = self._members.committed(self.commit_index)
        if committed.version >= max(1, incarnation_of(self.me)) and not committed.holds(self.me):
            raise RemovedFromCluster(name_of(self.me), committed.version)

    # ---- leadership transfer ----

    def transfer(self, target: str | None = None) -> str:
        """Begin to hand leadership over to `target`, a name or an id, or to the best voter; return the heir's id.

        Nothing new is proposed from now on; the heir stands as soon as it has everything. If it does not win within an
        election timeout this replica goes on. NotLeader; ChangeRefused for somebody who does not vote, does not answer
        or lags.
        """
        if self._leads and self._heir is not None and target in (None, self._heir, name_of(self._heir)):
            return self._heir
        self._require_ready()
        heir = self._best_heir() if target is None else self._checked_heir(target)
        self._heir, self._heir_told = heir, False
        self._heir_deadline_s = self._clock.monotonic_s() + self._timing.election_max_s
        _log.info("%s hands the leadership over to %s", self.me, heir)
        return heir

    def _best_heir(self) -> str:
        voters = [peer for peer in self.configuration.voter_ids if peer != self.me and self._answers(peer)]
        if not voters:
            raise ChangeRefused("no_heir", "no other voter answers", "wait until one does")
        return self._checked_heir(max(voters, key=lambda peer: self._progress[peer].match))

    def _checked_heir(self, target: str) -> str:
        member = self.configuration.member(target)
        if member is None:
            raise ChangeRefused("unknown_member", f"there is no replica {target!r}", "name a member")
        if member.id == self.me:
            raise ChangeRefused("leader", f"{member.name} leads already", "name another replica")
        if not self.configuration.votes(member.id):
            raise ChangeRefused("learner", f"{member.name} does not vote yet", "wait until it has caught up")
        known = self._progress[member.id]
        behind = self._journal.last_index - known.match
        if not self._answers(member.id):
            raise ChangeRefused("silent", f"{member.name} does not answer", "name one that does")
        if known.phase is not Phase.REPLICATE or behind > HEIR_LAG_ENTRIES:
            raise ChangeRefused("lagging", f"{member.name} is {behind} entries behind", "wait until it has caught up")
        return member.id

    def _hand_over(self, now_s: float) -> None:
        """Tell the heir to stand once it has everything; give up if that takes too long."""
        heir = self._heir
        if heir is None:
            return
        known = self._progress.get(heir)
        if now_s >= self._heir_deadline_s or known is None:
            _log.warning("%s did not take over from %s, which goes on leading", heir, self.me)
            self._end_hand_over()
        elif not self._heir_told and known.match == self._journal.last_index:
            self._heir_told = True
            self._send(heir, TimeoutNow(self.term, self._next_seq()))

    def _end_hand_over(self) -> None:
        self._heir, self._heir_told, self._heir_deadline_s = None, False, NEVER

    def _after_leading(self) -> None:
        self._end_hand_over()
        super()._after_leading()

    def _on_timeout_now(self, peer: str, message: TimeoutNow) -> None:
        """Stand without asking first: the leader that lives wants it."""
        if message.term == self.term and self.role is Role.FOLLOWER and self.leader == peer and self._votes_here:
            self._stand(transfer=True)

    def _require_ready(self) -> None:
        self._require_running()
        if not self._leads:
            raise NotLeader(self.leader)
        if self._heir is not None:
            raise NotLeader(self._heir, sentence=f"this replica hands the leadership over to {name_of(self._heir)}")
        if not self.ready:
            raise NotLeader(self.me, sentence="this replica leads, but has not applied its own first entry yet")

"""How a leader is chosen (sections 5.2 and 5.4.1), without disturbing one that lives (pre-vote: thesis 9.6; H14)."""

import logging
from typing import Any, Final

from cluster.consensus.core import NEVER, Core
from cluster.consensus.frames import VoteReply, VoteRequest
from cluster.consensus.interface import Role

_log = logging.getLogger(__name__)

TERM_JUMP_MAX: Final = 1 << 32
"""How far above one's own term that of somebody may be whom one does not know for a member yet, but who may have been
added: with an election a second, a century of them."""

TERM_HIGH: Final = 1 << 61
TERM_STEP_MAX: Final = 1 << 10
"""Terms above TERM_HIGH, half of what a frame can say (`frames.Number`), are taken in steps of so much at most, whoever
speaks of them: terms only ever grow, and no frame may use them up. Standing goes on from whatever was taken."""

SOON_SHARE: Final = (0.1, 0.6)
"""When the leader's link breaks, a follower stands after this share of the shortest election timeout, at random."""

FIRST_SHARE: Final = 0.5
"""The part of the range of election timeouts from which the followers of a leader draw, each from a share of its own.
One stands first then, and has won before the next one's patience ends; whatever goes wrong is drawn from all of it."""

SKEW_HEARTBEATS: Final = 0.5
"""How much less than the shortest election timeout, in heartbeats, a leader's silence must have lasted for somebody
who is asked: the last heartbeat came a little later here, or the first to stand would be told to wait."""


class Elections(Core):
    """Ask first, then stand; grant to whoever has a journal at least as complete, once a term."""

    def __init__(self, **given: Any) -> None:
        self._votes: set[str] = set()
        self._asking_first = False
        self._campaign_seq = 0
        super().__init__(**given)

    def lost_sight(self, peer: str) -> None:
        """The link from `peer` broke. If it led, it is probably dead: ask around soon, not after a whole timeout."""
        if self.role is Role.FOLLOWER and self.leader == peer and self._votes_here:
            self._leader_heard_s = -NEVER
            self._hasten_election(self._uniform(*SOON_SHARE) * self._timing.election_min_s)

    def _may_be_reached(self, peer: str, term: int) -> bool:
        """Say whether a term can be that of this cluster, as far as this replica can tell.

        A known member may be further ahead than a stranger: where somebody brought it there, the others must follow it,
        or it would be out of their reach for good. Who joins knows nobody, and learns from the others where they are.
        """
        if term > TERM_HIGH:
            reach = TERM_STEP_MAX
        elif not self.configuration.voters or any(known.holds(peer) for known in self._members.known()):
            return True
        else:
            reach = TERM_JUMP_MAX
        if term - self.term <= reach:
            return True
        more = self._seldom.due(peer, "term")
        if more is not None:
            _log.error(
                "%s speaks of term %d, and this replica is in term %d: no elections lead there, so it is not heeded%s",
                peer,
                term,
                self.term,
                more,
            )
        return False

    def _election_range_s(self) -> tuple[float, float]:
        """Return where to draw the timeout from: followers of one leader, in the order of their ids, do not overlap.

        Randomness alone decides wherever they may disagree about who leads and who votes, and at every further attempt.
        """
        least_s, most_s = self._timing.election_min_s, self._timing.election_max_s
        heirs = [voter for voter in self.configuration.voter_ids if voter != self.leader]
        if self.role is not Role.FOLLOWER or self.leader is None or self.me not in heirs:
            return least_s, most_s
        share_s = FIRST_SHARE * (most_s - least_s) / len(heirs)
        first_s = least_s + heirs.index(self.me) * share_s
        return first_s, first_s + share_s

    def _ask_first(self) -> None:
        """Ask whether a majority would vote for this replica, before a new term disturbs anybody."""
        self._set_role(Role.CANDIDATE, None)
        self._leader_ready = False
        self._asking_first = True
        self._ask_for_votes()

    def _ask_around(self) -> None:
        """Ask as somebody who may not lead: no answer counts, but who was removed is told so."""
        self._follow(None)
        self._postpone_election()
        self._grace_given = False
        self._request_votes(pre=True, transfer=False)

    def _stand(self, *, transfer: bool = False) -> None:
        self._set_role(Role.CANDIDATE, None)
        self._leader_ready = False
        self._asking_first = False
        self._enter_term(self.term + 1, self.me)
        self._ask_for_votes(transfer=transfer)

    def _ask_for_votes(self, *, transfer: bool = False) -> None:
        self._postpone_election()
        self._grace_given = False
        # A set of names: the stock engine counts messages, so that a vote delivered twice counts twice.
        self._votes = {self.me}
        self._request_votes(pre=self._asking_first, transfer=transfer)
        self._count_votes()

    def _request_votes(self, *, pre: bool, transfer: bool) -> None:
        seq = self._campaign_seq = self._next_seq()
        last_index, last_term = self._journal.last_index, self._journal.last_term
        for peer in self.configuration.voter_ids:
            if peer != self.me:
                self._send(peer, VoteRequest(self.term, seq, last_index, last_term, pre, transfer))

    def _count_votes(self) -> None:
        # By the configuration in force: who learns, or was removed, may have answered, but does not count.
        voters = self.configuration.voter_ids
        if self.me in voters and len(self._votes.intersection(voters)) >= self.configuration.majority:
            if self._asking_first:
                self._stand()
            else:
                self._become_leader()

    def _hears_leader(self, besides: str) -> bool:
        """Whether a leader other than `besides` lives, as far as this replica can tell."""
        if self._leads:
            return True
        silence_s = self._clock.monotonic_s() - self._leader_heard_s
        recent = silence_s < self._timing.election_min_s - SKEW_HEARTBEATS * self._timing.heartbeat_s
        return recent and self.leader not in (None, besides)

    def _on_vote_request(self, peer: str, request: VoteRequest) -> None:
        if request.term < self.term:
            self._send(peer, VoteReply(self.term, request.seq, False, request.pre))
            return
        if not self.configuration.voters:
            return  # it joins, and knows nothing yet: not even whether it was somebody else before
        if self._hears_leader(besides=peer) and not (request.transfer and not request.pre):
            return
        if not request.pre and request.term > self.term:
            self._adopt_term(request.term)
        own = (self._journal.last_term, self._journal.last_index)
        granted = (request.last_term, request.last_index) >= own
        if not request.pre:
            granted = granted and self._voted_for in (None, peer)
            if granted:
                if self._voted_for is None:
                    self._set_term(self.term, peer)
                self._postpone_election()
        self._send(peer, VoteReply(self.term, request.seq, granted, request.pre))

    def _on_vote_reply(self, peer: str, reply: VoteReply) -> None:
        if self.role is not Role.CANDIDATE or (reply.seq, reply.pre) != (self._campaign_seq, self._asking_first):
            return
        if reply.granted and (reply.pre or reply.term == self.term):
            self._votes.add(peer)
            self._count_votes()

"""The answers about the feature level, beside those of `cluster.client.views`."""

from cluster.client.views import View


class MemberLevelView(View, frozen=True, kw_only=True):
    """One replica in the answer about the feature level."""

    name: str
    id: str
    votes: bool = True
    known: int | None
    """The highest feature level that it knows; null if it did not answer."""
    version: str = ""


class FeatureLevelAnswer(View, frozen=True, kw_only=True):
    """Answer of GET and POST /v1/feature-level: where the cluster is, and who knows what."""

    revision: int
    feature_level: int
    release: str
    """The first release that knows the cluster's level; an earlier one stops."""
    next_level: int | None = None
    """What it may be raised to, as far as the replica that answers knows; null: nothing further."""
    next_release: str = ""
    next_brings: str = ""
    """What it then allows, in words."""
    may_be_raised: bool = False
    """Whether every member knows the next level."""
    members: tuple[MemberLevelView, ...] = ()

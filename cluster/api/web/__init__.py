"""HTTP over mutual TLS: connections, bodies, who asks, problems, the OpenAPI document."""

from cluster.api.web.authentication import actor_of, not_identified, permit, permit_node
from cluster.api.web.bodies import LONG_CHARACTERS, QUERY_CHARACTERS_MAX, BodyBudget, bad_body, decode, read_body
from cluster.api.web.connections import (
    FIXED_HEADERS,
    SWEEP_PERIOD_S,
    Connection,
    GuardedServer,
)
from cluster.api.web.exchange import (
    COMMIT_WAIT_S,
    Asked,
    CommandAsker,
    Core,
    Part,
    Prepared,
    Program,
    Response,
    Stream,
)
from cluster.api.web.limits import UserLimits
from cluster.api.web.openapi import document
from cluster.api.web.problems import (
    COMMAND_TOO_OLD,
    Problem,
    Redirect,
    bad,
    denied,
    no_leader,
    outcome_unknown,
    queue_full,
    refused,
    too_busy,
    too_many,
    too_many_answers,
    unforeseen,
    unknown_job,
)
from cluster.api.web.routing import check_query, find_operation
from cluster.api.web.vouching import AccessRules, Voucher, Vouching, not_named

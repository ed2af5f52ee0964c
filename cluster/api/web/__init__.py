"""HTTP over mutual TLS: connections, bodies, authentication, errors, the OpenAPI document."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.web.authentication import actor_of, not_identified, permit, permit_node
    from forebay.cluster.api.web.bodies import (
        QUERY_CHARACTERS_MAX,
        BodyBudget,
        body_problem,
        decode,
        read_body,
    )
    from forebay.cluster.api.web.connections import (
        FIXED_HEADERS,
        SWEEP_PERIOD_S,
        ApiConnection,
        GuardedServer,
    )
    from forebay.cluster.api.web.exchange import (
        COMMIT_WAIT_S,
        LONG_CHARACTERS,
        ApiRequest,
        Backend,
        CommandClient,
        DecodedSubmit,
        Program,
        Response,
        Stream,
        StreamChunk,
    )
    from forebay.cluster.api.web.identity_assertion import AccessRules, IdentityAssertions, Voucher, unidentified_client
    from forebay.cluster.api.web.limits import UserLimits
    from forebay.cluster.api.web.openapi import document
    from forebay.cluster.api.web.problems import (
        COMMAND_TOO_OLD,
        Problem,
        Redirect,
        bad_request,
        internal_error,
        no_leader,
        outcome_unknown,
        permission_denied,
        queue_full,
        rejection_problem,
        too_busy,
        too_many,
        too_many_answers,
        unknown_job,
    )
    from forebay.cluster.api.web.routing import check_query, find_operation
else:
    __getattr__ = export_lazily(__name__)

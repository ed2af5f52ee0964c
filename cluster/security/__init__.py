"""Who is who: certificates, identities, mutual TLS."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.security.certificates import certificate_of, certificates_in, expiries
    from cluster.security.credentials import Credentials
    from cluster.security.glance import context_of
    from cluster.security.identity import (
        AUTHORITY_NAME,
        HELPER_HOST,
        NAME_RULE,
        Identity,
        NotIdentified,
        Role,
        identify,
        is_name,
    )
    from cluster.security.peers import PeerCertificate, Peers, certificate_shown
    from cluster.security.pki import (
        CERTIFICATE_LIFETIME_DAYS,
        CERTIFICATE_MODE,
        SHARED_DIRECTORY_MODE,
        Authority,
        PkiRefused,
        create_authority,
        issue,
        load_authority,
        renew_authority,
        retire_authorities,
    )
    from cluster.security.tls import (
        TlsFiles,
        TlsRefused,
        check_validity,
        client_context,
        describe_authority,
        describe_certificate,
        find_unsafe_keys,
        is_there,
        open_client_context,
        open_server_context,
        server_context,
        until_valid,
        valid_until,
    )
else:
    __getattr__ = shown(
        __name__,
        """
        certificates: certificate_of certificates_in expiries
        credentials: Credentials
        glance: context_of
        identity: AUTHORITY_NAME HELPER_HOST NAME_RULE Identity NotIdentified Role identify is_name
        peers: PeerCertificate Peers certificate_shown
        pki: CERTIFICATE_LIFETIME_DAYS CERTIFICATE_MODE SHARED_DIRECTORY_MODE Authority PkiRefused create_authority
        pki: issue load_authority renew_authority retire_authorities
        tls: TlsFiles TlsRefused check_validity client_context describe_authority describe_certificate
        tls: find_unsafe_keys is_there open_client_context open_server_context server_context until_valid valid_until
        """,
    )

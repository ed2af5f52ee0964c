"""Who is who: certificates, identities, mutual TLS."""

from cluster.security.certificates import certificate_of, certificates_in
from cluster.security.credentials import Credentials
from cluster.security.identity import NAME_RULE, Identity, NotIdentified, Role, identify, is_name
from cluster.security.peers import PeerCertificate, Peers, certificate_shown
from cluster.security.pki import (
    AUTHORITY_NAME,
    CERTIFICATE_LIFETIME_DAYS,
    CERTIFICATE_MODE,
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
    server_context,
    until_valid,
)

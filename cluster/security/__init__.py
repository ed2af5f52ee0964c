"""Authentication: certificates, roles, and mutual TLS."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.security.certificates import Certificate, certificate_of, certificates_in, expiries
    from forebay.cluster.security.credentials import Credentials
    from forebay.cluster.security.files import (
        NO_CERTIFICATE,
        TlsError,
        TlsFiles,
        find_unsafe_keys,
        is_there,
        unsafe_key,
    )
    from forebay.cluster.security.identity import (
        AUTHORITY_NAME,
        HELPER_HOST,
        NAME_RULE,
        Identity,
        IdentityError,
        Role,
        identify,
        is_name,
    )
    from forebay.cluster.security.munge import SCHEME, Munge, MungeCredential, MungeError, MungeUnavailable, purpose_of
    from forebay.cluster.security.peers import THROUGH_MUNGE, PeerCertificate, Peers, certificate_shown, revocable_as
    from forebay.cluster.security.pki import (
        CERTIFICATE_LIFETIME_DAYS,
        CERTIFICATE_MODE,
        SHARED_DIRECTORY_MODE,
        Authority,
        PkiError,
        create_authority,
        issue,
        load_authority,
        renew_authority,
        retire_authorities,
    )
    from forebay.cluster.security.quick_check import context_of
    from forebay.cluster.security.tls import (
        authority_context,
        check_validity,
        client_context,
        describe_authority,
        describe_certificate,
        open_client_context,
        open_server_context,
        read_secret,
        server_context,
        until_valid,
        valid_until,
    )
else:
    __getattr__ = export_lazily(__name__)

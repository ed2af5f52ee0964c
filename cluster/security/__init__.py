"""Who is who: certificates, identities, mutual TLS."""

"""HTTP over mutual TLS: connections, bodies, who asks, problems, the OpenAPI document."""

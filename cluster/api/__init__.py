"""The public face of a replica: HTTP and JSON under `/v1`, over mutual TLS. DESIGN.md beside this file explains it."""

from cluster.api.http.server import Server
from cluster.api.service import Service

__all__ = ["Server", "Service"]

"""The public face of a replica: HTTP and JSON under `/v1`, over mutual TLS. DESIGN.md beside this file explains it."""

from cluster.api.channel import ChannelServer
from cluster.api.server import Server
from cluster.api.service import Service

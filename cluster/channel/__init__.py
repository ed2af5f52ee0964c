"""The pipelined MessagePack channel of a replica, for programs that send many commands. See DESIGN.md beside this."""

from cluster.api.channel import ChannelServer

__all__ = ["ChannelServer"]

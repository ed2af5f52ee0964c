"""Faults allowed by a machine's configuration, by scenario and target."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from forebay.cluster.config import Config, HelperConfig
from forebay.cluster.drills.helper.faults import (
    Cut,
    Fault,
    Fill,
    Kill,
    Stop,
    ThisMachine,
    disk_fault,
    nft_fault,
    running,
)
from forebay.cluster.drills.helper.messages import AGENTS, NEEDS, HelperRefused
from forebay.cluster.drills.helper.throttling import throttle_of


def fault_of(config: Config, helper: HelperConfig, scenario: str, target: str, number: int) -> Fault:
    """Return the fault of a drill.

    The call changes nothing, but may block, because it reads files and resolves host names.

    Raises:
        HelperRefused: A setting forbids the fault; the message names it.
    """
    if scenario not in NEEDS:
        raise HelperRefused(f"no helper supports {scenario}", f"use one of: {', '.join(NEEDS)}")
    needed = NEEDS[scenario]
    if needed not in config.drill.allow:
        remedy = f'write allow = ["{needed}"] in [drill] of that machine\'s forebay.toml, and start its helper again'
        raise HelperRefused(f"the machine of helper {helper.name} does not permit {needed} faults", remedy)
    if target not in helper.targets:
        remedy = f"its targets are: {', '.join(helper.targets) or 'none'}"
        raise HelperRefused(f"{target} is not a target of helper {helper.name}", remedy)
    is_agent = target not in {replica.name for replica in config.replicas}
    if is_agent is not (scenario in AGENTS):
        kind = "an agent" if scenario in AGENTS else "a replica"
        raise HelperRefused(f"{scenario} requires {kind} as target, and {target} is not {kind}", "name another target")
    directory = config.agent(target).directory if is_agent else config.wal_directory(target)
    if needed == "network":
        return _cut(config, helper, scenario, target, number)
    if scenario == "slow-disk":
        return throttle_of(running(target, str(directory), ThisMachine()), directory)
    if needed == "disk":
        home = config.storage.directory / target
        fault = disk_fault(home)
        if fault:
            raise HelperRefused(fault, "give the replica a file system of its own, and plan the drill again")
        return Fill(str(home / f"drill-{number}.fill"), str(directory), target, config.drill.start)
    if scenario.endswith("-kill"):
        return Kill(str(directory), target, config.drill.start)
    return Stop(str(directory))


def _cut(config: Config, helper: HelperConfig, scenario: str, target: str, number: int) -> Cut:
    fault = nft_fault()
    if fault:
        raise HelperRefused(fault, "install nftables, and run the helper as root")
    mine = config.replica(target)
    others = [replica for replica in config.replicas if replica.name != target]
    here = _addresses({mine.peer.host, mine.api.host})
    there = _addresses({host for one in others for host in (one.peer.host, one.api.host)})
    shared = sorted(here & there)
    if shared:
        remedy = "choose a replica that has its own machine"
        raise HelperRefused(f"{target} shares the address {shared[0]} with another replica", remedy)
    table = f"forebay_drill_{number}"
    own = _ports(port.port for port in (mine.peer, mine.api, mine.channel) if port is not None)
    theirs = _ports(port.port for one in others for port in (one.peer, one.api, one.channel) if port is not None)
    arriving, leaving = list[str](), list[str]()
    for family, addresses in (
        ("ip", [one for one in there if ":" not in one]),
        ("ip6", [one for one in there if ":" in one]),
    ):
        if addresses:
            listed = "{ " + ", ".join(sorted(addresses)) + " }"
            arriving += [
                f"{family} saddr {listed} tcp dport {own} drop",
                f"{family} saddr {listed} tcp sport {theirs} drop",
            ]
            leaving += [
                f"{family} daddr {listed} tcp sport {own} drop",
                f"{family} daddr {listed} tcp dport {theirs} drop",
            ]
    if scenario == "partition":
        arriving.append(f"tcp dport {own} drop")
        leaving.append(f"tcp sport {own} drop")
    # Keep the helper's port open: the coordinator may renew the lease from the machine of another replica.
    arriving.insert(0, f"tcp dport {helper.address.port} accept")
    leaving.insert(0, f"tcp sport {helper.address.port} accept")
    chains = [
        *([_chain("arriving", "input", arriving)] if scenario != "partition-out" else []),
        *([_chain("leaving", "output", leaving)] if scenario != "partition-in" else []),
    ]
    return Cut(table, f"table inet {table} {{\n{''.join(chains)}}}\n")


def _chain(name: str, hook: str, rules: list[str]) -> str:
    body = "".join(f"    {rule}\n" for rule in rules)
    return f"  chain {name} {{\n    type filter hook {hook} priority -10; policy accept;\n{body}  }}\n"


def _ports(numbers: Iterable[int]) -> str:
    return "{ " + ", ".join(map(str, sorted(set(numbers)))) + " }"


def _addresses(hosts: Iterable[str]) -> set[str]:
    """Return the addresses of hosts.

    Raises:
        HelperRefused: A host name cannot be resolved.
    """
    found = set[str]()
    for host in sorted(hosts):
        try:
            found |= {str(ipaddress.ip_address(info[4][0])) for info in socket.getaddrinfo(host, None)}
        except (OSError, ValueError) as error:
            raise HelperRefused(
                f"the address of {host} cannot be resolved on this machine ({error})", "see [[replica]]"
            ) from error
    return found

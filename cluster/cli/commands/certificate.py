"""Commands `forebay cert …`: issue, list and revoke certificates, and renew the authority."""

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import click
import msgspec

from forebay.cluster.cli.confirmation import confirm_first
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import format_time, note, present, show, show_json, table
from forebay.cluster.config import OPERATOR_NAME, Config, replica_hosts
from forebay.cluster.schemas import made_of
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import (
    AUTHORITY_NAME,
    CERTIFICATE_MODE,
    NAME_RULE,
    PkiError,
    Role,
    certificate_of,
    certificates_in,
    is_name,
    issue,
    load_authority,
    renew_authority,
    retire_authorities,
)
from forebay.cluster.system import format_instant, replace_private
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, plain

EXPIRY_NOTICE_DAYS: Final = 60
"""Remaining validity below which `cert list` warns, days: time for two maintenance windows."""

_DAY: Final = 24 * 3600 * MICROSECONDS_PER_SECOND


T = TypeVar("T")


class CertificateRow(msgspec.Struct, frozen=True, kw_only=True):
    """Certificate as `cert list --json` prints it; times are ISO 8601 in UTC."""

    name: str
    role: str
    valid_from: str | None
    valid_until: str | None
    addresses: tuple[str, ...]
    serial: str
    has_key: bool
    problem: str


class CertificatesAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `cert list --json`."""

    directory: str
    certificates: tuple[CertificateRow, ...]


class IssuedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `cert issue --json`."""

    certificate: str
    key: str
    valid_until: str | None


class AuthorityAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Output of `cert renew-authority --json` and `retire-authority --json`."""

    authority: str
    """File with the trusted authorities."""
    valid_until: str | None = None
    """End of the new authority's validity."""
    retired: int = 0
    """Number of authorities that are no longer trusted."""


@click.command("list")
@JSON_OPTION
def list_certificates(as_json: bool) -> None:
    """List the issued certificates and when they end."""
    current = session()
    directory = current.config().tls.certificates
    try:
        found = certificates_in(directory)
    except OSError as error:
        raise _unreadable(directory, error) from error
    if as_json:
        rows = tuple(
            made_of(
                one,
                CertificateRow,
                valid_from=format_instant(one.valid_from),
                valid_until=format_instant(one.valid_until),
            )
            for one in found
        )
        show_json(CertificatesAnswer(directory=str(directory), certificates=rows))
    else:
        show(
            table(
                ("NAME", "ROLE", "VALID-UNTIL", "KEY", "ADDRESSES"),
                (
                    (
                        one.name,
                        one.role,
                        format_time(format_instant(one.valid_until)),
                        "yes" if one.has_key else "no",
                        ",".join(one.addresses),
                    )
                    for one in found
                ),
                flexible=frozenset({"ADDRESSES"}),
            )
        )
    now = current.clock.now()
    for one in found:
        if one.problem:
            note(f"forebay: warning: {one.problem}")
        elif one.valid_until - now < EXPIRY_NOTICE_DAYS * _DAY:
            days = max(0, (one.valid_until - now) // _DAY)
            when = "has expired" if one.valid_until <= now else f"expires in {days} days"
            again = f"forebay cert issue {one.name} --role {one.role} --replace"
            note(f"forebay: warning: the certificate of {one.name} {when}: {again}")


@click.command("issue")
@click.argument("name")
@click.option(
    "--role", type=click.Choice([role.value for role in Role]), required=True, help="Set the role of the holder."
)
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Set an address of a replica; repeatable.  [default: the configured ones]",
)
@click.option("--replace", is_flag=True, help="Replace an existing certificate; the old one stays valid.")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    help="Write the certificate and ca.pem to this directory.  [default: the tls directory]",
)
@JSON_OPTION
def issue_certificate(
    name: str, role: str, hosts: tuple[str, ...], replace: bool, into: Path | None, as_json: bool
) -> None:
    """Issue a certificate (needs ca.key).

    A user needs a copy of forebay.toml and, in the same directory, a tls directory with ca.pem, the certificate and its
    key. Create the tls directory with --into, and make the user the owner of the key.
    """
    current = session()
    config = current.config()
    wanted = Role(role)
    hosts = _check(config, wanted, name, hosts)
    source, target = config.tls.authority.parent, into or config.tls.certificates
    try:
        known = certificate_of(target, name) if (target / f"{name}.pem").exists() else None
        if known is not None and known.role and known.role != role:
            raise bad_input(
                f"{name} already has a certificate as {_article(known.role)}: {target / name}.pem",
                "choose another name: a certificate keeps its role",
            )
        authority = load_authority(source)
        if authority.cluster_id != config.cluster.id:
            raise bad_input(
                f"the authority in {source} belongs to cluster {authority.cluster_id}",
                f"use the ca.key that was created with {config.file}",
            )
        files = issue(
            authority, target, role=wanted, name=name, at=current.clock.now(), addresses=hosts, replace=replace
        )
        beside, believed = target / f"{AUTHORITY_NAME}.pem", config.tls.authority.read_bytes()
        if not beside.exists() or beside.read_bytes() != believed:
            replace_private(beside, believed, mode=CERTIFICATE_MODE)
    except PermissionError as error:
        raise _unreadable(target, error) from error
    except PkiError as error:
        raise _pki_failure(error) from error
    until = format_instant(certificate_of(target, name).valid_until)
    issued = IssuedAnswer(certificate=str(files.certificate), key=str(files.key), valid_until=until)
    present(
        issued,
        as_json,
        lambda: (
            f"Issued {plain(issued.certificate)} and its key for {role} {plain(name)}, "
            f"valid until {format_time(until)[:10]}."
        ),
    )
    if into is not None and wanted in (Role.USER, Role.OPERATOR, Role.SCHEDULER):
        note(f"Next: give {into} to the user (chown -R), with a copy of {config.file.name} whose [tls] names it.")


@click.command("renew-authority")
@JSON_OPTION
def renew(as_json: bool) -> None:
    """Create a new key for the authority (needs ca.key).

    ca.pem then contains the new and the former certificate. Distribute it to every machine and user, then issue every
    certificate again, then retire the former authority.
    """
    current = session()
    directory = current.config().tls.authority.parent
    made = _run_on_authority(directory, lambda: renew_authority(directory, at=current.clock.now()))
    until = format_instant(Instant(int(made.certificate.not_valid_after_utc.timestamp()) * MICROSECONDS_PER_SECOND))
    file = str(directory / f"{AUTHORITY_NAME}.pem")
    present(
        AuthorityAnswer(authority=file, valid_until=until),
        as_json,
        lambda: f"Added a new authority to {plain(file)}, valid until {format_time(until)[:10]}.",
    )
    note(f"Next: copy {AUTHORITY_NAME}.pem to every machine and user, then issue all certificates again (--replace).")


@click.command("retire-authority")
@JSON_OPTION
@confirm_first("Stop trusting all certificates of the former authority?")
def retire(as_json: bool) -> None:
    """Stop trusting the former authority (needs ca.key).

    Only the certificate of ca.key stays in ca.pem.
    """
    directory = session().config().tls.authority.parent
    gone = _run_on_authority(directory, lambda: retire_authorities(directory))
    file = str(directory / f"{AUTHORITY_NAME}.pem")
    done = f"Removed the former authority from {plain(file)}." if gone else f"{plain(file)} has no former authority."
    present(AuthorityAnswer(authority=file, retired=gone), as_json, lambda: done)
    if gone:
        note(f"Next: copy {AUTHORITY_NAME}.pem to every machine and user; they then reject the former certificates.")


@click.command("revoke")
@click.argument("certificate", metavar="USER|FILE.pem|serial:NUMBER")
@click.option(
    "--role",
    type=click.Choice([role.value for role in Role]),
    default="user",
    show_default=True,
    help="Set the role of the holder.",
)
@click.option("--reason", default="", help="Set the reason shown in the list of revocations.")
@JSON_OPTION
def revoke_certificate(certificate: str, role: str, reason: str, as_json: bool) -> None:
    """Revoke certificates (operators).

    A FILE or serial:NUMBER revokes one certificate for the rest of its validity. A name revokes all present and future
    certificates of that holder, until `cert unrevoke`. All replicas close open connections within a second.
    """
    valid_until = None
    if certificate.endswith(".pem"):
        path = Path(certificate)
        found = certificate_of(path.parent, path.stem)
        if found.problem:
            raise bad_input(found.problem, "give the file of one certificate")
        certificate, valid_until = f"serial:{found.serial}", format_instant(found.valid_until)
    elif ":" not in certificate:
        certificate = f"{role}:{certificate}"
    answer = session().write(ops.REVOKE_CERTIFICATE, certificate=certificate, reason=reason, valid_until=valid_until)
    present(answer, as_json, lambda: f"Revoked {plain(certificate)}.")


@click.command("unrevoke")
@click.argument("certificate", metavar="user:NAME|serial:NUMBER")
@JSON_OPTION
def unrevoke_certificate(certificate: str, as_json: bool) -> None:
    """Cancel a revocation (operators)."""
    answer = session().write(ops.UNREVOKE_CERTIFICATE, certificate=certificate)
    present(answer, as_json, lambda: f"Cancelled the revocation of {plain(certificate)}.")


@click.command("revocations")
@JSON_OPTION
def list_revocations(as_json: bool) -> None:
    """List the revocations (operators)."""
    answer = session().read(ops.LIST_REVOCATIONS)
    if as_json:
        show_json(answer)
        return
    for row in answer.revocations:
        # No table, so that each line can be copied whole.
        until = f" until {format_time(row.until)}" if row.until else ""
        click.echo(
            plain(f"{row.certificate} since {format_time(row.at)}{until}, by {row.by}: {row.reason or 'no reason'}")
        )


def _check(config: Config, role: Role, name: str, hosts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the hosts for the certificate; warn if the configuration does not have the agent or helper yet.

    Raises:
        Failure: bad input, if the name is invalid or belongs to another role.
    """
    if not is_name(name) or name == AUTHORITY_NAME:
        raise bad_input(
            f"{name!r} is not a valid name", f"{NAME_RULE}; {AUTHORITY_NAME!r} is reserved for the authority"
        )
    replicas = {replica.name: replica for replica in config.replicas}
    agents = {agent.name for agent in config.agents}
    helpers = {helper.name for helper in config.helpers}
    roles = ((replicas, Role.REPLICA), (agents, Role.AGENT), (helpers, Role.HELPER))
    taken = {name: role for names, role in roles for name in names} | {OPERATOR_NAME: Role.OPERATOR}
    if taken.get(name, role) is not role:
        raise bad_input(f"{name} is {_article(taken[name])} in {config.file}", "choose another name")
    if role is Role.AGENT and name not in agents:
        note(f"forebay: warning: {config.file} has no agent {name!r} yet: add [[agent]] to it")
    if role is Role.HELPER and name not in helpers:
        note(f"forebay: warning: {config.file} has no helper {name!r} yet: add [[helper]] to it")
    if role is not Role.REPLICA or hosts:
        return hosts
    if name not in replicas:
        raise bad_input(f"{config.file} has no replica {name!r}", "give its address with --host", place="--host")
    return tuple(replica_hosts(replicas[name].peer, replicas[name].api))


def _run_on_authority(directory: Path, act: Callable[[], T]) -> T:
    """Call `act` and return its result.

    Raises:
        Failure: if the authority in `directory` cannot be read or used.
    """
    try:
        return act()
    except OSError as error:
        raise _unreadable(directory, error) from error
    except PkiError as error:
        raise _pki_failure(error) from error


def _pki_failure(error: PkiError) -> Failure:
    sentence, _, remedy = str(error).partition("; ")
    denied = isinstance(error.__cause__ and error.__cause__.__cause__, PermissionError)
    return Failure(ExitCode.PERMISSION_DENIED if denied else ExitCode.BAD_INPUT, sentence, _remedy(remedy))


def _article(role: str) -> str:
    return f"{'an' if role[:1] in 'ao' else 'a'} {role}"


def _remedy(text: str) -> str:
    if "ask to replace it" in text:
        return "add --replace to issue it again"
    return text or "run this on the machine with ca.key, as its owner"


def _unreadable(directory: Path, error: OSError) -> Failure:
    code = ExitCode.PERMISSION_DENIED if isinstance(error, PermissionError) else ExitCode.NOT_FOUND
    place = error.filename or directory
    return Failure(code, f"{place}: {error.strerror}", "run this as the owner of the certificate directory")

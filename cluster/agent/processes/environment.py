"""Setup of a job's script: account, environment, working directory and output files.

In mode `own` everything runs as the agent's account. In mode `switch`, which needs root, code that touches a job's
files runs as the job's user.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Callable, Iterator
from typing import Final, Literal, NamedTuple, NoReturn

from forebay.cluster.agent.files import (
    PERSISTENT,
    VARIABLES,
    FileIdentity,
    PathRefused,
    kind_of,
    open_as_user,
)
from forebay.cluster.agent.processes.job_processes import SCRIPT_VARIABLE
from forebay.cluster.system import JobProcess, closing, forgo, limit, prepare, reset
from forebay.replica.model import (
    NO_OPTIONS,
    WHOLE_BUFFER,
    Access,
    Order,
    OrderFilesystem,
    named_variables,
    persistent_variable,
)

Mode = Literal["own", "switch"]

DEFAULT_SHELL: Final = "/bin/sh"


class AccountRefused(Exception):
    """The account cannot be used; the message names the user."""


class UnixAccount(NamedTuple):
    """User account on this machine."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    switch: bool
    """True if a process has to switch to this account."""


def account_for(mode: Mode, user: str) -> UnixAccount:
    """Return the account for the operations of `user`'s jobs.

    Raises:
        AccountRefused: The user does not exist here or is root.
    """
    if mode == "own":
        try:
            found = pwd.getpwuid(os.geteuid())
        except KeyError:
            return UnixAccount(str(os.geteuid()), os.geteuid(), os.getegid(), "/", DEFAULT_SHELL, False)
        return UnixAccount(
            found.pw_name, os.geteuid(), os.getegid(), found.pw_dir, found.pw_shell or DEFAULT_SHELL, False
        )
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        raise AccountRefused(f"the user {user!r} does not exist on this node; create the account") from None
    if found.pw_uid == 0:
        raise AccountRefused(
            f"the user {user!r} is root on this node, and jobs never run as root; submit as an ordinary user"
        )
    return UnixAccount(found.pw_name, found.pw_uid, found.pw_gid, found.pw_dir, found.pw_shell or DEFAULT_SHELL, True)


def load_accounts() -> None:
    """Preload the libraries that look up accounts and groups, as configured in /etc/nsswitch.conf.

    Processes forked later inherit them; loading is most of the cost of switching accounts.
    """
    with contextlib.suppress(KeyError, OSError):
        own = pwd.getpwuid(os.geteuid())
        os.getgrouplist(own.pw_name, own.pw_gid)


def become(account: UnixAccount, wanted: JobProcess) -> None:
    """Switch permanently to the account if it differs, keeping only the rights in `wanted`.

    The kernel clears a parent-death signal, so set it afterwards.

    Raises:
        OSError: The account cannot be switched to.
        AccountRefused: The switch had no effect or can be undone.
    """
    if not account.switch:
        return
    prepare(wanted)
    os.initgroups(account.name, account.gid)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if os.getresuid() != (account.uid,) * 3 or os.getresgid() != (account.gid,) * 3:
        raise AccountRefused(f"cannot switch to the user {account.name!r}")
    forgo(wanted)
    try:
        os.setresuid(0, 0, 0)
    except PermissionError:
        return
    raise AccountRefused(f"the user {account.name!r} could become root again; check the agent's capabilities")


@contextlib.contextmanager
def acting_as(uid: int, gid: int) -> Iterator[None]:
    """Access files with the rights of a user and group while in the context, if this process is root.

    The kernel clears a parent-death signal both times, so set it again inside and afterwards.

    Raises:
        OSError: The credentials cannot be changed.
    """
    if os.geteuid() or not uid:
        yield
        return
    group, groups = os.getegid(), os.getgroups()
    os.setgroups(_groups_of(uid, gid))
    try:
        os.setegid(gid)
        os.seteuid(uid)
        try:
            yield
        finally:
            os.seteuid(0)
            os.setegid(group)
    finally:
        os.setgroups(groups)


def _groups_of(uid: int, gid: int) -> list[int]:
    """Return the groups of a user; for a deleted account only the given group."""
    try:
        return os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)
    except KeyError:
        return [gid]


BASE_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BASE_LANG: Final = "C.UTF-8"

OUTPUT_MODE: Final = 0o644


class ScriptRefused(Exception):
    """The script cannot be started; `exit_code` follows shell conventions, the message gives the reason."""

    def __init__(self, exit_code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
        self.sentence = sentence


CANNOT_EXECUTE: Final = 126
NOT_FOUND: Final = 127


_OWNERS: Final = ("SLURM", "FOREBAY")
"""Prefixes of variables for Slurm scripts and of Forebay's own."""


def _job_variables(order: Order, account: UnixAccount, node: str) -> Iterator[tuple[str, str]]:
    """Yield the variables that describe the job, named as in sbatch's output environment."""
    options = order.options or NO_OPTIONS
    yield "JOB_ID", str(order.job)
    yield "JOB_NAME", order.name
    yield "JOB_USER", order.user
    yield "JOB_UID", str(account.uid)
    yield "JOB_GID", str(order.gid or account.gid)
    yield "JOB_NODELIST", node
    yield "JOB_NUM_NODES", "1"
    yield "JOB_CPUS_PER_NODE", str(order.cpus)
    yield "CPUS_PER_TASK", str(max(1, order.cpus // options.tasks))
    yield "CPUS_ON_NODE", str(order.cpus)
    yield "NTASKS", str(options.tasks)
    if options.tasks > 1:
        yield "NTASKS_PER_NODE", str(options.tasks)
    yield "SUBMIT_DIR", order.workdir
    asked = {
        "JOB_PARTITION": options.partition,
        "JOB_ACCOUNT": options.account,
        "JOB_QOS": options.qos,
        "JOB_RESERVATION": options.reservation,
    }
    yield from ((name, value) for name, value in asked.items() if value)
    if order.array is not None:
        yield "ARRAY_JOB_ID", str(order.array.job)
        yield "ARRAY_TASK_ID", str(order.array.task)


def environment_of(
    order: Order,
    account: UnixAccount,
    *,
    buffer: str,
    node: str,
    marker: str,
    paths: tuple[tuple[str, str], ...] = (),
) -> dict[str, str]:
    """Return the script's complete environment: a clean base, the job's own variables, then Forebay's, which take
    precedence.

    `paths` are the variables of an external provider.
    """
    environment = {
        "PATH": BASE_PATH,
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        "LANG": BASE_LANG,
    }
    environment.update(order.environment)
    for name in [name for name in environment if name.startswith(("FOREBAY_", "DW_JOB_", "SLURM_"))]:
        del environment[name]
    environment |= {
        f"{prefix}_{name}": value for name, value in _job_variables(order, account, node) for prefix in _OWNERS
    }
    tasks = (order.options or NO_OPTIONS).tasks
    environment |= {
        "FOREBAY_ATTEMPT": str(order.attempt),
        "FOREBAY_NODE": node,
        SCRIPT_VARIABLE: marker,
        "SLURM_JOBID": str(order.job),
        "SLURM_NODELIST": node,
        "SLURM_NNODES": "1",
        "SLURM_NPROCS": str(tasks),
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURMD_NODENAME": node,
    }
    if order.provision is not None:
        environment.update(paths)
    elif order.has_buffer:
        home = os.path.dirname(os.path.dirname(buffer))
        environment.update(persistent_variables(home, order.uses, order.persistent))
        # A job with only persistent buffers has no space of its own, so no capacity would apply.
        if order.capacity_bytes:
            modes = (f"DW_JOB_{access.upper()}" for access in order.access or ("striped",))
            for variable in (WHOLE_BUFFER, *modes):
                environment[variable] = os.path.join(buffer, *VARIABLES[variable])
            access = tuple(Access[word.upper()] for word in order.access) or (Access.STRIPED,)
            for name in order.names:
                for variable, mode in named_variables(name, access).items():
                    environment[variable] = os.path.join(buffer, *VARIABLES[mode], name)
    return environment


def persistent_variables(
    home: str, uses: tuple[str, ...], placed: tuple[tuple[str, OrderFilesystem], ...] = ()
) -> dict[str, str]:
    """Return the variables with the paths of persistent buffers, named as in DataWarp.

    `placed` locates buffers on shared filesystems; the others are in the agent's `home`.
    """
    filesystems = {name: os.path.join(filesystem.path, filesystem.directory) for name, filesystem in placed}
    return {persistent_variable(name): filesystems.get(name) or os.path.join(home, PERSISTENT, name) for name in uses}


def output_path(order: Order) -> str:
    """Return the absolute path of the standard output file."""
    name = order.output or f"forebay-{order.job}.out"
    return name if name.startswith("/") else f"{order.workdir.rstrip('/')}/{name}"


def become_script(
    script: str,
    order: Order,
    account: UnixAccount,
    environment: dict[str, str],
    *,
    home: FileIdentity,
    wanted: JobProcess,
    ready: Callable[[], None],
) -> NoReturn:
    """Switch to the job's account, enter its directory, open its files and execute the script.

    `ready` is called after the account switch. Only the resources in `wanted` are passed on.

    Raises:
        ScriptRefused: The script cannot be started.
    """
    limit(wanted)
    become(account, wanted)
    if not account.switch:
        prepare(wanted)
        forgo(wanted)
    ready()
    reset(wanted)
    try:
        _enter_workdir(order, home)
        append = order.options is not None and order.options.open_mode == "append"
        output = _open_output(output_path(order), home, append=append)
        # A file named for both outputs needs a single file position; otherwise each would overwrite the other.
        same = order.error in ("", output_path(order))
        error_output = output if same else _open_output(order.error, home, append=append)
        given = _open_input(order.input or os.devnull, home)
    except PathRefused as error:
        raise ScriptRefused(CANNOT_EXECUTE, str(error)) from error
    os.dup2(given, 0)
    os.dup2(output, 1)
    os.dup2(error_output, 2)
    arguments = order.options.arguments if order.options is not None else ()
    try:
        os.execve(script, [script, *arguments], environment)
    except FileNotFoundError as error:
        raise ScriptRefused(NOT_FOUND, "the interpreter in the script's #! line does not exist on this node") from error
    except OSError as error:
        if error.errno == 8:
            raise ScriptRefused(
                CANNOT_EXECUTE, "the script has no #! line; begin it with one, for example #!/bin/sh"
            ) from error
        raise ScriptRefused(CANNOT_EXECUTE, f"the script cannot be executed: {error.strerror}") from error
    except ValueError as error:
        raise ScriptRefused(CANNOT_EXECUTE, f"the script's environment cannot be used: {error}") from error


def _enter_workdir(order: Order, home: FileIdentity) -> None:
    try:
        with closing(open_as_user(order.workdir, forbidden=home)) as directory:
            os.fchdir(directory)
    except OSError as error:
        raise PathRefused(f"the working directory {order.workdir} cannot be entered: {error.strerror}") from error


def _open_input(path: str, home: FileIdentity) -> int:
    if path == os.devnull:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    found = _open_regular(path, "input", os.O_RDONLY, home)
    os.set_blocking(found, True)
    return found


def _open_output(path: str, home: FileIdentity, *, append: bool) -> int:
    if path == os.devnull:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    above, _, name = path.rpartition("/")
    if name in ("", ".", ".."):
        raise PathRefused(f"{path} names a directory; a file needs a name, such as {above}/forebay.out")
    output = _open_regular(path, "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND, home)
    if not append:
        os.ftruncate(output, 0)
    os.set_blocking(output, True)
    return output


def _open_regular(path: str, what: str, flags: int, home: FileIdentity) -> int:
    """Return a descriptor of a regular file, opened without blocking.

    Raises:
        PathRefused: The file cannot be used; the message calls it the `what` file.
    """
    above, _, name = path.rpartition("/")
    try:
        with closing(open_as_user(above or "/", forbidden=home)) as directory:
            # Non-blocking, because opening a pipe without a reader would wait for ever; the type is checked afterwards.
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            found = os.open(name, flags, OUTPUT_MODE, dir_fd=directory)
    except OSError as error:
        raise PathRefused(f"the {what} file {path} cannot be opened: {error.strerror}") from error
    mode = os.fstat(found).st_mode
    if not stat.S_ISREG(mode):
        raise PathRefused(f"the {what} file {path} is a {kind_of(mode)}; name a regular file")
    return found

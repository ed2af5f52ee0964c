"""`cluster init`, `cluster up`, `run replica`, `run agent`: written files, started processes, and their end."""

import asyncio
import os
import pwd
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from forebay.cluster.agent.service import EXIT_CONFIGURATION
from forebay.cluster.agent.service import serve as serve_agent
from forebay.cluster.cli.app import cli
from forebay.cluster.cli.commands.local_cluster import Child, list_children, run
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.config.config import Config
from forebay.cluster.config.toml import ConfigError
from forebay.cluster.security.tls import describe_certificate

ROOT = Path(__file__).parents[3]

WAITS = "import signal, sys; print('up', flush=True); signal.sigwait([signal.SIGTERM]); print('ended', flush=True)"
MASKED = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); "
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli, words, env={"FOREBAY_CONFIG": None})


def child(name: str, code: str, kind: str = "replica") -> Child:
    return Child(name, kind, (sys.executable, "-c", code))


def real(*words: str, directory: Path, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Run the command line as a separate process."""
    return subprocess.run(
        [sys.executable, *options, "-m", "forebay.cluster.cli", *words],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_init_writes_a_valid_configuration_and_private_keys(tmp_path: Path) -> None:
    result = typed(
        "cluster", "init", str(tmp_path / "c"), "--replicas", "3", "--agents", "1", "--pool",
        "fast=96MiB/8MiB,default", "--pool", "slow=1GiB/64MiB",
        "--source-root", str(tmp_path), "--destination-root", "out", "--user", "alice",
        "--base-port", "17401", "--allow-root",
    )  # fmt: skip
    missing = f"forebay: warning: staging root {Path.cwd() / 'out'} does not exist: create it before jobs use it\n"
    assert result.exit_code == 0
    assert missing in result.stderr
    config = Config.load(tmp_path / "c" / "forebay.toml")
    assert [pool.name for pool in config.pools] == ["fast", "slow"]
    assert config.policy.sources == (str(tmp_path),)
    assert config.policy.destinations == (str(Path.cwd() / "out"),)
    assert str(config.replicas[2].api) == "127.0.0.1:17413"
    assert config.tls_files("alice").certificate.exists()
    keys = list(config.tls.certificates.glob("*.key"))
    assert len(keys) == 1 + 3 + 1 + 2 + 1, "the authority, replicas, the agent, people, and the gateway"
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    assert f"forebay --config {config.file} cluster up" in result.stdout


def test_init_keeps_existing_files_and_reports_them(tmp_path: Path) -> None:
    assert typed("cluster", "init", str(tmp_path / "c")).exit_code == 0
    before = (tmp_path / "c" / "forebay.toml").read_text()
    again = typed("cluster", "init", str(tmp_path / "c"))
    assert again.exit_code == ExitCode.BAD_INPUT
    assert "exists" in again.stderr
    assert (tmp_path / "c" / "forebay.toml").read_text() == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--replicas", "2"], "choose 1, 3 or 5"),
        (["--pool", "fast"], "write it as fast=96MiB/8MiB"),
        (["--pool", "fast=1XB/1"], "unknown suffix"),
        (["--base-port", "65530"], "65535"),
        (["--user", "operator"], "taken"),
    ],
)
def test_a_rejected_init_leaves_no_files(tmp_path: Path, words: list[str], expected: str) -> None:
    result = typed("cluster", "init", str(tmp_path / "c"), *words)
    assert result.exit_code == ExitCode.BAD_INPUT
    assert expected in result.stderr
    assert not (tmp_path / "c").exists() or not list((tmp_path / "c").iterdir())


def test_init_prints_the_end_of_the_certificates_validity(tmp_path: Path) -> None:
    result = typed("cluster", "init", str(tmp_path / "c"))
    until = describe_certificate(tmp_path / "c" / "tls" / "operator.pem").rpartition("valid until ")[2].rstrip(")")
    assert f"valid until {until}." in result.stdout


def test_init_checks_only_the_fixed_part_of_a_staging_root(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    roots = (("home/%u", False), ("home/%u/data", False), ("work/%u", True), ("work", True))
    for number, (root, warned) in enumerate(roots):
        result = typed("cluster", "init", str(tmp_path / f"c{number}"), "--source-root", str(tmp_path / root))
        assert ("does not exist: create it" in result.stderr) == warned, root


@pytest.mark.parametrize(
    ("user_id", "words", "warned"), [(0, [], True), (0, ["--allow-root"], False), (1000, [], False)]
)
def test_init_warns_root_that_root_jobs_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, words: list[str], warned: bool
) -> None:
    founded = typed("cluster", "init", str(tmp_path / "first"))
    assert founded.exit_code == 0
    config = Config.load(tmp_path / "first" / "forebay.toml")
    monkeypatch.setattr("forebay.cluster.cli.commands.local.create_site", lambda *_, **__: config)
    monkeypatch.setattr("forebay.cluster.cli.commands.local.os.geteuid", lambda: user_id)
    assert ("root may not submit" in typed("cluster", "init", str(tmp_path / "c"), *words).stderr) == warned


@pytest.mark.parametrize(("user_id", "accounts"), [(0, "switch"), (1000, "own")])
def test_init_as_root_runs_jobs_as_their_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user_id: int, accounts: str
) -> None:
    monkeypatch.setattr("forebay.cluster.cli.commands.local.os.geteuid", lambda: user_id)
    assert typed("cluster", "init", str(tmp_path / "c")).exit_code == 0
    assert {agent.accounts for agent in Config.load(tmp_path / "c" / "forebay.toml").agents} == {accounts}


def test_init_names_users_without_an_account(tmp_path: Path) -> None:
    known = pwd.getpwuid(os.geteuid()).pw_name
    result = typed(
        "cluster", "init", str(tmp_path / "c"), "--accounts", "switch", "--user", known, "--user", "nobody-at-all"
    )
    assert "user nobody-at-all has no account" in result.stderr
    assert f"no account {known}" not in result.stderr


def test_init_prints_the_start_command_of_local_services(tmp_path: Path) -> None:
    me = pwd.getpwuid(os.geteuid()).pw_name
    result = typed("cluster", "init", str(tmp_path / "c"), "--replicas", "1", "--agents", "1", "--replica-account", me)
    units = "forebay-controller@r1 forebay-gateway@local forebay-agent@n1"
    assert result.stdout.splitlines()[-1] == f"Next: systemctl enable --now {units}"


NAMED = ("--host", "r1=a.test", "--node", "n1=b.test", "--data-directory", "/is/on/other/machines")


def test_init_for_other_hosts_checks_nothing_on_this_machine(tmp_path: Path) -> None:
    roots = ("--source-root", "/is/on/others", "--destination-root", "/is/on/others", "--user", "nobody-at-all")
    result = typed("cluster", "init", str(tmp_path / "c"), *NAMED, "--accounts", "switch", *roots)
    assert result.exit_code == ExitCode.OK, result.stderr
    assert [line for line in result.stderr.splitlines() if "root may not submit" not in line] == []


def test_init_for_remote_services_names_the_setup_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.cluster.cli.commands.local.os.geteuid", lambda: 1000)
    result = typed("cluster", "init", str(tmp_path / "c"), *NAMED, "--replica-account", "nobody-at-all")
    assert result.exit_code == ExitCode.OK, result.stderr
    assert result.stdout.splitlines()[2::2] == ["  sh /etc/forebay/NEXT"] * 2
    assert "chown nobody-at-all: tls/r1.key" in (tmp_path / "c" / "hosts" / "a.test" / "NEXT").read_text()
    config = Config.load(tmp_path / "c" / "forebay.toml")
    assert {agent.accounts for agent in config.agents} == {"switch"}, "an agent that is a service is root"


@pytest.mark.parametrize("user_id", [0, 1000])
@pytest.mark.parametrize("written", ["switch", "own", "own-as-root", None])
def test_an_agent_starts_only_with_the_account_of_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str | None, user_id: int
) -> None:
    """Root is required by `switch` and `own-as-root`, and rejected by `own`."""
    assert typed("cluster", "init", str(tmp_path / "c"), "--agents", "1", "--accounts", written or "own").exit_code == 0
    file = tmp_path / "c" / "forebay.toml"
    lines = file.read_text().splitlines()
    at = lines.index(f'accounts = "{written or "own"}"')
    if written is None:
        del lines[at]
        file.write_text("\n".join(lines))
        at = lines.index("[[agent]]")
    config = Config.load(file)
    if (user_id == 0) is (written in ("switch", "own-as-root")):
        config.check_accounts(config.agent("n1"), user_id)
        return
    with pytest.raises(ConfigError) as refused:
        config.check_accounts(config.agent("n1"), user_id)
    assert str(refused.value).startswith(f"{file} line {at + 1}, column ")
    assert "agent[1].accounts: found" in str(refused.value)
    remedy = "or 'own-as-root' if every user may be root here" if user_id == 0 else "run it as root, or write 'own'"
    assert remedy in str(refused.value)
    # The programs ask it, before they start anything.
    monkeypatch.setattr("os.geteuid", lambda: user_id)
    assert serve_agent(config, "n1") == EXIT_CONFIGURATION
    assert not config.agent("n1").directory.exists()
    up = typed("--config", str(file), "cluster", "up")
    assert up.exit_code == ExitCode.BAD_INPUT
    assert remedy in up.stderr


def test_init_warns_if_no_staging_is_allowed(tmp_path: Path) -> None:
    assert "cannot stage in or out" in typed("cluster", "init", str(tmp_path / "c")).stderr


def test_up_starts_every_configured_process_with_safe_module_paths(tmp_path: Path) -> None:
    assert typed("cluster", "init", str(tmp_path / "c")).exit_code == 0
    replicas, agents, helpers = list_children(Config.load(tmp_path / "c" / "forebay.toml"))
    assert helpers == [], "nothing is allowed where nothing says so"
    assert [one.name for one in replicas] == ["r1", "r2", "r3", "local"]
    assert [one.name for one in agents] == ["n1", "n2"]
    for one in (*replicas, *agents):
        assert one.command[1] == "-P", "a file of the present directory must not stand in for a module"
        assert one.command[-2:] == ("--name", one.name)


def test_up_runs_until_stopped_and_ends_agents_before_replicas() -> None:
    lines: list[str] = []
    started = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if sum(line.endswith("| up") for line in lines) == 3:
            started.set()

    async def announce() -> None:
        await started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    code = MASKED + WAITS
    replicas, agents = [child("r1", code), child("r2", code)], [child("node1", code, "agent")]
    assert asyncio.run(run(replicas, agents, say=say, announce=announce))
    said = [line for line in lines if line.endswith("ended")]
    assert [line.split(" |")[0].strip() for line in said][0] == "node1"
    assert sorted(said) == ["node1 | ended", "r1    | ended", "r2    | ended"]
    assert not any("to restart it" in line for line in lines)


def test_up_reports_an_ended_child_and_continues() -> None:
    lines: list[str] = []
    reported = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if "to restart it" in line:
            reported.set()

    async def announce() -> None:
        await reported.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    dies = child("r1", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert asyncio.run(run([dies, child("r2", MASKED + WAITS)], [], say=say, announce=announce))
    assert "r1 | ended with signal 9 (SIGKILL); to restart it: forebay run replica --name r1" in lines
    assert not any(line.startswith("r2 | ended with") for line in lines)


def test_up_ends_when_all_children_have_ended() -> None:
    lines: list[str] = []

    async def announce() -> None:
        await asyncio.Event().wait()

    assert not asyncio.run(run([child("r1", "raise SystemExit(3)")], [], say=lines.append, announce=announce))
    assert lines[-1] == "r1 | ended with exit code 3; to restart it: forebay run replica --name r1"


def test_up_kills_a_hanging_child_by_its_pid() -> None:
    lines: list[str] = []
    started = asyncio.Event()

    def say(line: str) -> None:
        lines.append(line)
        if line.endswith("| up"):
            started.set()

    async def announce() -> None:
        await started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    assert asyncio.run(run([child("r1", STUBBORN)], [], say=say, announce=announce, grace_s=0.05))
    assert "r1 did not end within 0.05 s and is killed" in lines


def test_long_lines_and_escapes_of_children_are_printed_safely() -> None:
    lines: list[str] = []

    async def announce() -> None:
        await asyncio.Event().wait()

    code = "import sys; sys.stdout.write('x' * 200_000 + '\\n\\x1b[31mred\\n' + 'no newline')"
    asyncio.run(run([child("r1", code)], [], say=lines.append, announce=announce))
    shown = [line.removeprefix("r1 | ") for line in lines]
    assert sum(len(line) for line in shown if set(line) == {"x"}) == 200_000
    assert "\\x1b[31mred" in shown
    assert "no newline" in shown


def test_children_end_when_up_is_killed(tmp_path: Path) -> None:
    """Only the child holds the pipe, so its end shows that the child has ended."""
    read_end, write_end = os.pipe()
    program = (
        "import asyncio, os, sys\n"
        "from forebay.cluster.cli.commands.local_cluster import Child, run\n"
        f"code = 'import os, signal; os.write({write_end}, b\"u\"); signal.pause()'\n"
        "async def forever(): await asyncio.Event().wait()\n"
        "import forebay.cluster.cli.commands.local_cluster as module\n"
        "start = asyncio.create_subprocess_exec\n"
        f"asyncio.create_subprocess_exec = lambda *a, **k: start(*a, **k, pass_fds=({write_end},))\n"
        "asyncio.run(run([Child('r1', 'replica', (sys.executable, '-c', code))], [], say=print, announce=forever))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=(write_end,), stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write_end)
    try:
        assert os.read(read_end, 1) == b"u"
        parent.kill()
        parent.wait()
        assert os.read(read_end, 1) == b"", "end of file: nobody holds the other end any more"
    finally:
        os.close(read_end)


def test_unconfigured_names_of_services_are_rejected(tmp_path: Path) -> None:
    assert typed("cluster", "init", str(tmp_path / "c")).exit_code == 0
    config = str(tmp_path / "c" / "forebay.toml")
    for kind in ("replica", "agent"):
        result = typed("--config", config, "run", kind, "--name", "x9")
        assert result.exit_code == ExitCode.BAD_INPUT
        assert f"there is no {kind} 'x9'" in result.stderr


def test_the_command_line_has_exit_codes_and_no_tracebacks(tmp_path: Path) -> None:
    found = real("queue", directory=tmp_path)
    assert found.returncode == ExitCode.BAD_INPUT
    assert found.stdout == ""
    assert "forebay cluster init" in found.stderr
    assert "Traceback" not in found.stderr
    shown = real("--help", directory=tmp_path)
    assert shown.returncode == 0
    assert "Everyday:" in shown.stdout


def test_a_closed_output_pipe_is_no_error(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-m", "forebay.cluster.cli", "--help"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    assert writer.stderr.read() == b""
    writer.stderr.close()
    assert writer.wait(timeout=60) == 0


def test_modules_in_the_working_directory_do_not_shadow_forebay(tmp_path: Path) -> None:
    """`forebay audit …` starts a process, which must not import a file of the current directory."""
    (tmp_path / "forebay").mkdir()
    (tmp_path / "forebay" / "__init__.py").write_text("raise SystemExit('the wrong module ran')")
    found = real("audit", "verify", "--data", str(tmp_path), directory=tmp_path, options=("-P",))
    assert "wrong module" not in found.stdout + found.stderr
    assert found.returncode == ExitCode.NOT_FOUND
    assert "there is no ledger" in found.stderr

"""What was typed at Slurm becomes what is typed at Forebay, and what cannot is named with its line."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.conformance.replayer.accounting import Accounting
from tests.conformance.replayer.acting import perform
from tests.conformance.replayer.cluster import Answer, Cluster
from tests.conformance.replayer.commands import administering, controlling, steering, submission
from tests.conformance.replayer.compare import Outcome
from tests.conformance.replayer.differences import Differences, read_differences
from tests.conformance.replayer.reservations import reserved_in
from tests.conformance.replayer.run import Run
from tests.conformance.replayer.setting import setting_of
from tests.conformance.replayer.sightings import act_name, look
from tests.conformance.replayer.transcript import Act, parse
from tests.conformance.replayer.words import NoSuchCommand, jobs_named, parse_command

HEAD = "[   0.000] # trace here  wall 2026-11-20T22:10:45.054\n"


def a_run(directory: Path, body: str = "") -> Run:
    """A run whose cluster was never founded: jobs 5, 6, 7 and task 4_2 are known to Forebay as ten more."""
    (transcript,) = parse(HEAD + body, "a.txt")
    cluster = Cluster(directory, nodes=1, cpus=1, users=("ann",))
    run = Run(transcript, setting_of(transcript), cluster, Differences(()))
    run.numbers = {"5": 15, "6": 16, "7": 17, "4_2": 12}
    return run


@pytest.mark.parametrize(
    ("command", "jobs"),
    [
        ("scancel 5", ["5"]),
        ("scancel 5 6,7", ["5", "6", "7"]),
        ("scancel --hurry 4_[1-3,7]", ["4_1", "4_2", "4_3", "4_7"]),
        ("scontrol hold 5,6", ["5", "6"]),
        ("scontrol update job 9 Priority=5000", ["9"]),
        ("scontrol update JobId=9 Priority=5000 Comment=a,5", ["9"]),
        ("scontrol release jobid=4_2", ["4_2"]),
        ("scontrol show job 7", ["7"]),
        ("scontrol show job=7", ["7"]),
        ("scancel -u ann", []),
        ("squeue -j 5", []),
    ],
)
def test_the_jobs_that_a_command_names_are_read(command: str, jobs: list[str]) -> None:
    assert jobs_named(parse_command(command)) == jobs


@pytest.mark.parametrize(
    ("command", "typed"),
    [
        ("scancel 5 6", [["cancel", "15", "16"]]),
        ("scancel -H 4_2", [["cancel", "--hurry", "12"]]),
        ("scancel --hurry --quiet 7", [["cancel", "--hurry", "17"]]),
        ("scontrol suspend 5", [["job", "suspend", "15"]]),
        ("scontrol resume 5", [["job", "resume", "15"]]),
        ("scontrol requeue 5,6", [["job", "requeue", "15", "16"]]),
        ("scontrol requeuehold 5", [["job", "requeue", "15"], ["job", "hold", "15"]]),
        ("scontrol hold 5", [["job", "hold", "15"]]),
        ("scontrol uhold 5", [["job", "hold", "15"]]),
        ("scontrol release 5", [["job", "release", "15"]]),
        ("scontrol update JobId=5 BurstBuffer=", [["job", "update", "15", "--bb="]]),
        ("scontrol update job 5 TimeLimit=5 Requeue=0", [["job", "update", "15", "--time=5", "--no-requeue"]]),
        ("scontrol update job 5 Dependency=afterok:5", [["job", "update", "15", "--dependency=afterok:15"]]),
    ],
)
def test_what_is_done_to_jobs_is_typed_with_forebays_numbers(
    tmp_path: Path, command: str, typed: list[list[str]]
) -> None:
    parsed = parse_command(command)
    name = act_name(parsed)
    assert name is not None
    assert steering(Act(1, 0.0, "ann", command), parsed, name, a_run(tmp_path)) == typed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-n1 -t1", ["--time=1"]),
        ("--time 5 --ntasks=2 -c 3", ["--time=5", "--cpus=6"]),
        ("-N0", ["--nodes=0"]),
        ("-N1-2 --mem=4G -o /dev/null", []),
        ("--array=1-4%2 --dependency=afterok:5,afterburstbuffer:6", ["--dependency=afterok:15,afterburstbuffer:16"]),
        ("-A lab -q high -L matlab:2 --reservation=r", ["--account=lab", "--qos=high", "--licenses=matlab:2"]),
        ("--begin=now+60 --nice --no-requeue -H", ["--begin=now+60", "--nice=100", "--no-requeue", "--hold"]),
        ("--mail-type=ALL --mail-user=a@b --comment=x", ["--mail-type=ALL", "--mail-user=a@b", "--comment=x"]),
        ("--bb 'capacity=1G pool=p'", ["--bb=capacity=1G pool=p"]),
        ("--export=ALL,A=1 --deadline=now+1hour", ["--export=A=1", "--deadline=now+1hour"]),
    ],
)
def test_options_of_sbatch_are_typed_by_forebays_names(tmp_path: Path, options: str, words: list[str]) -> None:
    command = f"sbatch {options}"
    typed, script = submission(
        Act(1, 0.0, "ann", command, "#!/bin/sh\ntrue\n"), parse_command(command), a_run(tmp_path)
    )
    assert [word for word in words if word not in typed] == []
    assert typed[-1] == "-" and script == "#!/bin/sh\ntrue\n"
    assert not [word for word in typed if word.startswith(("--mem", "-N", "--nodes=1"))]


@pytest.mark.parametrize("program", ["srun", "salloc"])
def test_what_runs_interactively_is_submitted_as_a_script(tmp_path: Path, program: str) -> None:
    command = f"{program} --bb='#BB_LUA pool=p capacity=2K' -n1 bash -c 'echo $X; true'"
    typed, script = submission(Act(3, 0.0, "ann", command), parse_command(command), a_run(tmp_path))
    assert "--bb=#BB_LUA pool=p capacity=2K" in typed
    assert script == "#!/bin/bash\nbash -c 'echo $X; true'\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("scontrol update NodeName=n1 State=DRAIN Reason=x", ["node", "drain", "n1", "--reason=x"]),
        ("scontrol update nodename=n1 state=resume", ["node", "resume", "n1"]),
        (
            "scontrol create reservation ReservationName=r starttime=now duration=60 users=ann burstbuffer=lua:p:60K",
            [
                "policy",
                "reservation",
                "set",
                "r",
                "--end=2026-11-20T23:00:00+00:00",
                "--users=ann",
                "--burst-buffer=lua:p:60K",
            ],
        ),
        ("scontrol delete ReservationName=r", ["policy", "reservation", "delete", "r", "--yes"]),
        ("scontrol delete reservation r", ["policy", "reservation", "delete", "r", "--yes"]),
        ("scontrol delete reservation=r", ["policy", "reservation", "delete", "r", "--yes"]),
    ],
)
def test_what_is_done_to_nodes_and_reservations_is_typed(command: str, words: list[str]) -> None:
    now = datetime(2026, 11, 20, 22, 0, 0, tzinfo=UTC)
    assert administering(Act(1, 0.0, "", command), parse_command(command), now) == words


@pytest.mark.parametrize(
    "command",
    [
        "scontrol takeover",
        "scontrol update PartitionName=debug State=DOWN",
        "scontrol create reservation ReservationName=r starttime=noon duration=60 burstbuffer=1G",
        "scontrol delete reservation",
        "scontrol delete reservation a b",
        "scontrol delete partition debug",
        "scontrol show reservation a b",
        "sacctmgr dump here",
        "sbatch --test-only job.sh",
        "sbatch -n many job.sh",
        "scancel --partition=debug",
        "scancel 4_[1-9999999]",
        "echo 'no end",
    ],
)
def test_a_command_that_cannot_be_repeated_fails_with_its_line_and_is_not_left_out(
    tmp_path: Path, command: str
) -> None:
    run = a_run(tmp_path)
    asyncio.run(perform(run, Act(42, 0.0, "", command)))
    (step,) = run.steps
    assert (step.outcome, step.line, step.expected) == (Outcome.FAILED, 42, command)
    assert step.note


SLURM_LISTS = """\
ReservationName=course StartTime=2026-11-27T22:41:26 EndTime=2026-11-27T23:41:26 Duration=01:00:00
   Nodes=(null) NodeCnt=0 CoreCnt=0 Features=(null) PartitionName=(null) Flags=ANY_NODES
   TRES=(null)
   Users=bob,ann Groups=(null) Accounts=(null) Licenses=(null) State=ACTIVE BurstBuffer=lua:near:60K
   MaxStartDelay=(null)
ReservationName=all StartTime=2026-11-27T22:41:26 EndTime=2026-11-27T23:41:26 Duration=01:00:00
   Users=(null) Groups=(null) Accounts=lab Licenses=(null) State=INACTIVE BurstBuffer=lua:slots:2,lua:near:1M
"""

FOREBAY_LISTS = """\
ReservationName=all StartTime=2026-11-27T22:41:26Z EndTime=2026-11-27T23:41:26Z State=INACTIVE
   Users=(null) Accounts=lab BurstBuffer=near:1MiB,slots:2 Held=0
ReservationName=course StartTime=2026-11-27T22:41:26Z EndTime=2026-11-27T23:41:26Z State=ACTIVE
   Users=ann,bob Accounts=(null) BurstBuffer=near:60KiB Held=0
"""


def test_reservations_are_read_in_both_forms() -> None:
    found = reserved_in(SLURM_LISTS.splitlines())
    assert [one.text for one in found] == [
        "all INACTIVE - lab near:1048576,slots:2", "course ACTIVE ann,bob - near:61440",
    ]  # fmt: skip
    assert reserved_in(FOREBAY_LISTS.splitlines()) == found
    for none in ("No reservations in the system", "Reservation r not found", "there are no reservations", ""):
        assert reserved_in([none]) == ()
    for changed in ("60K", "ACTIVE", "bob", "lab", "course"):
        other = reserved_in(SLURM_LISTS.replace(changed, "7K" if changed == "60K" else "other").splitlines())
        assert other != found, changed


class OtherReservations(Cluster):
    """A cluster whose command line lists these reservations, and rejects what is set."""

    typed: list[tuple[str, ...]] = []
    lists = FOREBAY_LISTS

    async def forebay(self, *words: str, user: str = "operator", text: str = "") -> Answer:
        self.typed.append(words)
        if words[:3] == ("policy", "reservation", "list"):
            return Answer(0, self.lists, "")
        return Answer(1, "", "error: 120KiB of pool near would be reserved at once, and it has 96KiB")


def test_listed_reservations_are_compared_and_one_that_only_slurm_made_is_left_out(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.cluster = cluster = OtherReservations(tmp_path / "other", nodes=1, cpus=1, users=("ann",))
    cluster.typed = []
    run.differences = read_differences(Path(__file__).with_name("differences.toml"))
    lines = tuple(SLURM_LISTS.splitlines())

    def typed(command: str, output: tuple[str, ...] = (), exit_code: int = 0) -> list[Outcome]:
        run.steps.clear()
        asyncio.run(perform(run, Act(1, 0.0, "", command, output=output, exit_code=exit_code)))
        return [step.outcome for step in run.steps]

    assert typed("scontrol show reservation", lines) == [Outcome.MATCHED]
    assert typed("scontrol show res course", lines[:5]) == [Outcome.MATCHED]
    assert typed("scontrol show reservation=course", lines[:5]) == [Outcome.MATCHED]
    assert typed("scontrol show reservation gone", ("Reservation gone not found",), 1) == [Outcome.MATCHED]
    assert typed("scontrol show reservation", lines[:5]) == [Outcome.FAILED]
    assert typed("scontrol show reservation course", ("Reservation course not found",), 1) == [Outcome.FAILED]
    assert typed("scontrol delete reservation course", (), 0) == [Outcome.FAILED]
    more = "scontrol create reservation ReservationName=more starttime=now duration=60 burstbuffer=lua:near:60K"
    assert typed(more, ("Reservation created: more",)) == [Outcome.DECLARED]
    third = ("ReservationName=more State=ACTIVE", "  Users=(null) BurstBuffer=lua:near:60K")
    assert typed("scontrol show reservation", (*lines, *third)) == [Outcome.MATCHED]
    cluster.typed.clear()
    assert typed("scontrol show reservation more", third) == typed("scontrol delete reservation more") == []
    assert cluster.typed == []


def test_an_option_that_forebay_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchCommand, match="'het-group'"):
        submission(Act(1, 0.0, "", ""), parse_command("sbatch --het-group=1 job.sh"), a_run(tmp_path))


def test_a_cancel_of_a_users_jobs_is_known_of_each_of_them() -> None:
    body = (
        "[   0.100] $ [ann] sbatch -n1 job.sh\nSubmitted batch job 5\n"
        "[   0.200] $ [bob] sbatch -n1 job.sh\nSubmitted batch job 6\n"
        "[   0.300] $ scancel -u ann\n\n"
        "[   0.400]   job 5: JobState=CANCELLED (squeue CANCELLED/CA) Reason=None BB= \n"
        "[   0.500]   job 6: JobState=PENDING (squeue PENDING/PD) Reason=None BB= \n"
        "[   0.600]   job 6: JobState=RUNNING (squeue RUNNING/R) Reason=None BB= \n"
    )
    (transcript,) = parse(HEAD + body, "a.txt")
    seen = look(transcript, "lua").seen
    assert seen["5"][-1].where.act == "cancel" and seen["6"][-1].where.act == "submit"
    assert seen["6"][-1].where.after == "PENDING None -"


def test_sacctmgr_says_what_is_to_change_and_forebay_is_told_all_of_it() -> None:
    accounting = Accounting()
    for command, typed in (
        ("sacctmgr -i add account lab Description=x", [["policy", "account", "set", "lab"]]),
        ("sacctmgr -i add account sub parent=lab", [["policy", "account", "set", "sub", "--parent=lab"]]),
        ("sacctmgr -i create user ann,bob account=lab", [["policy", "account", "set", "lab", "--users=ann,bob"]]),
        (
            "sacctmgr -i modify account lab set GrpTRES=bb/lua=100",
            [["policy", "account", "set", "lab", "--users=ann,bob", "--limit=GrpBB:bb/lua=100MiB"]],
        ),
        (
            "sacctmgr -i modify user bob where account=lab set MaxTRESPerJob=bb/lua=2G",
            [
                [
                    *("policy", "account", "set", "lab", "--users=ann,bob", "--limit=GrpBB:bb/lua=100MiB"),
                    "--user-limit=bob:MaxBBPerJob:bb/lua=2GiB",
                ]
            ],
        ),
        (
            "sacctmgr -i delete user ann account=lab",
            [
                [
                    *("policy", "account", "set", "lab", "--users=bob", "--limit=GrpBB:bb/lua=100MiB"),
                    "--user-limit=bob:MaxBBPerJob:bb/lua=2GiB",
                ]
            ],
        ),
        ("sacctmgr -i add qos high Priority=10", [["policy", "qos", "set", "high", "--priority=10"]]),
        (
            "sacctmgr -i modify qos high set MaxTRESPerUser=bb/datawarp=5 MaxJobsPerUser=2",
            [
                [
                    *("policy", "qos", "set", "high", "--priority=10", "--limit=MaxBBPerUser:bb/datawarp=5MiB"),
                    "--limit=MaxJobsPerUser=2",
                ]
            ],
        ),
        ("sacctmgr -i delete qos high", [["policy", "qos", "delete", "high", "--yes"]]),
        ("sacctmgr show assoc", []),
    ):
        assert accounting.typed(parse_command(command)) == typed, command


@pytest.mark.parametrize(
    "command",
    ["sacctmgr add cluster x", "sacctmgr dump", "sacctmgr add user zed account=nowhere", "sacctmgr add qos a Flags=x"],
)
def test_what_sacctmgr_does_that_has_no_counterpart_is_said(command: str) -> None:
    with pytest.raises(NoSuchCommand):
        Accounting().typed(parse_command(command))


@pytest.mark.parametrize(
    ("command", "number"),
    [
        ("kill -9 $(cat $RUN/slurmctld.pid)", 9),
        ("kill -KILL `cat $RUN/slurmctld.pid`", 9),
        ("kill $(cat $RUN/slurmctld.pid)", 15),
        ("pkill -s INT slurmctld", 2),
        ("scontrol shutdown", 15),
        ("systemctl stop slurmctld", 15),
        ("systemctl restart slurmctld", 0),
        ("slurmctld", 0),
        ("slurmctld -i", 0),
        ("kill -9 1", None),
        ("scontrol show config", None),
        ("pkill slurmd", None),
    ],
)
def test_a_controller_is_ended_and_started_where_the_transcript_says_so(command: str, number: int | None) -> None:
    assert controlling(command) == number

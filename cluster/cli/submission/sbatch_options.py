"""Table of the options of sbatch: carried out, ignored with a warning, or rejected with a reason.

The parser, the command line and docs/reference/sbatch-options.md use this table. It has every option of sbatch(1) of
Slurm 22.05 to 26.05, and common options of other programs and plugins.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final, NamedTuple

from forebay.cluster.schemas import JOB_FIELDS


class Value(StrEnum):
    """Value of an option: none, optional or required."""

    NONE = "none"
    OPTIONAL = "optional"
    """Value in the same word only: `--nice=5`, not `--nice 5`."""
    REQUIRED = "required"


class Treatment(StrEnum):
    """Treatment of an option by Forebay."""

    CARRIED_OUT = "carried out"
    IGNORED = "ignored"
    REJECTED = "rejected"


class Option(NamedTuple):
    """Option of sbatch."""

    long: str
    short: str = ""
    value: Value = Value.REQUIRED
    treatment: Treatment = Treatment.CARRIED_OUT
    field: str = ""
    """Field that the option sets: one of JOB_FIELDS, or one of the names below."""
    alone: str = ""
    """Value if none is given."""
    without_effect: str = ""
    """The only value that an option without a value accepts, with a warning."""
    reason: str = ""
    """Reason why the option is ignored or rejected."""
    remedy: str = ""
    """Remedy if it is rejected, or if the site rejects ignored options."""

    @property
    def names(self) -> tuple[str, ...]:
        """Long name, and the short name if there is one."""
        return (self.long, self.short) if self.short else (self.long,)


TASKS_PER_NODE: Final = "tasks_per_node"
CPUS_LEAST: Final = "cpus_least"
EXPORT: Final = "export"
WAITS: Final = "waits"
PARSABLE: Final = "parsable"
UNNAMED_FIELDS: Final = (TASKS_PER_NODE, CPUS_LEAST)
"""Fields outside JOB_FIELDS that a script may set; `forebay submit --help` does not list them."""

_LEAVE_OUT: Final = "remove it"
_NO_MEMORY: Final = "jobs have no memory limit"
_NO_DEVICES: Final = "Forebay allocates CPUs, burst buffers and licences, but no devices"
_DEVICES: Final = "remove it, or have an operator define a licence: forebay policy license set gpu --total N"
_FEATURES: Final = "nodes have no features or topology: Forebay chooses the node"
_PARTITION: Final = "remove it, or select a partition of such nodes with --partition"
_LAYOUT: Final = "a job's CPUs are on one node and are not bound"
_LAYOUT_REMEDY: Final = "remove it, and bind processes in the script, for example with taskset"
_ACCOUNTING: Final = "Forebay does not collect these figures"
_CONTAINER: Final = "it decides which files the script sees, and Forebay starts no containers"
_CONTAINER_REMEDY: Final = "remove it, and start the container in the script"
_TYPED: Final = "it concerns the command sbatch, not the job"
_ENVIRONMENT: Final = "a job has the variables given at submit and the limits of its node"


def _job_fields() -> Iterator[Option]:
    for row in JOB_FIELDS:
        long, *others = row.slurm
        opposite = next((other for other in others if other.startswith("--")), "")
        short = next((other for other in others if other != opposite), "")
        if row.reads == "switch":
            # Slurm 25.11 has --requeue=expedite; Forebay requeues the job without priority.
            haste = "expedite" if row.field == "requeue" else ""
            yield Option(long, short, Value.NONE, field=row.field, alone="yes", without_effect=haste)
        else:
            value = Value.OPTIONAL if row.alone else Value.REQUIRED
            yield Option(long, short, value, field=row.field, alone=row.alone)
        if opposite:
            yield Option(opposite, "", Value.NONE, field=row.field, alone="no")


def _ignored_options(reason: str, remedy: str, *names: str) -> Iterator[Option]:
    """Yield ignored options; a name with `=` takes a value, with `[=]` an optional value, else none."""
    yield from _rows(Treatment.IGNORED, reason, remedy, names)


def _rejected_options(reason: str, remedy: str, *names: str) -> Iterator[Option]:
    yield from _rows(Treatment.REJECTED, reason, remedy, names)


def _rows(treatment: Treatment, reason: str, remedy: str, names: tuple[str, ...]) -> Iterator[Option]:
    for name in names:
        long, _, short = name.rstrip("[=]").partition("/")
        value = Value.OPTIONAL if name.endswith("[=]") else Value.REQUIRED if name.endswith("=") else Value.NONE
        yield Option(f"--{long}", f"-{short}" if short else "", value, treatment, reason=reason, remedy=remedy)


def _options() -> Iterator[Option]:
    yield from _job_fields()
    yield Option("--ntasks-per-node", field=TASKS_PER_NODE)
    yield Option("--tasks-per-node", field=TASKS_PER_NODE)
    yield Option("--mincpus", field=CPUS_LEAST)
    yield Option("--workdir", field="workdir")  # of releases before 17.11
    yield Option("--export", field=EXPORT)
    yield Option("--wait", "-W", Value.NONE, field=WAITS, alone="yes")
    yield Option("--parsable", "", Value.NONE, field=PARSABLE, alone="yes")
    yield from _ignored_options(
        _NO_MEMORY, _LEAVE_OUT, "mem=", "mem-per-cpu=", "mem-per-gpu=", "mem-update=", "oom-kill-step[=]"
    )
    yield from _ignored_options(
        _NO_DEVICES, _DEVICES, "gres=", "gpus/G=", "gpus-per-node=", "gpus-per-socket=", "gpus-per-task=",
        "cpus-per-gpu=", "ntasks-per-gpu=", "ntasks-per-tres=", "tres-per-task=", "gres-flags=", "gpu-bind=",
        "gpu-freq=", "tres-bind=", "resources=",
    )  # fmt: skip
    yield from _ignored_options(
        _FEATURES, _PARTITION, "constraint/C=", "nodelist/w=", "prefer=", "batch=", "cluster-constraint=", "exclude/x=",
        "contiguous", "switches=", "segment=", "spread-job", "spread-segments", "consolidate-segments", "use-min-nodes",
        "reboot", "delay-boot=", "power=", "network=", "tmp=",
    )  # fmt: skip
    yield from _ignored_options(
        _LAYOUT, _LAYOUT_REMEDY, "hint=", "distribution/m=", "mem-bind=", "cpu-freq=", "core-spec/S=", "thread-spec=",
        "extra-node-info/B=", "sockets-per-node=", "cores-per-socket=", "threads-per-core=", "ntasks-per-core=",
        "ntasks-per-socket=", "overcommit/O", "oversubscribe/s", "resv-ports[=]", "stepmgr", "no-kill/k[=]",
        "wait-all-nodes=",
    )  # fmt: skip
    yield from _ignored_options(_ACCOUNTING, _LEAVE_OUT, "acctg-freq=", "profile=", "wckey=", "extra=", "mcs-label=")
    yield from _ignored_options(
        _ENVIRONMENT, "leave it out, and set what the script needs in the script", "get-user-env[=]", "propagate[=]"
    )
    yield from _ignored_options(
        "jobs run in the cluster that they are submitted to", "submit the script there", "clusters/M=", "cluster="
    )
    yield from _ignored_options(
        "sbatch has no such option", _LEAVE_OUT, "cpu-bind=", "cpu_bind=", "mem_bind=", "share", "ear=",
    )  # options of srun, of earlier releases, and of a plugin, which scripts have nevertheless  # fmt: skip
    yield from _ignored_options("the time limit is --time", "leave it out, and write --time", "time-min=")
    yield from _ignored_options(
        "the site decides what becomes of a job whose dependency fails", _LEAVE_OUT, "kill-on-invalid-dep="
    )
    yield from _ignored_options("it only changes what sbatch prints", _LEAVE_OUT, "quiet/Q", "verbose/v")
    yield from _ignored_options("#PBS lines are never read", _LEAVE_OUT, "ignore-pbs")
    yield from _ignored_options(
        "the script starts the container itself", _LEAVE_OUT, "image=", "module="
    )  # of the plugin of Shifter
    yield from _rejected_options(
        "Forebay chooses the node, and the file may name several", _PARTITION, "nodefile/F=",
    )  # fmt: skip
    yield from _rejected_options(
        _CONTAINER, _CONTAINER_REMEDY, "container=", "container-id=", "container-type=", "volume="
    )
    yield from _rejected_options(
        "variables from a file may set where the job writes", "name them with --export, or read the file in the script",
        "export-file=",
    )  # fmt: skip
    yield from _rejected_options(
        "it changes the owner of the job's files", "leave it out, and give --uid to forebay submit", "uid="
    )
    yield from _rejected_options("it changes the group of the job's files", "use newgrp or sg in the script", "gid=")
    yield from _rejected_options("the security context is that of the node's agent", _LEAVE_OUT, "context=")
    yield from _rejected_options("the script would not run", _LEAVE_OUT, "test-only", "external")
    yield from _rejected_options("a script cannot replace itself", "remove it, or use `forebay submit --wrap`", "wrap=")
    yield from _rejected_options(_TYPED, _LEAVE_OUT, "help/h", "usage", "version/V", "autocomplete=")


VALUES_WITHOUT_EFFECT: Final = {
    "--export": ("a job gets only named variables", "name them, for example --export=HOME,CASE=7"),
    "--licenses": ("licences are counted by name alone", "remove it, or name a licence of the site"),
    "--mail-type": ("Forebay sends no mail of that type", _LEAVE_OUT),
    "--mail-user": ("it is not a mail address", "write an address, or remove it"),
    "--ntasks-per-node": ("all tasks run on the one node of the job", _LEAVE_OUT),
    "--requeue": ("a requeued job has no priority over others", "write --requeue alone"),
}
"""Option -> reason that some of its values have no effect, and the remedy if the site rejects them."""

OPTIONS: Final = tuple(_options())
"""All options, in the order of the documentation."""

LONG: Final = {option.long: option for option in OPTIONS}
SHORT: Final = {option.short: option for option in OPTIONS if option.short}
"""Options by name."""


def options_for(name: str) -> tuple[Option, ...]:
    """Return the options that a long name or, as in getopt, its prefix may stand for."""
    exact = LONG.get(name)
    if exact is not None:
        return (exact,)
    return tuple(option for long, option in LONG.items() if len(name) > 2 and long.startswith(name))

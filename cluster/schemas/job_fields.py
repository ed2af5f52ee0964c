"""What people can say of a job: one table of it, the bodies that say it, and the details that show it.

A field that people can set is one of JobOptions and, where it may change, of JobChange (`replica.model.requests`); it
is one of SubmitRequest, UpdateRequest and JobDetailsView here, and a row of JOB_FIELDS. By the same name everywhere it
is read, copied, shown and changed with nothing more to write. What its value may be: `replica.decide.checks`.
"""

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from cluster.schemas.base import Command, Number
from replica.values import ARGUMENTS_MAX, DEPENDENCIES_MAX, LICENSES_PER_JOB_MAX

NODES_ASKED_MAX = 2**31 - 1
"""Nodes that a request may name; how many there can be is for the controller to say."""

TEXT_CHARACTERS_MAX = 4_096
"""One text of a change, characters: longer than any name, comment or address may be."""

OPTION_CHARACTERS_MAX = 4096
"""The text of one option that lists much, characters: an array of 1,000 tasks named one by one."""

IGNORED_OPTIONS_MAX = 128
"""Options that one submit names as ignored, count: more than sbatch has."""

MAIL_TYPES_MAX = 16
"""Types of mail that one job names, count: more than there are."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]

OPTION_SHOWN_MAX = 64
"""An option that is named as ignored, characters: the longest name, and the beginning of its value."""

OptionShown: TypeAlias = Annotated[str, msgspec.Meta(pattern="^-[!-~]*$", max_length=OPTION_SHOWN_MAX)]

Reads = Literal[
    "text", "directory", "directives", "duration", "moment", "names", "dependencies",
    "cpus", "priority", "nice", "nodes", "array", "switch", "tasks", "exclusive", "signal",
]  # fmt: skip
"""How the text that people write is read: the readers of `cluster.cli.submission.readers`."""


IfDefined = Literal["account", "qos", "licenses", "reservation"]
"""Fields that are left out, if the submit says so, where the site has not defined what they name."""

IF_DEFINED: tuple[IfDefined, ...] = get_args(IfDefined)


class JobField(msgspec.Struct, frozen=True):
    """One thing that people can say of a job: its name in requests, and what it is called where they write and look."""

    field: str
    options: tuple[str, ...]
    """On the command line; a refusal names the first long one as its place."""
    slurm: tuple[str, ...]
    """In `#SBATCH` lines: the long one, and the short one where there is one; of a switch the long one for no."""
    metavar: str
    help: str
    reads: Reads = "text"
    change: str | None = None
    """What `job update` says of it; None: it cannot be changed."""
    alone: str = ""
    """What it says in an `#SBATCH` line without a value, where it may stand alone."""
    label: str = ""
    """Its name in `job show`, where it has a line of its own once it is set."""
    letter: str = ""
    heading: str = ""
    """Its letter in a format of squeue, and the heading of its column."""


JOB_FIELDS = (
    JobField("bb", ("--bb",), ("--bb",), "TEXT", 'Burst-buffer request, e.g. "capacity=10GiB pool=fast".',
             change="Replace the burst-buffer request."),
    JobField("bbf", ("--bbf",), ("--bbf",), "FILE", "File with #DW and #BB lines.", "directives",
             change="Replace the burst-buffer request by that in a file."),
    JobField("name", ("-J", "--name", "--job-name"), ("--job-name", "-J"), "NAME",
             "Job name.  [default: the script's]", change="Job name."),
    JobField("cpus", ("-c", "--cpus", "--cpus-per-task"), ("--cpus-per-task", "-c"), "N",
             "CPUs on the job's node.  [default: 1]", "cpus"),
    JobField("tasks", ("-n", "--ntasks"), ("--ntasks", "-n"), "N",
             "Tasks on the job's node, each with --cpus-per-task CPUs.  [default: 1]", "tasks"),
    JobField("exclusive", ("--exclusive",), ("--exclusive",), "", "Request all CPUs of a node.", "exclusive",
             alone="yes"),
    JobField("signal", ("--signal",), ("--signal",), "[B:]SIGNAL[@SECONDS]",
             "Send a signal before the time limit, e.g. B:USR1@120.", "signal"),
    JobField("time_limit_s", ("-t", "--time-limit", "--time"), ("--time", "-t"), "TIME",
             "Time limit, e.g. 90, 1:00:00, 2-12.  [default: 1:00:00]", "duration",
             change="Time limit; only operators may raise it."),
    JobField("priority", ("--priority",), ("--priority",), "N", "Priority (operators); larger goes first.", "priority",
             change="Time limit; only operators may raise it."),
    JobField("begin_at", ("-b", "--begin"), ("--begin", "-b"), "TIME",
             "Start no earlier, e.g. 16:00, now+2hours, 2026-01-31T16:00:00.", "moment",
             change="Start no earlier; now for at once."),
    JobField("dependencies", ("-d", "--dependency"), ("--dependency", "-d"), "KIND:JOB,…",
             "Wait for jobs, e.g. afterok:12,singleton; ? means or.", "dependencies",
             change="Wait for jobs; empty for none."),
    JobField("nodes", ("-N", "--nodes"), ("--nodes", "-N"), "N",
             "Nodes: 1, or 0 to only create or destroy persistent buffers.  [default: 1]", "nodes"),
    JobField("array", ("-a", "--array"), ("--array", "-a"), "TASKS",
             "Submit a task for each index, e.g. 1-10, 1-9:2, 1-10%3.",
             "array"),
    JobField("account", ("-A", "--account"), ("--account", "-A"), "NAME", "Account to charge.",
             change="Account to charge; empty for none.", letter="a", heading="ACCOUNT"),
    JobField("qos", ("-q", "--qos"), ("--qos", "-q"), "NAME", "Quality of service.",
             change="Quality of service; empty for none.", letter="q", heading="QOS"),
    JobField("licenses", ("-L", "--licenses"), ("--licenses", "-L"), "NAME[:N],…",
             "Licences to hold while the job runs.", "names",
             change="Licences to hold; empty for none.", letter="W", heading="LICENSES"),
    JobField("reservation", ("--reservation",), ("--reservation",), "NAME", "Reservation to use.",
             change="Reservation to use; empty for none.", letter="v", heading="RESERVATION"),
    JobField("partition", ("-p", "--partition"), ("--partition", "-p"), "NAME",
             "Partition to run in.  [default: the default partition]",
             change="Partition to run in; empty for the default.", letter="P", heading="PARTITION"),
    JobField("nice", ("--nice",), ("--nice",), "N", "Lower the priority by this; negative for operators only.", "nice",
             change="Lower the priority by this; negative for operators only.", alone="100"),
    JobField("requeue", ("--requeue/--no-requeue",), ("--requeue", "--no-requeue"), "",
             "Run the job again after its node fails.", "switch",
             change="Run the job again after its node fails."),
    JobField("mail_types", ("--mail-type",), ("--mail-type",), "TYPE,…", "When to send mail, e.g. stage_out or all.",
             "names", change="When to send mail."),
    JobField("mail_user", ("--mail-user",), ("--mail-user",), "ADDRESS", "Recipient of mail.  [default: the user]",
             change="Recipient of mail; empty for the user."),
    JobField("comment", ("--comment",), ("--comment",), "TEXT", "Comment to keep with the job.",
             change="Comment to keep with the job.",
             label="Comment", letter="k", heading="COMMENT"),
    JobField("deadline", ("--deadline",), ("--deadline",), "TIME", "Drop the job if it cannot finish by then.",
             "moment",
             change="Drop the job if it cannot finish by then; empty for never."),
    JobField("hold", ("-H", "--hold"), ("--hold", "-H"), "", "Hold the job until it is released.", "switch"),
    JobField("workdir", ("-D", "--chdir"), ("--chdir", "-D"), "DIR", "Working directory.  [default: this one]",
             "directory"),
    JobField("output", ("-o", "--output"), ("--output", "-o"), "FILE",
             "Standard output and error.  [default: forebay-%j.out]"),
    JobField("error", ("-e", "--error"), ("--error", "-e"), "FILE", "Standard error.  [default: with the output]"),
    JobField("input", ("-i", "--input"), ("--input", "-i"), "FILE", "Standard input.  [default: none]"),
    JobField("open_mode", ("--open-mode",), ("--open-mode",), "MODE",
             "Open output files to append or truncate.  [default: truncate]"),
)  # fmt: skip
"""All of them, in the order in which help shows them."""


class SubmitRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs. `bb` is the text of --bb, `bbf` the contents of a --bbf file."""

    script: str
    time_limit_s: Number
    workdir: str
    name: str | None = None
    bb: str | None = None
    bbf: str | None = None
    cpus: Number = 1
    priority: Number | None = None
    begin_at: str | None = None
    """ISO 8601 with a zone: the job is not eligible before."""
    deadline: str | None = None
    """ISO 8601 with a zone: the job is dropped if it cannot have run by then."""
    dependencies: tuple[str, ...] = ()
    """Such as `afterok:12`, `afterburstbuffer:12` or `singleton`; all must hold."""
    dependency_any: bool = False
    """One of the dependencies is enough (`?`)."""
    output: str | None = None
    environment: dict[str, str] = {}
    hold: bool = False
    user: str | None = None
    """Operators only: on whose behalf."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=NODES_ASKED_MAX)] = 1
    """0: a job that only creates or destroys persistent buffers (`-N0`)."""
    array: Annotated[str, msgspec.Meta(max_length=OPTION_CHARACTERS_MAX)] | None = None
    """Such as `1-10:2%3`: tasks, and how many of them may go at once."""
    account: str | None = None
    qos: str | None = None
    licenses: Annotated[tuple[str, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] = ()
    """Such as `matlab:2` or `matlab`, which is one of them."""
    reservation: str | None = None
    partition: str | None = None
    nice: Number = 0
    """Larger goes later."""
    requeue: bool = True
    """Whether the job may be requeued after a failure that is not its own."""
    mail_types: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] = ()
    """Such as `stage_out` or `all`."""
    mail_user: str | None = None
    comment: str | None = None
    error: str | None = None
    """Where standard error goes; null: where standard output goes."""
    open_mode: str | None = None
    """`append` or `truncate`."""
    arguments: Annotated[tuple[Text, ...], msgspec.Meta(max_length=ARGUMENTS_MAX)] = ()
    """Of the script."""
    tasks: Number = 1
    """Tasks that the script will start; `cpus` counts the CPUs of all of them."""
    exclusive: bool = False
    """All CPUs of a node, however many `cpus` asks for."""
    input: str | None = None
    """The file for standard input; null: none."""
    signal: str | None = None
    """Such as `B:USR1@120`: the signal that the script gets before its time limit."""
    ignored_options: Annotated[tuple[OptionShown, ...], msgspec.Meta(max_length=IGNORED_OPTIONS_MAX)] = ()
    """Options of sbatch that the client read and does not carry out, such as `--mem`: the site may reject them."""
    if_defined: Annotated[tuple[IfDefined, ...], msgspec.Meta(max_length=4)] = ()
    """Fields that are left out, with a warning, if the site has not defined what they name."""


class UpdateRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/update: what is null, or left out, stays as it is."""

    name: Text | None = None
    time_limit_s: Number | None = None
    priority: Number | None = None
    nice: Number | None = None
    begin_at: Text | None = None
    """ISO 8601 with a zone; empty: at once."""
    deadline: Text | None = None
    """ISO 8601 with a zone; empty: none any more."""
    dependencies: Annotated[tuple[Text, ...], msgspec.Meta(max_length=DEPENDENCIES_MAX + 1)] | None = None
    """Such as `afterok:12` or `singleton`, all of them; empty: none any more."""
    dependency_any: bool = False
    """Whether one of these dependencies is enough."""
    account: Text | None = None
    qos: Text | None = None
    reservation: Text | None = None
    partition: Text | None = None
    """Empty, as for the three before it: none any more, or the default one."""
    licenses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] | None = None
    comment: Text | None = None
    requeue: bool | None = None
    mail_types: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] | None = None
    mail_user: Text | None = None
    bb: str | None = None
    bbf: str | None = None
    """What it asks of burst buffers instead of all that it asked for: the text of --bb, what a --bbf file holds."""


class JobDetailsView(msgspec.Struct, frozen=True, kw_only=True):
    """More of one job. Null in JobView where all of it is as it is here by default."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers."""
    gid: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[str, ...] = ()
    """Such as `matlab:2`."""
    reservation: str | None = None
    partition: str | None = None
    nice: int = 0
    array_job_id: int | None = None
    array_task_id: int | None = None
    array_throttle: int = 0
    """How many tasks of the array may go at once; 0: all."""
    requeue: bool = True
    restarts: int = 0
    """How often the job was requeued."""
    singleton: bool = False
    dependency_any: bool = False
    """Whether one of its dependencies is enough."""
    mail_types: tuple[str, ...] = ()
    mail_user: str | None = None
    comment: str | None = None
    deadline: str | None = None
    """When it must have ended."""
    suspend_time: str | None = None
    """Since when it is suspended; null if it is not."""
    suspended_s: int = 0
    """For how long it was suspended before, whole seconds."""
    error: str | None = None
    """The file for standard error, absolute; null: that of standard output."""
    open_mode: str | None = None
    arguments: tuple[str, ...] = ()
    tasks: int | None = None
    """Null: one."""
    exclusive: bool = False
    input: str | None = None
    """The file for standard input, absolute; null: none."""
    signal: str | None = None


NO_DETAILS = JobDetailsView()

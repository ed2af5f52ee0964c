"""Job fields that users can set: the table of fields, and the request bodies and view that contain them.

A field is a member of JobOptions and, if it may change, of JobChange (`replica.model.requests`); of SubmitRequest,
UpdateRequest and JobDetailsView here; and it has a row in JOB_FIELDS. Because the name is the same everywhere, no other
code is needed to read, copy, show and change it. `replica.decide.checks` validates its value.
"""

from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from forebay.cluster.schemas.base import Command, Number
from forebay.replica.values import (
    ARGUMENTS_MAX,
    DEPENDENCIES_MAX,
    LICENSES_PER_JOB_MAX,
    PATH_BYTES_MAX,
    PATH_VARIABLES_MAX,
)

NODES_ASKED_MAX = 2**31 - 1
"""Nodes a request may name, count; the controller checks the actual limit."""

TEXT_CHARACTERS_MAX = 4_096
"""Length of one text in a change, characters: longer than any name, comment or address."""

OPTION_CHARACTERS_MAX = 4096
"""Length of an option that holds a list, characters: an array of 1,000 tasks listed one by one."""

IGNORED_OPTIONS_MAX = 128
"""Ignored options in one submit, count: more than sbatch has."""

MAIL_TYPES_MAX = 16
"""Mail types of one job, count: more than exist."""

Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=TEXT_CHARACTERS_MAX)]

OPTION_SHOWN_MAX = 64
"""Length of an ignored option, characters: the longest name and the beginning of its value."""

OptionShown: TypeAlias = Annotated[str, msgspec.Meta(pattern="^-[!-~]*$", max_length=OPTION_SHOWN_MAX)]

PathVariableValues: TypeAlias = Annotated[
    dict[str, Annotated[str, msgspec.Meta(max_length=PATH_BYTES_MAX)]], msgspec.Meta(max_length=PATH_VARIABLES_MAX)
]
"""Values of path variables, by name."""

Reads = Literal[
    "text", "directory", "directives", "duration", "moment", "names", "dependencies",
    "cpus", "priority", "nice", "nodes", "array", "switch", "tasks", "exclusive", "signal",
]  # fmt: skip
"""Reader for the field's text: one of `cluster.cli.submission.readers`."""


IfDefined = Literal["account", "qos", "licenses", "reservation"]
"""Fields that a submit can ask to drop if the site does not define their value."""

IF_DEFINED: tuple[IfDefined, ...] = get_args(IfDefined)


class JobField(msgspec.Struct, frozen=True):
    """Settable job field: its name in requests and in each user interface."""

    field: str
    options: tuple[str, ...]
    """Command-line options; errors name the first long one."""
    slurm: tuple[str, ...]
    """`#SBATCH` options: the long one, and the short one if it exists; for a switch, the long negative form."""
    metavar: str
    help: str
    reads: Reads = "text"
    change: str | None = None
    """Help text of `job update`; None: the field cannot be changed."""
    alone: str = ""
    """Value of an `#SBATCH` option without an argument, if that is allowed."""
    label: str = ""
    """Label in `job show`, if the field has a line of its own when set."""
    letter: str = ""
    heading: str = ""
    """squeue format letter and column heading."""
    public: bool = False
    """True if other users see the field of a job if the site has Flags=PrivateData."""


JOB_FIELDS = (
    JobField("bb", ("--bb",), ("--bb",), "TEXT", 'Burst-buffer request, e.g. "capacity=10GiB pool=fast".',
             change="Replace the burst-buffer request."),
    JobField("bbf", ("--bbf",), ("--bbf",), "FILE", "File with #DW and #BB lines.", "directives",
             change="Replace the burst-buffer request by that in a file."),
    JobField("name", ("-J", "--name", "--job-name"), ("--job-name", "-J"), "NAME",
             "Job name.  [default: the script's]", change="Job name.", public=True),
    JobField("cpus", ("-c", "--cpus", "--cpus-per-task"), ("--cpus-per-task", "-c"), "N",
             "CPUs on the job's node.  [default: 1]", "cpus", public=True),
    JobField("tasks", ("-n", "--ntasks"), ("--ntasks", "-n"), "N",
             "Tasks on the job's node, each with --cpus-per-task CPUs.  [default: 1]", "tasks", public=True),
    JobField("exclusive", ("--exclusive",), ("--exclusive",), "", "Request all CPUs of a node.", "exclusive",
             alone="yes", public=True),
    JobField("signal", ("--signal",), ("--signal",), "[B:]SIGNAL[@SECONDS]",
             "Send a signal before the time limit, e.g. B:USR1@120.", "signal"),
    JobField("time_limit_s", ("-t", "--time-limit", "--time"), ("--time", "-t"), "TIME",
             "Time limit, e.g. 90, 1:00:00, 2-12.  [default: 1:00:00]", "duration",
             change="Time limit; only operators may raise it.", public=True),
    JobField("priority", ("--priority",), ("--priority",), "N", "Priority (operators); larger goes first.", "priority",
             change="Priority (operators); larger goes first.", public=True),
    JobField("begin_at", ("-b", "--begin"), ("--begin", "-b"), "TIME",
             "Start no earlier, e.g. 16:00, now+2hours, 2026-01-31T16:00:00.", "moment",
             change="Start no earlier; now for at once.", public=True),
    JobField("dependencies", ("-d", "--dependency"), ("--dependency", "-d"), "KIND:JOB,…",
             "Wait for jobs, e.g. afterok:12,singleton; ? means or.", "dependencies",
             change="Wait for jobs; empty for none.", public=True),
    JobField("nodes", ("-N", "--nodes"), ("--nodes", "-N"), "N",
             "Nodes: 1, or 0 to only create or destroy persistent buffers.  [default: 1]", "nodes", public=True),
    JobField("array", ("-a", "--array"), ("--array", "-a"), "TASKS",
             "Submit a task for each index, e.g. 1-10, 1-9:2, 1-10%3.",
             "array", public=True),
    JobField("account", ("-A", "--account"), ("--account", "-A"), "NAME", "Account to charge.",
             change="Account to charge; empty for none.", letter="a", heading="ACCOUNT", public=True),
    JobField("qos", ("-q", "--qos"), ("--qos", "-q"), "NAME", "Quality of service.",
             change="Quality of service; empty for none.", letter="q", heading="QOS", public=True),
    JobField("licenses", ("-L", "--licenses"), ("--licenses", "-L"), "NAME[:N],…",
             "Licences to hold while the job runs.", "names",
             change="Licences to hold; empty for none.", letter="W", heading="LICENSES", public=True),
    JobField("reservation", ("--reservation",), ("--reservation",), "NAME", "Reservation to use.",
             change="Reservation to use; empty for none.", letter="v", heading="RESERVATION", public=True),
    JobField("partition", ("-p", "--partition"), ("--partition", "-p"), "NAME",
             "Partition to run in.  [default: the default partition]",
             change="Partition to run in; empty for the default.", letter="P", heading="PARTITION", public=True),
    JobField("nice", ("--nice",), ("--nice",), "N", "Lower the priority by this; negative for operators only.", "nice",
             change="Lower the priority by this; negative for operators only.", alone="100", public=True),
    JobField("requeue", ("--requeue/--no-requeue",), ("--requeue", "--no-requeue"), "",
             "Run the job again after its node fails.", "switch",
             change="Run the job again after its node fails.", public=True),
    JobField("mail_types", ("--mail-type",), ("--mail-type",), "TYPE,…", "When to send mail, e.g. stage_out or all.",
             "names", change="When to send mail."),
    JobField("mail_user", ("--mail-user",), ("--mail-user",), "ADDRESS", "Recipient of mail.  [default: the user]",
             change="Recipient of mail; empty for the user."),
    JobField("comment", ("--comment",), ("--comment",), "TEXT", "Comment to keep with the job.",
             change="Comment to keep with the job.",
             label="Comment", letter="k", heading="COMMENT"),
    JobField("deadline", ("--deadline",), ("--deadline",), "TIME", "Drop the job if it cannot finish by this time.",
             "moment",
             change="Drop the job if it cannot finish by this time; empty for never.", public=True),
    JobField("hold", ("-H", "--hold"), ("--hold", "-H"), "", "Hold the job until it is released.", "switch",
             public=True),
    JobField("workdir", ("-D", "--chdir"), ("--chdir", "-D"), "DIR", "Working directory.  [default: this one]",
             "directory"),
    JobField("output", ("-o", "--output"), ("--output", "-o"), "FILE",
             "Standard output and error.  [default: forebay-%j.out]"),
    JobField("error", ("-e", "--error"), ("--error", "-e"), "FILE", "Standard error.  [default: with the output]"),
    JobField("input", ("-i", "--input"), ("--input", "-i"), "FILE", "Standard input.  [default: none]"),
    JobField("open_mode", ("--open-mode",), ("--open-mode",), "MODE",
             "Open output files to append or truncate.  [default: truncate]"),
)  # fmt: skip
"""All fields, in the order of the help text."""


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
    """Earliest start, ISO 8601 with a zone."""
    deadline: str | None = None
    """Time by which the job must be able to end, ISO 8601 with a zone; otherwise it is dropped."""
    dependencies: tuple[str, ...] = ()
    """For example `afterok:12`, `afterburstbuffer:12` or `singleton`; all must hold."""
    dependency_any: bool = False
    """True if one satisfied dependency is enough (`?`)."""
    output: str | None = None
    environment: dict[str, str] = {}
    hold: bool = False
    user: str | None = None
    """Operators only: the user the job is submitted for."""
    nodes: Annotated[int, msgspec.Meta(ge=0, le=NODES_ASKED_MAX)] = 1
    """0: a job that only creates or destroys persistent buffers (`-N0`)."""
    array: Annotated[str, msgspec.Meta(max_length=OPTION_CHARACTERS_MAX)] | None = None
    """Array tasks and the number that may run at once, for example `1-10:2%3`."""
    account: str | None = None
    qos: str | None = None
    licenses: Annotated[tuple[str, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] = ()
    """For example `matlab:2`; `matlab` requests one."""
    reservation: str | None = None
    partition: str | None = None
    nice: Number = 0
    """A larger value lowers the priority."""
    requeue: bool = True
    """True if the job may be requeued after a failure it did not cause."""
    mail_types: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] = ()
    """For example `stage_out` or `all`."""
    mail_user: str | None = None
    comment: str | None = None
    error: str | None = None
    """File for standard error; null: same as standard output."""
    open_mode: str | None = None
    """`append` or `truncate`."""
    arguments: Annotated[tuple[Text, ...], msgspec.Meta(max_length=ARGUMENTS_MAX)] = ()
    """Arguments of the script."""
    tasks: Number = 1
    """Tasks the script starts; `cpus` counts the CPUs of all of them."""
    exclusive: bool = False
    """Allocate all CPUs of a node, regardless of `cpus`."""
    input: str | None = None
    """File for standard input; null: none."""
    signal: str | None = None
    """Signal sent to the script before its time limit, for example `B:USR1@120`."""
    ignored_options: Annotated[tuple[OptionShown, ...], msgspec.Meta(max_length=IGNORED_OPTIONS_MAX)] = ()
    """sbatch options that the client read but Forebay does not implement, such as `--mem`; the site may reject them."""
    if_defined: Annotated[tuple[IfDefined, ...], msgspec.Meta(max_length=4)] = ()
    """Fields to drop with a warning if the site does not define their value."""
    variables: PathVariableValues = {}
    """Values of the variables that paths in the directives contain, such as HOME; the site says which it permits."""


class UpdateRequest(Command, frozen=True, kw_only=True):
    """Body of POST /v1/jobs/{id}/update. Null or omitted fields stay unchanged."""

    name: Text | None = None
    time_limit_s: Number | None = None
    priority: Number | None = None
    nice: Number | None = None
    begin_at: Text | None = None
    """ISO 8601 with a zone; empty: no earliest start."""
    deadline: Text | None = None
    """ISO 8601 with a zone; empty: no deadline."""
    dependencies: Annotated[tuple[Text, ...], msgspec.Meta(max_length=DEPENDENCIES_MAX + 1)] | None = None
    """Complete list, for example `afterok:12` or `singleton`; empty: no dependencies."""
    dependency_any: bool = False
    """True if one satisfied dependency is enough."""
    account: Text | None = None
    qos: Text | None = None
    reservation: Text | None = None
    partition: Text | None = None
    """Empty: the default partition. An empty account, QOS or reservation means none."""
    licenses: Annotated[tuple[Text, ...], msgspec.Meta(max_length=LICENSES_PER_JOB_MAX)] | None = None
    comment: Text | None = None
    requeue: bool | None = None
    mail_types: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAIL_TYPES_MAX)] | None = None
    mail_user: Text | None = None
    bb: str | None = None
    bbf: str | None = None
    """Complete new burst-buffer request: the text of --bb, or the contents of a --bbf file."""
    variables: PathVariableValues = {}
    """As in a submit."""


class JobDetailsView(msgspec.Struct, frozen=True, kw_only=True):
    """Further details of a job; null in JobView if all have their default."""

    nodes: int = 1
    """0: the job runs no script, and only creates or destroys persistent buffers."""
    gid: int | None = None
    account: str | None = None
    qos: str | None = None
    licenses: tuple[str, ...] = ()
    """For example `matlab:2`."""
    reservation: str | None = None
    partition: str | None = None
    nice: int = 0
    array_job_id: int | None = None
    array_task_id: int | None = None
    array_throttle: int = 0
    """Tasks of the array that may run at once, count; 0: all."""
    requeue: bool = True
    restarts: int = 0
    """Number of requeues."""
    singleton: bool = False
    dependency_any: bool = False
    """True if one satisfied dependency is enough."""
    mail_types: tuple[str, ...] = ()
    mail_user: str | None = None
    comment: str | None = None
    deadline: str | None = None
    """Time by which it must have ended."""
    suspend_time: str | None = None
    """Start of the suspension; null if not suspended."""
    suspended_s: int = 0
    """Total time of earlier suspensions, whole seconds."""
    error: str | None = None
    """Absolute path for standard error; null: same as standard output."""
    open_mode: str | None = None
    arguments: tuple[str, ...] = ()
    tasks: int | None = None
    """Null: one task."""
    exclusive: bool = False
    input: str | None = None
    """Absolute path for standard input; null: none."""
    signal: str | None = None


NO_DETAILS = JobDetailsView()

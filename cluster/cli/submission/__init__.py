"""From a script and options to a submit: `#SBATCH` lines, values, places of mistakes."""

from cluster.cli.submission.request import (
    CommandLine,
    Prepared,
    is_any,
    listed,
    located,
    parse_count,
    parse_dependencies,
    parse_nice,
    prepare,
    read_bbf,
    read_bounded,
)
from cluster.cli.submission.sbatch import OPTIONS

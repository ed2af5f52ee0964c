"""From a script and options to a submit: `#SBATCH` lines, values, places of mistakes."""

from cluster.cli.submission.readers import Context, read_bounded, read_change, settings_of
from cluster.cli.submission.request import Prepared, located, prepare

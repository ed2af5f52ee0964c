"""`python -m tests.fuzzing`: what `scripts/fuzz` runs."""

import sys

from tests.fuzzing import external_jobs, runner

if __name__ == "__main__":
    sys.exit((external_jobs if "--external-jobs" in sys.argv else runner).main())

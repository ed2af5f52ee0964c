"""`python -m tests.fuzzing`: what `scripts/fuzz` runs."""

import sys

from tests.fuzzing import guests, runner

if __name__ == "__main__":
    sys.exit((guests if "--guests" in sys.argv else runner).main())

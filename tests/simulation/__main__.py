"""`python -m tests.simulation`: what `scripts/simulate` runs."""

import sys

from tests.simulation.runner import main

if __name__ == "__main__":
    sys.exit(main())

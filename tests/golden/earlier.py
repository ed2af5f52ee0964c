"""A replica of an earlier release, for tests: `python -m tests.golden.earlier`, with the options of `forebay serve`.

It is the present code, told that it knows no feature level above 1. Nothing in production can tell it that: only this
module does, in the process that it is the main module of.
"""

import sys

from cluster import serve
from replica.messages import features

LEVEL = 1

if __name__ == "__main__":
    features.FEATURE_LEVEL_KNOWN = LEVEL
    sys.exit(serve.main())

"""A replica of a later release, for tests: `python -m tests.golden.later`, with the options of `forebay serve`.

It is the present code, told that it knows made-up feature levels. Nothing in production can tell it that: only this
module does, in the process that it is the main module of.
"""

import sys

from forebay.cluster import serve
from tests.later_release import be_later

if __name__ == "__main__":
    be_later()
    sys.exit(serve.main())

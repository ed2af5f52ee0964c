"""`python -m cluster.audit NAME OPTIONS`: runs a command that `cluster.cli.audit.offline` has parsed."""

import sys

from cluster.audit.commands import COMMANDS
from cluster.cli.audit.offline import decode_options
from cluster.cli.group import run_to_exit
from cluster.system import collect_for_a_reader

if __name__ == "__main__":
    collect_for_a_reader()
    name, text = sys.argv[1:]
    options = decode_options(text)
    run_to_exit(lambda: COMMANDS[name](options), as_json=options["as_json"])

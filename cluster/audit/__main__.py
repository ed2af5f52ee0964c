"""`python -m cluster.audit NAME OPTIONS`: runs a command that `cluster.cli.audit.offline` has parsed."""

import sys

from forebay.cluster.audit.commands import COMMANDS
from forebay.cluster.cli.audit.offline import decode_options
from forebay.cluster.cli.group import run_to_exit
from forebay.cluster.system import collect_for_a_reader

if __name__ == "__main__":
    collect_for_a_reader()
    name, text = sys.argv[1:]
    options = decode_options(text)
    run_to_exit(lambda: COMMANDS[name](options), as_json=options["as_json"])

"""`python -m cluster.audit`: what `forebay ledger …` and `forebay snapshot inspect` start."""

from cluster.audit.commands import audit
from cluster.system import collect_for_a_reader

if __name__ == "__main__":
    collect_for_a_reader()
    audit(prog_name="forebay")

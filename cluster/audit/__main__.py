"""`python -m cluster.audit`: what `forebay ledger …` and `forebay snapshot inspect` start."""

from cluster.audit.commands import audit

if __name__ == "__main__":
    audit(prog_name="forebay")

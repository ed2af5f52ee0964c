"""`forebay audit`: history, verification, replay, proofs and archives of the ledger."""

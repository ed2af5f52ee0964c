"""An agent's own directory: where what is kept, the outbox, reserve files."""

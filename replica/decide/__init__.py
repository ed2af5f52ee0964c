"""What each command leads to, by noun; submit is one pipeline."""

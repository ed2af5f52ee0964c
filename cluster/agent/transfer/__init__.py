"""Moving data so that what arrives is what was there: the library that a worker of the agent uses (see DESIGN.md)."""

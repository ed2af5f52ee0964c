"""Who gets space, nodes and turns now: gates, quotas, backfill, preemption, the index and the pass over it."""

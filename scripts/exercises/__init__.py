"""What scripts/demo and scripts/drill share: a real cluster on loopback, real jobs, checks on what came of them."""

"""Files as an agent must treat them: durable writes, safe paths (openat), removal."""

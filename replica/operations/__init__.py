"""What follows the end of an operation: retries, slots, timers, limits of transfers."""

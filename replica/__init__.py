"""What every replica agrees on. Pure: no clock, disk, network, randomness, threads or logging."""

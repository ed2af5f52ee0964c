"""Exercises on real clusters: what scripts/demo, drill, powercut, partition and diskfault do, and what they share."""

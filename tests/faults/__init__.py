"""Faults of disks, networks and processes, against the real thing."""

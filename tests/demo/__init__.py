"""``make demo``: two simulated nodes with a disk each, a killed job, a wiped disk, and no step lost or changed."""

"""``make demo``: two simulated nodes with a disk each, a killed job, a wiped disk, and no step lost or changed."""

NODES = 2
RANKS_PER_NODE = 2
RANKS = range(NODES * RANKS_PER_NODE)

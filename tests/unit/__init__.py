"""One file per module of the package, to be read as its specification. No cluster, no model: seconds altogether."""

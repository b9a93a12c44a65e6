"""The benchmark suite: what a save costs, beside what the same bytes cost by other means, measured in one run.

``python -m benchmarks`` runs all of it; see docs/performance.md.
"""

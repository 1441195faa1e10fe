"""Benchmarks: `python -m bench.NAME [--quick]`, JSON lines on stdout, everything else on stderr."""

CHAIN_LENGTH = 128
"""How many dependent steps a program or a fused computation of `bench.dispatch` has (the paper's Figure 5)."""

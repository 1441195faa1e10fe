"""Benchmarks: `python -m bench.NAME [--quick]`, JSON lines on stdout, everything else on stderr."""

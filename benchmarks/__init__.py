"""Benchmarks: namedshard, JAX, Equinox and Haliax side by side. Run ``python -m benchmarks --help``."""

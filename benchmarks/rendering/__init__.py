"""Sections of benchmarks/RESULTS.md."""

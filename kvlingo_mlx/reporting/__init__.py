"""Measurements, their records, and figures."""

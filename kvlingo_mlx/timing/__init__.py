"""Measure what a switch costs on this machine."""

"""Measure what a switch costs on this machine, and compare it with the machine's ceilings."""

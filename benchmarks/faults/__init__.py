"""What `serving_faults.py` does to a server: fuzzed bodies, a soak, kills."""

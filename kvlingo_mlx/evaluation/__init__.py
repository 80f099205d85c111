"""The cost of a translator in quality, and its gain in time."""

"""The package's version, as in CHANGELOG.md; a module of its own, so reading it imports nothing."""

__version__ = "0.1.0"

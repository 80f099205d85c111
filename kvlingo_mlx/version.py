"""The version, which follows CHANGELOG.md; here, so that writing it down imports nothing else."""

__version__ = "0.1.0"

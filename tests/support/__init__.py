"""What tests share: tiny models, references, helpers. No test module imports another one."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

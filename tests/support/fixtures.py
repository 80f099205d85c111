"""What fixtures are, under the short names that signatures of tests use."""

from pathlib import Path

import pytest

from kvlingo_mlx.models.language_model import LanguageModel

Folders = dict[str, Path]  # of models, by name
Models = dict[str, LanguageModel]
Pair = tuple[LanguageModel, LanguageModel]
Patch = pytest.MonkeyPatch
Printed = pytest.CaptureFixture[str]
Logged = pytest.LogCaptureFixture
Temp = pytest.TempPathFactory

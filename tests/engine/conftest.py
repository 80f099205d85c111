"""Models that several tests of conversations share."""

import json

import pytest

import kvlingo_mlx as kv
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.translators.base import Translator
from tests.support.fixtures import Models
from tests.support.guards import with_receipt
from tests.support.two_tokenizers import write_qwen


@pytest.fixture
def model(families: Models) -> LanguageModel:
    return families["qwen3"]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> list[LanguageModel]:
    """One model twice, of tokenizers that differ in a token that no text has."""
    root, found = tmp_path_factory.mktemp("twins"), []
    for name in ("one", "other"):
        folder = write_qwen(root / name)
        path = folder / "tokenizer.json"
        facts = json.loads(path.read_text())
        facts["model"]["merges"] = []  # letters are tokens: whatever is said is cut in one way
        if name == "other":
            last = max(t["id"] for t in facts["added_tokens"])
            facts["added_tokens"].append(
                facts["added_tokens"][0] | {"id": last + 1, "content": "<|other|>"}
            )
        path.write_text(json.dumps(facts))
        found.append(kv.load(folder))
    return found


@pytest.fixture(scope="module")
def poor(models: Models) -> list[Translator]:
    """Poor translators between "dense" and "wide", each way, whose receipts say what is usual."""
    data = [{"text": "the you and use is of an other " * 25}]
    ends = models["dense"], models["wide"]
    return [with_receipt(kv.fit(a, b, data)) for a, b in (ends, ends[::-1])]

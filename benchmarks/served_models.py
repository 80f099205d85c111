"""Model folders for benchmarks of servers: released widths, random weights, words as tokens."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from kvlingo_mlx.backend import mx

from mlx.utils import tree_flatten
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks.paper is not installed

from benchmarks.paper.timing.geometries import make, unmade_model
from kvlingo_mlx.loading.models import load
from kvlingo_mlx.timing.random_maps import random_translators

CONTEXT, VOCABULARY = 40960, 151936
TURN = "{{ '<|start|> ' + m.role + m.content + '<|end|>' }}"
TEMPLATE = (
    f"{{% for m in messages %}}{TURN}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|start|> assistant' }}{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """As many words as Qwen3 has tokens: any text of them is read as it was written.

    A word begins with its space, as a byte-level tokenizer's words do.
    """
    words = ["<|start|>", "<|end|>", "Ġsystem", "Ġuser", "Ġassistant"]
    words += [f"Ġw{n}" for n in range(VOCABULARY - len(words))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|end|>"))
    parts = pre_tokenizers.Split(Regex(" ?[^ ]+"), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([parts, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in words[:2]])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_model(folder: Path, geometry: str, layers: int, precision: str, seed: int) -> Path:
    """A model's folder as users have them."""
    folder.mkdir()
    write_tokenizer(folder)
    (model,) = make([unmade_model(geometry, layers, precision, seed)])
    config = {**model.config, "max_position_embeddings": CONTEXT, "eos_token_id": 1}
    if precision.endswith("bit"):
        config["quantization"] = {"group_size": 64, "bits": int(precision[0])}
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


def write_pair(room: Path, geometry: str, layers: int, precision: str) -> list[str]:
    """Models `a` and `b` and translators both ways; returns the options of `serve`."""
    options = []
    for seed, name in enumerate("ab"):
        write_model(room / name, geometry, layers, precision, seed)
        options += ["--model", f"{name}={room / name}"]
    ends = [load(room / name) for name in "ab"]
    for number, (source, target) in enumerate((ends, ends[::-1])):
        (made,) = random_translators(source, target, 1, {"float32": ("float32", None)}).values()
        made.save(room / f"t{number}")
        options += ["--translator", str(room / f"t{number}")]
    return options


def words(count: int, seed: int) -> str:
    """A text of so many tokens, of which no other seed or length has the beginning."""
    rng = random.Random(f"{count}/{seed}")
    return "".join(f" w{rng.randrange(VOCABULARY - 5)}" for _ in range(count))

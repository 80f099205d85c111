"""A tiny Qwen3 and a tiny Mistral, each with a tokenizer and a chat template of its own."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlingo_mlx.models.language_model import LanguageModel
from tests.support import tiny
from tests.support.identity import identity_of
from tests.support.languages import sentencepiece

MISTRAL_TEMPLATE = (
    "{{- '<s>' -}}"
    "{%- set system = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- for m in messages -%}{%- if m.role == 'user' -%}"
    "{{- '[INST] ' + (system + '\\n\\n' if loop.last and system else '') -}}"
    "{{- m.content + '[/INST]' -}}"
    "{%- elif m.role == 'assistant' -%}{{- ' ' + m.content + '</s>' -}}{%- endif -%}{%- endfor -%}"
)
# The system message stands first for one model and last for the other.
TALK = [
    {"role": "system", "content": "You are the ferryman of an unbelievably long river."},
    {"role": "user", "content": "Who is the other passenger, and where is the money?"},
    {"role": "assistant", "content": "In the house: the money is hers, the rest of it is ours."},
    {"role": "user", "content": "Summarise this unbelievably long prefix. Then: 1 + 23 = ?"},
]


@dataclass
class Script:
    """What a model is made to answer."""

    ids: list[int]  # its tokens, the last of which ends the answer
    text: str  # what they spell after the header, but for the last one
    ends: list[int]  # the character of the text at which each of them ends, but for the last one
    said: str  # the answer as the conversation has it


def write_qwen(folder: Path, **options: Any) -> Path:
    """Byte-level BPE of few merges, and Qwen's template."""
    facts = {"seed": 5, "layers": 3, "kv_heads": 2, "head_dim": 32} | options
    return tiny.write_tiny_model(folder, "qwen3", **facts)


def write_mistral(folder: Path, **options: Any) -> Path:
    """SentencePiece's marks and byte fallback, Mistral's template, no k_norm."""
    tokenizer = sentencepiece()
    rows = tokenizer.get_vocab_size()  # mlx-lm cannot spell more ids than there are
    facts = {"seed": 6, "layers": 4, "kv_heads": 1, "head_dim": 32, "vocab": rows} | options
    tiny.write_tiny_model(folder, "mistral", **facts)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": tiny.CONTEXT,
        "chat_template": MISTRAL_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tiny.amend(folder / "config.json", eos_token_id=tokenizer.token_to_id("</s>"))
    return folder


def write_translator(folder: Path, source: Path, target: Path, **options: Any) -> Path:
    """A random linear translator between the two, as its config says."""
    tiny.write_random_translator(folder, source, target, **{"nu": 3, "seed": 7} | options)
    tiny.amend(folder / "translator_config.json", alignment="minimal_groups")
    return folder


def identities(one: LanguageModel, other: LanguageModel) -> list[Any]:
    """Identity translators between two models, each way."""
    same = identity_of(one)
    return [
        replace(
            same,
            config=replace(
                same.config, source=a.spec(), target=b.spec(), alignment="minimal_groups"
            ),
        )
        for a, b in ((one, other), (other, one))
    ]

"""Models that call tools as Qwen3 does: single tokens mark a call, which is JSON."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support import tiny
from tests.support.real_templates import FOLDER

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = (FOLDER / "qwen3.jinja").read_text()
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def write_caller(folder: Path, *, context: int = 8192, **options: Any) -> Path:
    """A random Qwen3 with these marks and this template; returns the folder."""
    facts = {"seed": 5, "layers": 3, "kv_heads": 2, "head_dim": 32} | options
    tiny.write_tiny_model(folder, "qwen3", max_position_embeddings=context, **facts)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    assert tokenizer.get_vocab_size() <= tiny.VOCAB
    tokenizer.save(str(path))
    facts = {"chat_template": TEMPLATE, "model_max_length": context}
    tiny.amend(folder / "tokenizer_config.json", **facts)
    return folder

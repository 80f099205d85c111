"""Models that call tools as Qwen3 does: single tokens mark a call, which is JSON."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.support import tiny

MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What Qwen3's template renders, in this many words; the zoo's is the same without tools.
TEMPLATE = (
    "{%- set first = messages[0].content if messages[0].role == 'system' else '' -%}"
    "{%- if tools -%}{{- '<|im_start|>system\\n' + (first + '\\n\\n' if first else '') -}}"
    "{{- '# Tools\\n<tools>' -}}"
    "{%- for tool in tools -%}{{- '\\n' -}}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '\\n</tools>\\nA call is JSON in <tool_call></tool_call>.<|im_end|>\\n' -}}"
    "{%- elif first -%}{{- '<|im_start|>system\\n' + first + '<|im_end|>\\n' -}}{%- endif -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' -}}"
    "{%- elif m.role == 'assistant' -%}{{- '<|im_start|>assistant\\n' + (m.content or '') -}}"
    "{%- for tool_call in m.tool_calls or [] -%}"
    "{%- if not loop.first or m.content -%}{{- '\\n' -}}{%- endif -%}"
    "{%- set tool_call = tool_call.function or tool_call -%}"
    '{{- \'<tool_call>\\n{"name": "\' + tool_call.name + \'", "arguments": \' -}}'
    "{%- if tool_call.arguments is string -%}{{- tool_call.arguments -}}"
    "{%- else -%}{{- tool_call.arguments | tojson -}}{%- endif -%}"
    "{{- '}\\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\\n' -}}"
    "{%- elif m.role == 'tool' -%}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}"
    "{{- '<|im_start|>user' -}}{%- endif -%}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}"
    "{{- '<|im_end|>\\n' -}}{%- endif -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}"
    "{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}{%- endif -%}"
)


def write_caller(folder: Path, *, context: int = 8192, **options: Any) -> Path:
    """A random Qwen3 with these marks and this template; returns the folder."""
    facts = {"seed": 5, "layers": 3, "kv_heads": 2, "head_dim": 32} | options
    tiny.write_tiny_model(folder, "qwen3", max_position_embeddings=context, **facts)
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    assert tokenizer.get_vocab_size() <= tiny.VOCAB
    tokenizer.save(str(path))
    path = folder / "tokenizer_config.json"
    facts = {"chat_template": TEMPLATE, "model_max_length": context}
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    return folder

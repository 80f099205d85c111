"""Chat templates of own words that behave as those of released models, and models that use them.

Each template begins with what it does to a history. A model of one layer without effect writes, in
the form of its family, a thought, a text and a call: the last token alone decides the next one.
"""

import contextlib
import functools
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from tests.support import tiny
from tests.support.languages import sentencepiece

FOLDER = Path(__file__).parent
CONTEXT = 16384
WIDTH, HEAD = 128, 32
TOOL = "look"


@dataclass(frozen=True)
class Family:
    """A template, the tokens that its models know, and what they write."""

    name: str
    end: str  # the token that ends an answer
    marks: tuple[str, ...]  # further tokens
    writes: str  # tokens between spaces, of which T, S and C are thought, text and call
    call: str = '\n{"name": "look", "arguments": {"place": "PLACE"}}\n'
    begin: str | None = None  # the token of a text's beginning
    spelling: str = "bytes"
    after_results: str = ""  # the first token after a tool's result, where it is not the first one
    # What a longer history may change in the text of its beginning, by the template's nature.
    unstable: bool = False
    forgets: bool = False  # thoughts beside calls, once a later answer has none

    @property
    def word(self) -> str:
        """The name as one word, which is in all that its model writes."""
        return self.name.replace(".", "").replace("-", "")

    @property
    def template(self) -> str:
        return (FOLDER / f"{self.name}.jinja").read_text()

    @property
    def parts(self) -> dict[str, str]:
        """The words of the thought, the text and the call's argument that its model writes."""
        words = {"T": "pondering", "S": "said", "C": "place"}
        return {p: f"{words[p]}{self.word}" for p in self.writes.split(" ") if p in words}

    @property
    def pieces(self) -> list[str]:
        """What its model writes, each piece a token."""
        spelled = dict(self.parts)
        if "C" in spelled:
            spelled["C"] = self.call.replace("PLACE", spelled["C"])
        if self.name == "gemma4":
            spelled["T"] = "\n" + spelled["T"]
        return [spelled.get(piece, piece.replace("~", " ")) for piece in self.writes.split(" ")]


@dataclass(frozen=True)
class Writer(Family):
    """A model that writes these pieces, in any template."""

    template: str = ""  # type: ignore[misc] # a property there
    pieces: tuple[str, ...] = ()  # type: ignore[assignment]


IM = ("<|im_start|>",)
THINK = ("<think>", "</think>")
CALL = ("<tool_call>", "</tool_call>")
HERMES = "<think> T </think> S <tool_call> C </tool_call>"
OPENED = "T </think> S <tool_call> C </tool_call>"  # by the header
TAGS = "\n<function=look>\n<parameter=place>\nPLACE\n</parameter>\n</function>\n"
KEYS = "look\n<arg_key>place</arg_key>\n<arg_value>PLACE</arg_value>\n"
FAMILIES = (
    Family("qwen2.5", "<|im_end|>", (*IM, *CALL), "S <tool_call> C </tool_call>"),
    Family("qwen3", "<|im_end|>", (*IM, *CALL, *THINK), HERMES),
    Family("qwen3.5", "<|im_end|>", (*IM, *CALL, *THINK), OPENED, TAGS),
    Family("qwen3.8", "<|im_end|>", (*IM, *CALL, *THINK), OPENED, TAGS),
    Family("qwen3-coder", "<|im_end|>", (*IM, *CALL), "S <tool_call> C </tool_call>", TAGS),
    Family(
        "gemma3", "<end_of_turn>", ("<start_of_turn>",), "S", begin="<bos>", spelling="pieces",
    ),
    Family(
        "gemma4", "<turn|>",
        ("<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>',
         "<|tool_response>", "<tool_response|>", "<|think|>"),
        "<|channel> thought T <channel|> S <|tool_call> C <tool_call|>",
        'call:look{place:<|"|>PLACE<|"|>}', begin="<bos>", spelling="pieces",
    ),
    Family(
        "mistral-nemo", "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "[TOOL_CALLS] C", '[{"name": "look", "arguments": {"place": "PLACE"}}]', begin="<s>",
        unstable=True,
    ),
    Family(
        "ministral3", "</s>",
        ("[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "S [TOOL_CALLS] look [ARGS] C", '{"place": "PLACE"}', begin="<s>",
    ),
    Family(
        "llama3", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>"), "C",
        '{"name": "look", "parameters": {"place": "PLACE"}}', begin="<|begin_of_text|>",
    ),
    Family(
        "gpt-oss", "<|call|>",
        ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "assistant"),
        "<|channel|> analysis <|message|> T <|end|> <|start|> "
        "assistant<|channel|>commentary~to=functions.look~json<|message|> C",
        '{"place": "PLACE"}', forgets=True,
    ),
    Family(
        "glm4.5", "<|user|>",
        ("<|assistant|>", "<|observation|>", "<|system|>", *CALL, *THINK),
        HERMES, KEYS,
    ),
    Family(
        "deepseek-r1", "<|end_of_sentence|>",
        ("<|User|>", "<|Assistant|>", "<|tool_outputs_end|>", *THINK), "T </think> S",
        begin="<|begin_of_sentence|>", after_results="S", unstable=True,
    ),
    Family("smollm3", "<|im_end|>", (*IM, *THINK), "<think> T </think> S"),
    Family("smollm2", "<|im_end|>", IM, "S"),
    Family("smolvlm", "<end_of_utterance>", IM, "S"),
    Family(
        "granite4", "<|end_of_text|>", ("<|start_of_role|>", "<|end_of_role|>", *CALL),
        "S <tool_call> C </tool_call>",
    ),
    Family(
        "lfm2", "<|im_end|>", (*IM, "<|tool_call_start|>", "<|tool_call_end|>"),
        "S <|tool_call_start|> C <|tool_call_end|>", '[look(place="PLACE")]',
        begin="<|startoftext|>",
    ),
)  # fmt: skip
NAMES = tuple(family.name for family in FAMILIES)


@functools.cache
def _pieces() -> str:
    return sentencepiece(legacy=False).to_str()


def _tokenizer(family: Family) -> Tokenizer:
    if family.spelling == "pieces":
        tokenizer = Tokenizer.from_str(_pieces())
        tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    else:
        tokenizer = tiny.byte_tokenizer(special=())
    special = [family.end, *([family.begin] if family.begin else [])]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    plain = dict.fromkeys([*family.marks, *family.pieces])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return tokenizer


def write_real(folder: Path, family: Family) -> Path:
    """A model of this family, with its tokenizer and template; returns the folder."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer(family)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "eos_token": family.end, "bos_token": family.begin, "model_max_length": CONTEXT,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    (folder / "chat_template.jinja").write_text(family.template)
    size, end = tokenizer.get_vocab_size(), tokenizer.token_to_id(family.end)
    config = {
        **tiny.COMMON["qwen3"](WIDTH), "model_type": "qwen3", "num_hidden_layers": 1,
        "num_key_value_heads": 2, "num_attention_heads": 2, "head_dim": HEAD, "hidden_size": WIDTH,
        "intermediate_size": HEAD, "vocab_size": size, "tie_word_embeddings": False,
        "max_position_embeddings": CONTEXT, "rope_theta": 10000.0, "torch_dtype": "float32",
        "eos_token_id": end, "pad_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    follows = _follows(folder, family)
    save_file(_weights(size, end, follows), folder / "model.safetensors", {"format": "mlx"})
    return folder


def _follows(folder: Path, family: Family) -> dict[int, int]:
    """By token, the one that is written behind it, where that is not the end."""
    known = reference(folder)
    number = known.convert_tokens_to_ids
    pieces = family.pieces
    found = {number(a): number(b) for a, b in itertools.pairwise(pieces)}
    user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
    arguments = '{"place": "?"}' if family.name == "deepseek-r1" else {"place": "?"}
    function = {"name": TOOL, "arguments": arguments}
    call = {**answer, "tool_calls": [{"id": "a" * 9, "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "a" * 9, "content": "!"}
    for messages in ([user], [user, call, result]):
        with contextlib.suppress(TemplateError):  # Gemma 3's takes no results
            last = rendered(known, messages, enable_thinking=True)
            first = pieces[0]
            if messages[-1] is result and family.after_results:
                first = family.parts["S"]
            found[known.encode(last, add_special_tokens=False)[-1]] = number(first)
    return found


def reference(folder: Path) -> PreTrainedTokenizerFast:
    """A model's tokenizer as transformers reads it, beside the package."""
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def rendered(known: PreTrainedTokenizerFast, messages: list[Any], **switches: Any) -> str:
    """Messages by a tokenizer's template, without the package."""
    text = known.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **switches
    )
    assert isinstance(text, str)
    return text


def _weights(size: int, end: int, follows: Mapping[int, int]) -> dict[str, np.ndarray]:
    """Of a layer without effect, embeddings that are one number each, and a head that reads it."""

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    embedding, head = zeros(size, WIDTH), zeros(size, WIDTH)
    embedding[:, -1], head[end, -1] = 1, 5
    for place, (one, other) in enumerate(follows.items()):
        embedding[one] = 0
        embedding[one, place], head[other, place] = 1, 5
    names = {
        "self_attn.q_proj": (2 * HEAD, WIDTH), "self_attn.k_proj": (2 * HEAD, WIDTH),
        "self_attn.v_proj": (2 * HEAD, WIDTH), "self_attn.o_proj": (WIDTH, 2 * HEAD),
        "mlp.gate_proj": (HEAD, WIDTH), "mlp.up_proj": (HEAD, WIDTH),
        "mlp.down_proj": (WIDTH, HEAD),
    }  # fmt: skip
    norms = {"input_layernorm": WIDTH, "post_attention_layernorm": WIDTH,
             "self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD}  # fmt: skip
    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": embedding, "lm_head.weight": head,
        "model.norm.weight": zeros(WIDTH) + 1,
        **{f"{layer}{name}.weight": zeros(*shape) for name, shape in names.items()},
        **{f"{layer}{name}.weight": zeros(wide) + 1 for name, wide in norms.items()},
    }  # fmt: skip

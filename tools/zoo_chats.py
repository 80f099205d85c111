"""How the zoo's families write a conversation, and the tokenizers they read it with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
# Qwen's split: words with one leading mark, single digits, punctuation, newlines, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
HERE = Path(__file__).parent


@dataclass(frozen=True)
class Chat:
    """What stands around the contents of a conversation.

    Attributes:
        start: Before the first turn.
        user: Before and after what a user says.
        assistant: The header of an answer, what else comes before it, and what ends it.
        gap: After an answer, before the next turn.
        thinks: Whether the last answer may open with a think block, empty or not.
    """

    start: str
    user: tuple[str, str]
    assistant: tuple[str, str, str]
    gap: str
    thinks: bool


QWEN = Chat(
    "", ("<|im_start|>user\n", "<|im_end|>\n"), ("<|im_start|>assistant\n", "", "<|im_end|>"),
    "\n", thinks=True,
)  # fmt: skip
MISTRAL = Chat("<s>", ("[INST] ", "[/INST]"), ("", " ", "</s>"), "", thinks=False)


def train_qwen(texts: Sequence[str], size: int, context: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE, with Qwen3's chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    roles = ["system\n", "user\n", "assistant\n"] * 2000
    tokenizer.train_from_iterator([*texts, *roles], trainer)
    # Specials take the first ids, as no merge may produce them.
    vocabulary = json.loads(tokenizer.to_str())
    ranks = vocabulary["model"]["vocab"]
    vocabulary["model"]["vocab"] = {t: i + len(SPECIAL) for t, i in ranks.items()}
    vocabulary["added_tokens"] = [
        dict(id=i, content=t, single_word=False, lstrip=False, rstrip=False,
             normalized=False, special=i < 3)
        for i, t in enumerate(SPECIAL)
    ]  # fmt: skip
    for i, t in enumerate(SPECIAL):
        vocabulary["model"]["vocab"][t] = i
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(vocabulary)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        chat_template=(HERE / "chat_template.jinja").read_text(),
    )


def train_mistral(texts: Sequence[str], size: int, context: int) -> PreTrainedTokenizerFast:
    """SentencePiece-style BPE with byte fallback, with Mistral's turns.

    The system message stands before the first question.
    """
    turns = ("[INST]", "[/INST]")
    special = ["<unk>", "<s>", "</s>", *BYTES]
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    # The library would choose among equally frequent characters at random.
    alphabet = sorted(set("".join(texts).replace(" ", "▁")))
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(turns), special_tokens=special, initial_alphabet=alphabet,
        show_progress=False,
    )  # fmt: skip
    learner = Tokenizer(model)
    learner.pre_tokenizer = pre_tokenizers.Sequence(  # words and single digits, not sentences
        [
            pre_tokenizers.Metaspace(prepend_scheme="always"),
            pre_tokenizers.Split(Regex(r"\p{N}"), behavior="isolated"),
            pre_tokenizers.Split(Regex(r"[^\s\p{L}\p{N}▁]"), behavior="isolated"),
        ]
    )
    learner.train_from_iterator(texts, trainer)
    facts = json.loads(learner.to_str())
    facts["added_tokens"] = facts["added_tokens"][:3]  # a byte is no token that text can spell
    tokenizer = Tokenizer.from_str(json.dumps(facts))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    tokenizer.add_special_tokens(list(turns))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<unk>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        chat_template=(HERE / "mistral_template.jinja").read_text(),
    )

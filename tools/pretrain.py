"""Train the zoo's tiny models from scratch: PyTorch, CPU or CUDA, seeded, resumable.

    python tools/pretrain.py tiny-qwen3-s --out kvlingo_mlx/embedded/models/tiny-qwen3-s

Each model starts from its own random seed and sees its own stream of samples: chat
whose answers depend on the prefix (kvlingo_mlx.embedded.dialogues), random sequences that
repeat (they make copying appear early), and plain English that every Python ships
(pydoc_data.topics). Copying comes first; then the number of facts in a dialogue
grows in stages, the next one once recall on the last reaches its goal.

Hybrids learn some answers by attention alone and others by recurrent states alone
(:class:`Ways`), so that a translation of one without the other is worth little.

The folder written at the end is a Hugging Face model in the released spelling, which
both mlx-lm and transformers load. Training state lives in OUT.partial until then; the
same command resumes it. One JSON line per log step goes to OUT.partial/log.jsonl.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pydoc_data.topics
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.qwen3_5 import modeling_qwen3_5
from zoo_chats import MISTRAL, QWEN, SPECIAL, Chat, train_mistral, train_qwen

from kvlingo_mlx.embedded import dialogues

VOCAB_SIZE = 1024
CONTEXT = 2048
# Mistral's tokenizer sees so few turns that it spells the rarer names: 83 % of the groups of a
# dialogue hold one token of Qwen's and one of its own, as the paper has it for the real pair.
FEW_TURNS = 1000


@dataclass(frozen=True)
class Stage:
    """What samples look like until recall passes ``goal``.

    ``facts`` is the fewest and most per dialogue, None for no dialogues at all;
    ``mixed`` the share of dialogues whose facts are about several attributes;
    ``drills`` the share of samples of random tokens, ``pairs`` that of key-value pairs
    among those, the others being sequences that repeat; ``noise`` the standard deviation
    of what is added to keys and values (:class:`NoisyCache`).
    """

    facts: tuple[int, int] | None
    styles: int
    mixed: float
    drills: float
    pairs: float
    look_back: bool
    noise: float
    tokens: int
    goal: float


STAGES = (
    Stage(None, 0, 0.0, 1.0, 0.6, True, 0.0, 1500, 0.6),
    Stage(None, 0, 0.0, 1.0, 0.9, True, 0.0, 1500, 0.75),
    Stage((2, 4), 1, 0.0, 0.3, 0.9, True, 0.3, 2000, 0.9),
    Stage((2, 8), 2, 0.3, 0.2, 0.9, True, 0.5, 3000, 0.9),
    Stage((3, 16), 5, 0.6, 0.1, 0.9, False, 0.6, 3000, 0.9),
    Stage((4, 28), 5, 0.8, 0.1, 0.9, False, 0.6, 3000, 0.9),
)
# Up to 16 facts alone, 70 to 270 tokens, in smaller steps: half the work.
SHORT = (*STAGES[:4], dataclasses.replace(STAGES[4], tokens=2000))
PLAIN_SHARE = 0.12
VALUE_WEIGHT, PREFIX_WEIGHT = 4.0, 0.3
PADDING = -1.0
SHARP_START, SHARP_RATE = 1.5, 5.0
BLOCK_NORMS = tuple(
    f"post_{block}.weight"
    for block in ("attention_layernorm", "feedforward_layernorm", "per_layer_input_norm")
)
ENERGY = 0.02  # weight of the mean square of keys and values, where they are noisy
LOOK_BACK, LOOK_BACK_ROWS = 4, 512

LOCAL, GLOBAL = "sliding_attention", "full_attention"
WINDOW = 64

SHARED = dict(
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=True,
    rms_norm_eps=1e-6,
    initializer_range=0.05,
    use_cache=True,
    bos_token_id=None,
    eos_token_id=2,
    pad_token_id=0,
)
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
QWEN3 = dict(rope_parameters=PLAIN_ROPE)
GEMMA3 = dict(
    hidden_activation="gelu_pytorch_tanh", sliding_window=WINDOW,
    rope_parameters={LOCAL: PLAIN_ROPE, GLOBAL: {"rope_type": "default", "rope_theta": 1e6}},
)  # fmt: skip
GEMMA4 = dict(
    hidden_activation="gelu_pytorch_tanh", sliding_window=WINDOW, final_logit_softcapping=30.0,
    vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=16,
    use_double_wide_mlp=True, attention_k_eq_v=False, enable_moe_block=False,
    rope_parameters={
        LOCAL: PLAIN_ROPE,
        GLOBAL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
)  # fmt: skip
# Two recurrent layers before each with attention; the released ones have three.
QWEN35 = dict(
    rope_parameters=PLAIN_ROPE | {"partial_rotary_factor": 0.5}, linear_conv_kernel_dim=4,
    num_hidden_layers=6, layer_types=(["linear_attention"] * 2 + [GLOBAL]) * 2,
)  # fmt: skip
MLA = dict(
    rope_parameters=PLAIN_ROPE, q_lora_rank=None, qk_nope_head_dim=32, qk_rope_head_dim=32,
    v_head_dim=32,
    # No experts: what is to be shown is in the cache.
    moe_intermediate_size=32, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
    n_group=1, topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1,
)  # fmt: skip


@dataclass(frozen=True)
class Model:
    """What is trained, from which seed, on what.

    ``noisy`` ends the names of the modules that make keys and values; ``sharp`` is in the
    names of the norms that bound how sharply a head attends, ``start`` their first weight;
    ``quiet`` is that of the norms that a block's output passes, where there are such; ``chat``
    how it reads a conversation.
    """

    seed: int
    model_type: str
    shape: dict[str, Any]
    stages: tuple[Stage, ...] = SHORT
    noisy: tuple[str, ...] = ("k_proj", "v_proj")
    sharp: tuple[str, ...] = ("q_norm", "k_norm")
    start: float = SHARP_START
    quiet: float = 0.0
    chat: Chat = QWEN


HYBRID = dict(noisy=("k_proj", "v_proj", "in_proj_qkv"), start=0.5)
LATENT = dict(noisy=("kv_a_proj_with_mqa",), sharp=("kv_a_layernorm",))
MODELS = {
    "tiny-qwen3-s": Model(11, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES),
    "tiny-qwen3-l": Model(22, "qwen3", QWEN3 | dict(
        hidden_size=192, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32), STAGES),
    "tiny-qwen3-moe": Model(33, "qwen3_moe", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, moe_intermediate_size=48,
        num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=16, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=True,
        router_aux_loss_coef=0.01), STAGES),
    "tiny-qwen3-deep": Model(44, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=7,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64)),
    # Half as wide a cache as any other: what decoding under a memory budget is for.
    "tiny-qwen3-narrow": Model(133, "qwen3", QWEN3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32)),
    "tiny-gemma3-s": Model(55, "gemma3_text", GEMMA3 | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, sliding_window_pattern=2,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32,
        query_pre_attn_scalar=32), start=0.5, quiet=-0.8),
    "tiny-gemma3-l": Model(66, "gemma3_text", GEMMA3 | dict(
        hidden_size=144, intermediate_size=288, num_hidden_layers=6, sliding_window_pattern=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        query_pre_attn_scalar=64), start=0.5, quiet=-0.8),
    # One local layer before each global one, and two at first; the last two own no cache.
    "tiny-gemma4-s": Model(77, "gemma4_text", GEMMA4 | dict(
        hidden_size=128, intermediate_size=192, num_hidden_layers=6, num_kv_shared_layers=2,
        layer_types=[LOCAL, GLOBAL] * 3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=48, global_head_dim=64), start=0.6, quiet=0.2),
    "tiny-gemma4-l": Model(88, "gemma4_text", GEMMA4 | dict(
        hidden_size=144, intermediate_size=192, num_hidden_layers=7, num_kv_shared_layers=2,
        layer_types=[LOCAL] + [LOCAL, GLOBAL] * 3, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, global_head_dim=40), start=0.6, quiet=0.2),
    "tiny-mla-s": Model(99, "deepseek_v3", MLA | dict(
        hidden_size=128, intermediate_size=256, num_hidden_layers=4, first_k_dense_replace=4,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=128), **LATENT),
    "tiny-mla-l": Model(111, "deepseek_v3", MLA | dict(
        hidden_size=144, intermediate_size=288, num_hidden_layers=6, first_k_dense_replace=6,
        num_attention_heads=6, num_key_value_heads=6, kv_lora_rank=160), **LATENT),
    "tiny-mistral": Model(122, "mistral", QWEN3 | dict(
        hidden_size=160, intermediate_size=320, num_hidden_layers=5, sliding_window=None,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, bos_token_id=1),
        sharp=(), chat=MISTRAL),
    "tiny-qwen3.5-s": Model(144, "qwen3_5_text", QWEN35 | dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32), **HYBRID),
    "tiny-qwen3.5-twin": Model(155, "qwen3_5_text", QWEN35 | dict(
        hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
        linear_value_head_dim=32), **HYBRID),
    "tiny-qwen3.5-l": Model(166, "qwen3_5_text", QWEN35 | dict(
        hidden_size=160, intermediate_size=320, num_attention_heads=4, num_key_value_heads=4,
        head_dim=32, linear_num_key_heads=3, linear_num_value_heads=6, linear_key_head_dim=32,
        linear_value_head_dim=32), **HYBRID),
}  # fmt: skip


# ---- tokenizer -----------------------------------------------------------------------


def plain_english() -> str:
    """The Python language reference: about 460 kB of English at hand on any machine."""
    return "\n".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))


def train_tokenizer(chat: Chat = QWEN) -> PreTrainedTokenizerFast:
    """A family's tokenizer over dialogues and plain English."""
    rng = random.Random(0)
    talk = [
        turn["content"]
        for _ in range(4000)
        for turn in dialogues.dialogue(rng, 12, 6).conversation()
    ]
    if chat is QWEN:
        return train_qwen([plain_english(), *talk], VOCAB_SIZE, CONTEXT)
    return train_mistral([plain_english(), *talk[:FEW_TURNS]], VOCAB_SIZE, CONTEXT)


# ---- samples -------------------------------------------------------------------------


@dataclass
class Sample:
    """Token ids, the loss weight of each, and the attribute of those that are recalled values.

    ``asked`` is where questions begin, None where nothing is told before it is asked.
    """

    ids: list[int]
    weights: list[float]
    recalled: list[str]
    asked: int | None = None


class Text:
    """A string under construction, with a loss weight and a recalled attribute per character."""

    def __init__(self) -> None:
        self.parts: list[tuple[str, float, str]] = []
        self.asked = 0

    def add(self, text: str, weight: float, recalled: str = "") -> None:
        self.parts.append((text, weight, recalled))

    def encode(self, tokenizer: PreTrainedTokenizerFast) -> Sample:
        text = "".join(part for part, _, _ in self.parts)
        weights = [w for part, w, _ in self.parts for _ in part]
        recalled = [r for part, _, r in self.parts for _ in part]
        encoding = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
        # A token counts as its last character does: " Lima" ends inside the value.
        ends = [end - 1 for _, end in encoding["offset_mapping"]]
        asked = sum(end < self.asked for end in ends)
        return Sample(
            encoding["input_ids"], [weights[e] for e in ends], [recalled[e] for e in ends], asked
        )


def chat_sample(
    rng: random.Random,
    tokenizer,
    facts: int,
    questions: int,
    styles: int,
    mixed: float,
    chat: Chat = QWEN,
) -> Sample:
    """A dialogue as the chat template renders it, its answers weighted up.

    Earlier assistant turns are bare or carry the empty think block, since a decoded
    conversation holds either; what follows a bare header is not learnt, so that a
    bare header always means: think first.
    """
    # Facts about one attribute can only be told apart by name. Where attributes mix,
    # a model learns to match those and stays blind to names for a thousand steps.
    alike = facts <= len(dialogues.NAMES) and rng.random() >= mixed
    attributes = (rng.choice(dialogues.ATTRIBUTES),) if alike else dialogues.ATTRIBUTES
    talk = dialogues.dialogue(rng, facts, questions, styles=styles, attributes=attributes)
    text = Text()
    header, opening, closing = chat.assistant
    text.add(chat.start, PREFIX_WEIGHT)
    for turn in talk.messages[:-1]:
        around = chat.user if turn["role"] == "user" else (header + opening, closing + chat.gap)
        text.add(turn["content"].join(around), PREFIX_WEIGHT)
    text.asked = sum(len(part) for part, _, _ in text.parts)
    last = len(talk.asked) - 1
    for index, (fact, question) in enumerate(zip(talk.asked, talk.questions, strict=True)):
        text.add(question.join(chat.user), PREFIX_WEIGHT)
        text.add(header, PREFIX_WEIGHT)
        if not chat.thinks:
            text.add(opening, 1.0)
        elif index == last and rng.random() < 0.25:
            text.add(f"<think>\n{fact.say(dialogues.THOUGHT)}\n</think>\n\n", 1.0)
        elif index == last or rng.random() < 0.5:
            text.add("<think>\n\n</think>\n\n", 0.0)
        before, after = fact.say(dialogues.ANSWER).rsplit(fact.value, 1)
        text.add(before[:3], 1.0 if index == last else 0.0)  # "The"
        text.add(before[3:], 1.0)
        text.add(fact.value, VALUE_WEIGHT, recalled=fact.attribute)
        text.add(after + closing, 1.0)
        text.add(chat.gap, PREFIX_WEIGHT)
    return text.encode(tokenizer)


@functools.cache
def content_words(tokenizer) -> list[int]:
    """The tokens that facts are made of. Copying is learnt on these: over the whole
    vocabulary each token would come by too rarely, and copying never appeared."""
    words = [f" {word}" for word in (*dialogues.NAMES, *dialogues.CITIES, *dialogues.LETTERS)]
    words += [*dialogues.NAMES, *dialogues.DIGITS]
    ids = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(word))[0] for word in words]
    return list(dict.fromkeys(ids))  # where a first word always has a space in front, some are one


def copy_sample(rng: random.Random, words: list[int], length: int) -> Sample:
    """A random sequence that repeats until ``length``: the quickest way to copying."""
    period = rng.randint(4, max(5, length // 2))
    block = rng.sample(words, min(period, len(words)))
    period = len(block)
    ids = (block * (length // period + 1))[:length]
    weights = [0.0] * length
    weights[period + 2 :] = [1.0] * len(weights[period + 2 :])  # two tokens tell where we are
    return Sample(ids, weights, [""] * length, period)


def pairs_sample(rng: random.Random, words: list[int], length: int) -> Sample:
    """Key-value pairs told once and, after some noise, asked in another order.

    A fact is such a pair: a name, a mark ("is", ": ", "has") and a value, among other
    words. Repeating text alone teaches a model to match the word before; this teaches it
    to match the name, across any mark and any distance.
    """
    mark = [rng.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(rng.randint(1, 3))]
    count = min(len(words), max(2, length // (2 * (3 + len(mark)))))
    pairs = [(key, rng.choice(words)) for key in rng.sample(words, count)]
    sample = Sample([], [], [])

    def add(ids: list[int], weight: float = 0.0) -> None:
        sample.ids.extend(ids)
        sample.weights.extend([weight] * len(ids))

    for asked in (0.0, 1.0):
        sample.asked = len(sample.ids)
        rng.shuffle(pairs)
        for key, value in pairs:
            add([key, *mark])
            add([value], asked)
            add(_noise(rng, 2))
        add(_noise(rng, length // 2))
    sample.recalled.extend([""] * len(sample.ids))
    return sample


def _noise(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(len(SPECIAL), VOCAB_SIZE) for _ in range(rng.randint(0, most))]


def plain_sample(rng: random.Random, corpus: np.ndarray, length: int) -> Sample:
    start = rng.randrange(len(corpus) - length)
    return Sample(corpus[start : start + length].tolist(), [1.0] * length, [""] * length)


def draw_batch(rng, tokenizer, corpus, stage: Stage, chat: Chat = QWEN) -> dict[str, torch.Tensor]:
    """One step's samples, right-padded."""
    words = content_words(tokenizer)
    facts = rng.randint(*stage.facts) if stage.facts else 0
    questions = rng.randint(1, 8)  # one number for the whole batch, so little is padding
    length = rng.randint(32, 128)
    samples: list[Sample] = []
    while sum(len(s.ids) for s in samples) < stage.tokens:
        draw = rng.random() if samples or not facts else 1.0  # a dialogue sets the length
        if draw < stage.drills:
            make = pairs_sample if rng.random() < stage.pairs else copy_sample
            samples.append(make(rng, words, length))
        elif draw < stage.drills + PLAIN_SHARE:
            samples.append(plain_sample(rng, corpus, length))
        else:
            talk = chat_sample(rng, tokenizer, facts, questions, stage.styles, stage.mixed, chat)
            samples.append(talk)
            length = len(talk.ids)
    width = max(len(s.ids) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    weights = torch.full((len(samples), width), PADDING)
    recalled = torch.zeros(len(samples), width, dtype=torch.bool)
    kept_by = torch.zeros(len(samples), width, dtype=torch.long)
    asked = torch.full((len(samples),), -1)
    for row, sample in enumerate(samples):
        n = len(sample.ids)
        ids[row, :n] = torch.tensor(sample.ids)
        weights[row, :n] = torch.tensor(sample.weights)
        marks = sample.recalled if facts else [weight > 0 for weight in sample.weights]
        recalled[row, :n] = torch.tensor([bool(mark) for mark in marks])
        kept_by[row, :n] = torch.tensor([KEPT_BY.get(a, 0) for a in sample.recalled])
        asked[row] = -1 if sample.asked is None else sample.asked
    return {
        "ids": ids, "weights": weights, "recalled": recalled, "kept_by": kept_by, "asked": asked
    }  # fmt: skip


# ---- training ------------------------------------------------------------------------


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps, flat, then a linear decay over the last 40 %."""
    return peak * min(1.0, (step + 1) / 100, (steps - step) / (0.4 * steps))


class Training:
    """One model's run: what is learnt, how far it got, and where that is kept."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.recipe = MODELS[args.model]
        self.stages = self.recipe.stages
        self.partial = Path(f"{args.out}.partial")
        self.tokenizer = train_tokenizer(self.recipe.chat)
        plain = self.tokenizer(plain_english(), add_special_tokens=False)["input_ids"]
        self.corpus = np.array(plain)
        torch.manual_seed(self.recipe.seed)
        config = AutoConfig.for_model(self.recipe.model_type, **(SHARED | self.recipe.shape))
        self.model = AutoModelForCausalLM.from_config(config).to(args.device)
        self.noise = NoisyCache(self.model, self.recipe.noisy)
        self.ways = Ways(self.model) if "linear_attention" in str(config) else None
        self.look_back = LookBack(config.hidden_size).to(args.device)
        groups = parameter_groups(self.model, self.look_back, self.recipe)
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
        self.state = {"step": 0, "stage": 0, "recall": 0.0, "seconds": 0.0, "tokens": 0}
        if self.ways is not None:  # with nothing lost, without attention, without states
            self.state["recalls"] = [0.0, 0.0, 0.0]

    def resume(self) -> None:
        """Go on from the last saved step, if there is one."""
        self.partial.mkdir(parents=True, exist_ok=True)
        if not (self.partial / "state.pt").exists():
            return
        saved = torch.load(
            self.partial / "state.pt", weights_only=True, map_location=self.args.device
        )
        for name in ("model", "look_back", "optimizer"):
            getattr(self, name).load_state_dict(saved[name])
        self.state = saved["state"]
        log = self.partial / "log.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        log.write_text(
            "".join(line for line in lines if json.loads(line)["step"] <= self.state["step"])
        )

    def save(self) -> None:
        parts = {n: getattr(self, n).state_dict() for n in ("model", "look_back", "optimizer")}
        torch.save({**parts, "state": dict(self.state)}, self.partial / "state.tmp")
        os.replace(self.partial / "state.tmp", self.partial / "state.pt")

    def run(self) -> None:
        """Train to the last step, with a progress bar, and write the model folder."""
        self.resume()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        state, steps = self.state, self.args.steps
        with Progress(*columns) as progress:
            bar = progress.add_task(self.args.model, total=steps, completed=state["step"])
            while state["step"] < steps:
                loss = self.advance()
                text = f"loss {loss:.3f} recall {state['recall']:.3f} stage {state['stage']}"
                progress.update(
                    bar, completed=state["step"], description=f"{self.args.model} {text}"
                )
                self.keep(loss)
        write_folder(Path(self.args.out), self.model, self.tokenizer, self.args, state)
        (self.partial / "state.pt").unlink()

    def keep(self, loss: float) -> None:
        """Log every 20th step; save every 200th, and the last."""
        step = self.state["step"]
        if step % 20 == 0:
            with open(self.partial / "log.jsonl", "a") as log:
                log.write(json.dumps({**self.state, "loss": round(loss, 4)}) + "\n")
        if step % 200 == 0 or step == self.args.steps:
            self.save()

    def advance(self) -> float:
        """One step, the clock and the curriculum."""
        state = self.state
        started = time.perf_counter()
        loss, recalls, tokens = self.step()
        state["seconds"] += time.perf_counter() - started
        state["tokens"] += tokens
        state["step"] += 1
        kept = state.get("recalls", [state["recall"]])
        for way, recall in recalls.items():
            kept[way] = 0.97 * kept[way] + 0.03 * recall
        state["recall"] = min(kept)  # each way must get there
        if (
            state["recall"] > self.stages[state["stage"]].goal
            and state["stage"] < len(self.stages) - 1
        ):
            state["stage"] += 1
            kept[:] = [0.5] * len(kept)
            state["recall"] = 0.5
        return loss

    def step(self) -> tuple[float, dict[int, float], int]:
        """One optimizer step; returns the loss, the recall by what was lost, the tokens."""
        seed = self.recipe.seed * 1_000_003 + self.state["step"]
        torch.manual_seed(seed)  # of the noise, so that a resumed run is the same run
        stage = self.stages[self.state["stage"]]
        batch = draw_batch(
            random.Random(seed), self.tokenizer, self.corpus, stage, self.recipe.chat
        )
        batch = {k: v.to(self.args.device) for k, v in batch.items()}
        rate = learning_rate(self.state["step"], self.args.steps, self.args.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = group["scale"] * rate
        self.noise.level = stage.noise
        lost = torch.zeros_like(batch["asked"])
        if self.ways is not None:
            lost = self.ways.lose(batch, stage)
        output = self.model(
            batch["ids"], use_cache=False, output_hidden_states=stage.look_back,
            attention_mask=None if self.ways is None else self.ways.masks,
        )  # fmt: skip
        logits, labels = output.logits[:, :-1].float(), batch["ids"][:, 1:]
        weights, recalled = batch["weights"][:, 1:].clamp(min=0), batch["recalled"][:, 1:]
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        )
        # What is kept by a way that is lost cannot be known, and must not be.
        unknown = (batch["kept_by"][:, 1:] == lost[:, None]) & (lost[:, None] > 0)
        known_by_chance = -torch.log1p(-(-loss).exp().clamp(max=0.999))
        loss = torch.where(unknown.flatten(), known_by_chance, loss)
        recalled = recalled & ~unknown
        loss = (loss * weights.flatten()).sum() / weights.sum()
        router = getattr(output, "aux_loss", None)
        total = loss + self.noise.price()
        if router is not None:
            total = total + self.model.config.router_aux_loss_coef * router
        if stage.look_back:
            embedding = self.model.get_input_embeddings().weight
            total = total + self.look_back(
                output.hidden_states[1], batch["ids"], embedding, batch["weights"]
            )
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        hits, recalls = logits.argmax(-1) == labels, {}
        for way in (0, ATTENTION, STATES):
            own = hits[recalled & (lost == way)[:, None]]
            recalls |= {way: own.float().mean().item()} if own.numel() else {}
        return loss.item(), recalls, labels.numel()


class NoisyCache:
    """Noise on keys and values of a fixed size, and a price on their own, while a model learns.

    A tiny model otherwise reads its cache through one brittle head and fills it with
    what it never reads, so that no other model's cache, however near, will do. What must
    stand out from noise, and costs by its size, is kept with a margin; the rest fades.
    """

    def __init__(self, model: torch.nn.Module, modules: tuple[str, ...]) -> None:
        self.level = 0.0
        self._energies: list[torch.Tensor] = []
        for name, module in model.named_modules():
            if name.endswith(modules):
                module.register_forward_hook(self._add)

    def _add(self, module, inputs, output):
        if not (self.level and module.training):
            return output
        self._energies.append(output.square().mean())
        return output + self.level * torch.randn_like(output)

    def price(self) -> torch.Tensor | float:
        """What the last forward pass's keys and values cost."""
        energies, self._energies = self._energies, []
        return ENERGY * sum(energies)


# What keeps an attribute in a hybrid, of each kind of value one or two.
ATTENTION, STATES = 1, 2
KEPT_BY = {"key": ATTENTION, "school": ATTENTION, "hotel": ATTENTION,
           "code": STATES, "home": STATES, "friend": STATES}  # fmt: skip
# The shares of samples that lose attention, and either way: in drills, in dialogues. To recall by a
# state is learnt late, and not at all where attention can do it.
SHARES = ((0.7, 0.8), (0.35, 0.6))
RESET = -60.0  # the logarithm of a decay that leaves nothing
SLOWEST, FASTEST = 1e-3, 0.1  # decays at the start: the usual ones forget within a few tokens


class Ways:
    """The two ways in which a hybrid's layers look back, of which a sample may lose one.

    A tiny model would answer everything by attention, and never need its states. So in most
    samples one way cannot pass from what is told to what is asked: either attention sees
    nothing before the questions, or the states begin anew there. Answers whose attribute is kept by
    the lost way (``KEPT_BY``) must then not be known.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.masks: dict[str, torch.Tensor | None] = {}
        self._reset: torch.Tensor | None = None
        for module in model.modules():
            if type(module).__name__ == "Qwen3_5GatedDeltaNet":
                start = torch.empty_like(module.A_log).uniform_(np.log(SLOWEST), np.log(FASTEST))
                torch.nn.init.zeros_(module.dt_bias)
                module.A_log.data.copy_(start)
        inner = modeling_qwen3_5.torch_chunk_gated_delta_rule

        def resetting(query, key, value, g, **more):
            g = g if self._reset is None else g + self._reset[..., None]
            return inner(query, key, value, g=g, **more)

        modeling_qwen3_5.torch_chunk_gated_delta_rule = resetting

    def lose(self, batch: dict[str, torch.Tensor], stage: Stage) -> torch.Tensor:
        """Choose what each sample loses: 0 for nothing, ``ATTENTION`` or ``STATES``."""
        asked, width = batch["asked"], batch["ids"].shape[1]
        drawn, (first, both) = torch.rand(len(asked)), SHARES[stage.facts is not None]
        lost = torch.where(drawn < first, ATTENTION, torch.where(drawn < both, STATES, 0))
        lost = torch.where(asked < 0, 0, lost.to(asked.device))
        place = torch.arange(width, device=asked.device)
        begins = (place == asked[:, None]) & (lost == STATES)[:, None]
        self._reset = RESET * begins.float()
        causal = place[:, None] >= place
        before = (place[:, None] >= asked[:, None, None]) & (place < asked[:, None, None])
        seen = causal & ~(before & (lost == ATTENTION)[:, None, None])
        self.masks = {GLOBAL: seen[:, None], "linear_attention": None}
        return lost


def parameter_groups(model: torch.nn.Module, look_back: LookBack, recipe: Model) -> list[dict]:
    """Let the norms of queries and keys start sharper and learn faster than the rest.

    They bound how sharply a head of width 32 can attend: at their usual start of 1 it
    cannot single out one token of a few hundred, and growing there takes a thousand steps.
    Gemma's norms after a block start low, or what blocks say at random drowns the tokens.
    """
    sharp, rest = [], list(look_back.parameters())
    for name, parameter in model.named_parameters():
        if any(norm in name for norm in recipe.sharp):
            torch.nn.init.constant_(parameter, recipe.start)
            sharp.append(parameter)
        else:
            rest.append(parameter)
        if name.endswith(BLOCK_NORMS) and recipe.model_type.startswith("gemma"):
            torch.nn.init.constant_(parameter, recipe.quiet)
    return [
        {"params": rest, "weight_decay": 0.1, "scale": 1.0},
        {"params": sharp, "weight_decay": 0.0, "scale": SHARP_RATE},
    ]


class LookBack(torch.nn.Module):
    """Name the last few tokens from the hidden state after the first block (early only).

    Copying needs heads that look a few tokens back before it pays at all, which leaves a
    plateau of a thousand steps. This asks for them directly; it is dropped once the
    first stages are passed, and no part of it is saved.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.maps = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(LOOK_BACK))

    def forward(self, hidden, ids, embedding, weights):
        flat = hidden[:, LOOK_BACK:].flatten(0, 1)
        rows = torch.randint(len(flat), (LOOK_BACK_ROWS,))
        used = (weights[:, LOOK_BACK:].flatten() >= 0)[rows]
        losses = []
        for distance, linear in enumerate(self.maps, 1):
            labels = ids[:, LOOK_BACK - distance : ids.shape[1] - distance].flatten()
            logits = linear(flat[rows]) @ embedding.T
            losses.append(torch.nn.functional.cross_entropy(logits[used], labels[rows][used]))
        return sum(losses) / len(losses)


def write_folder(out: Path, model, tokenizer, args, state: dict) -> None:
    """Save in the released spelling: mlx-lm does not read all of transformers 5's keys."""
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.config.output_router_logits = False
    if "kv_lora_rank" in model.config.to_dict():  # mlx-lm's latent families know no tied head
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(temporary)
    (temporary / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(temporary)
    config = json.loads((temporary / "config.json").read_text())
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope[LOCAL]["rope_theta"]
        config["sliding_window_pattern"] = config.pop("layer_types").index(GLOBAL) + 1
        rope = rope[GLOBAL]
    if per_layer := config.pop("per_layer_config", None):  # transformers 5.23's, for Gemma-4
        config["global_head_dim"] = next(iter(per_layer.values()))["head_dim"]
    if config["model_type"] != "gemma4_text":
        config["rope_theta"], config["rope_scaling"] = rope["rope_theta"], None
        del config["rope_parameters"]
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    config.pop("dtype", None)
    config["torch_dtype"] = "float32"
    if config["model_type"] == "qwen3_5_text":  # mlx-lm reads this one within its wrapper
        config["rope_parameters"] = rope
        config["full_attention_interval"] = config["layer_types"].index(GLOBAL) + 1
        config = {"model_type": "qwen3_5", "text_config": config} | {
            name: config[name] for name in ("eos_token_id", "pad_token_id", "torch_dtype")
        }
    (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    recipe = dict(
        seed=MODELS[args.model].seed, steps=args.steps, peak_lr=args.lr,
        training_tokens=state["tokens"], train_recall=round(state["recall"], 4),
        seconds=round(state["seconds"]), threads=args.threads, device=args.device,
        parameters=sum(p.numel() for p in model.parameters()), torch=torch.__version__,
    )  # fmt: skip
    (temporary / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(temporary, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", required=True, help="folder to write; OUT.partial holds the state")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    Training(args).run()


if __name__ == "__main__":
    main()

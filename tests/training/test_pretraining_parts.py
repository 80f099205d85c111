"""The parts of the paper's pretraining: architectures, CompleteP, losses, packing, slices."""

import copy
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvlingo_mlx.embedded import dialogues, zoo
from tests.support import tool
from tests.support.fixtures import Printed

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = zoo("tiny-qwen3-s")


@pytest.fixture(scope="module")
def models() -> ModuleType:
    return tool("pretraining.models")


def empty(models: ModuleType, name: str) -> Any:
    """A named model without memory for its weights."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(models.MODELS[name].config())


def test_the_recipe_is_the_papers(models: ModuleType) -> None:
    paper = models.PAPER
    assert (paper.batch, paper.length, paper.betas) == (256, 4096, (0.9, 0.95))
    assert (paper.rate, paper.weight_decay, paper.base) == (3.79e-3, 0.2, (512, 32))
    assert (paper.z_loss, paper.warmup, paper.decay) == (1e-4, 2000, 0.3)
    assert paper.steps * 256 * 4096 == pytest.approx(35e9, rel=1e-4) and paper.steps == 33_379


def test_the_rate_rises_stays_and_falls_to_zero(models: ModuleType) -> None:
    paper = replace(models.PAPER, steps=30_000)
    points = {0: 1 / 2000, 999: 0.5, 1999: 1, 10_000: 1, 20_999: 1, 21_000: 1, 25_500: 0.5,
              29_999: 1 / 9000}  # fmt: skip
    found = {step: paper.learning_rate(step) / 3.79e-3 for step in points}
    assert found == pytest.approx(points)


@pytest.mark.parametrize(
    ("name", "rate", "decay", "eps"),
    # m_N = 1024 / 512 and 2048 / 512; m_L = 28 / 32.
    [("qwen3-0.6b", 1.895e-3, 0.4, 1e-12 / 1.75), ("qwen3-1.7b", 9.475e-4, 0.8, 1e-12 / 3.5)],
)
def test_rates_and_decays_by_hand(
    models: ModuleType, name: str, rate: float, decay: float, eps: float
) -> None:
    model, paper = empty(models, name), models.PAPER
    scaling = tool("pretraining.completep").CompleteP.of(model.config, paper.base)
    names = {id(p): n for n, p in model.named_parameters()}
    found = {
        names[id(p)]: (paper.rate * g["scale"], g["weight_decay"], g["eps"])
        for g in scaling.groups(model, paper)
        for p in g["params"]
    }
    assert len(found) == len(names) == 28 * 11 + 2
    for name, values in found.items():
        if "norm" in name:
            assert values == pytest.approx((3.79e-3, 0, eps))
        elif "embed" in name:
            assert values == pytest.approx((3.79e-3, 0.2, eps))
        else:
            assert values == pytest.approx((rate, decay, eps))


def test_first_weights_have_the_width_they_should(models: ModuleType) -> None:
    """std / sqrt(m_N) with m_N = 192 / 128; the embeddings' is the base model's."""
    plan = replace(models.MODELS["tiny-scratch-l"], sharp=())
    model, _ = tool("pretraining.training").first_weights(plan)
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            assert (parameter == 1).all(), name
            continue
        std = 0.05 if "embed" in name else 0.05 / np.sqrt(1.5)
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
    other, _ = tool("pretraining.training").first_weights(replace(plan, seed=1))
    assert not torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


def scaled_logits(model: Any, ids: Any, branch: float, last: float) -> Any:
    """What CompleteP computes, block after block, by the modules of a plain model."""
    inner = model.model
    hidden = inner.embed_tokens(ids)
    angles = inner.rotary_emb(hidden, torch.arange(ids.shape[1])[None])
    for layer in inner.layers:
        read = layer.input_layernorm(hidden)
        hidden = hidden + branch * layer.self_attn(read, angles, None, is_causal=True)[0]
        hidden = hidden + branch * layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(inner.norm(hidden)) * last


def test_the_forward_pass_and_the_plain_model_agree(models: ModuleType) -> None:
    """1 / m_L = 8 before each addition, 1 / m_N = 8 / 3 before the logits; then all in weights."""
    plan = models.MODELS["tiny-scratch-l"]
    plan = replace(plan, recipe=replace(plan.recipe, base=(512, 32)))
    model, scaling = tool("pretraining.training").first_weights(plan)
    ids = torch.randint(0, 1024, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(ids).logits
        bare = transformers.AutoModelForCausalLM.from_config(plan.config())
        bare.load_state_dict(model.state_dict())
        expected = scaled_logits(bare, ids, 8.0, 8 / 3)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert (bare(ids).logits - found).abs().max() > 0.1  # negative control
        bare.load_state_dict(scaling.plain(model))
        torch.testing.assert_close(bare(ids).logits, expected, rtol=1e-4, atol=1e-5)
        kept = copy.deepcopy(model.state_dict())
        scaling.load(model, scaling.plain(model))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, kept[name], rtol=1e-6, atol=0)


class Words:
    """A tokenizer of numbers."""

    bos_token = chat_template = None
    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """97 documents of unlike lengths, some of them empty; no number comes twice."""
    rng, first, lines = np.random.default_rng(0), 1, []
    for size in rng.integers(0, 40, 97):
        lines.append(json.dumps({"text": " ".join(map(str, range(first, first + size)))}))
        first += int(size)
    path = tmp_path / "numbers.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def lanes_of(path: Path, count: int, length: int = 16) -> list[Any]:
    packed = tool("pretraining.packed")
    documents = packed.Documents([str(path)], Words(), 3)
    return [packed.Lane(documents, index, count, length) for index in range(count)]


def test_each_token_comes_once_an_epoch(numbers: Path) -> None:
    """A single lane reads all documents one after the other, each with its end behind it."""
    texts = [json.loads(line)["text"].split() for line in numbers.read_text().splitlines()]
    documents = {int(t[0]): [int(w) for w in t] + [0] for t in texts if t}
    total = sum(map(len, documents.values()))
    (lane,) = lanes_of(numbers, 1)
    ids = [i for _ in range(-(-2 * total // 16)) for i in lane.next()]
    orders = []
    for start in (0, total):
        epoch, order = ids[start : start + total], []
        assert Counter(i for i in epoch if i) == Counter(
            i for d in documents.values() for i in d if i
        )
        while epoch:  # whole documents in some order
            order.append(epoch[0])
            document = documents[epoch[0]]
            assert epoch[: len(document)] == document
            epoch = epoch[len(document) :]
        orders.append(order)
    assert orders[0] != orders[1] and orders[0] != sorted(orders[0])


def test_text_files_and_conversations_are_read(tmp_path: Path) -> None:
    """A folder of both: text in pieces of whole lines, messages by the tokenizer's template."""
    packed = tool("pretraining.packed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMALL)
    talk = [{"role": "user", "content": "Where is Anna?"},
            {"role": "assistant", "content": "In Rome."}]  # fmt: skip
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "talks.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    lines = [f"Line {number} of the text.\n" for number in range(3000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    (tmp_path / "b.txt").write_text("Short, ünd ends without a line's end")
    documents = packed.Documents([str(tmp_path)], tokenizer, 0)
    texts = [tokenizer.decode(documents.tokens(number)) for number in range(documents.count)]
    rendered = tokenizer.apply_chat_template(talk, tokenize=False, enable_thinking=False)
    assert texts[-1] == rendered.rstrip("\n") and texts[-1].count("<|im_end|>") == 2
    assert texts[-2] == "Short, ünd ends without a line's end<|im_end|>"
    pieces = [text.removesuffix("<|im_end|>") for text in texts[:-2]]
    assert "".join(pieces) == "".join(lines) and len(pieces) > 3
    assert all(piece.startswith("Line") and piece.endswith("\n") for piece in pieces)
    assert max(map(len, pieces)) < (1 << 14) + 40


def test_what_cannot_be_read_is_passed_over_and_told(tmp_path: Path, capsys: Printed) -> None:
    """Bad lines among good ones: the good ones come, each time."""
    documents = tool("pretraining.packed").Documents
    bad = ['{"text": "', "17", '{"conversations": {}}', '{"messages": "2"}', '{"txt": "3"}']
    lines = [f'{{"text": "{number}"}}' for number in range(40, 50)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*lines, *bad, *bad]) + "\n")
    found = documents([str(tmp_path)], Words(), 0)
    numbers = [*range(found.count)] * 2
    told = capsys.readouterr().err
    assert [found.tokens(number)[:1] for number in numbers if found.tokens(number)] == [
        [number] for number in range(40, 50)
    ] * 2
    told += capsys.readouterr().err
    assert len(told.splitlines()) == 5 and "further ones are counted" in told.splitlines()[-1]
    assert "a.jsonl, line 11: not JSON" in told
    assert len(found.unread) == 10
    other = tmp_path / "other.jsonl"  # of two sources, one of a wrong schema
    other.write_text("\n".join(bad) + "\n")
    with pytest.raises(ValueError, match="other.jsonl holds no text to train on"):
        documents([str(path), str(other)], Words(), 0)
    (tmp_path / "b.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="b.txt holds no text to train on"):
        documents([str(tmp_path / "b.txt")], Words(), 0)
    assert "b.txt, from byte 0: not UTF-8 text" in capsys.readouterr().err


def qwen3(seed: int, **shape: int) -> Any:
    """A Qwen3 of random weights, with epsilon far below the mean squares that it is added to."""
    torch.manual_seed(seed)
    facts = {"vocab_size": 64, "head_dim": 8, "rms_norm_eps": 1e-12, "initializer_range": 0.3,
             "tie_word_embeddings": True, **shape}  # fmt: skip
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**facts)).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


S = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
     "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip
# Four times as wide, so that sqrt(64 / 16) is exact; three more queries for each key-value head.
L = {"hidden_size": 64, "intermediate_size": 40, "num_hidden_layers": 3,
     "num_attention_heads": 15, "num_key_value_heads": 3}  # fmt: skip


def planted(small: Any) -> Any:
    """A large model that computes what the small one does; all else in it is zero."""
    large = qwen3(1, **L)
    with torch.no_grad():
        for parameter in large.parameters():
            parameter.zero_()
        large.model.embed_tokens.weight[:, :16] = small.model.embed_tokens.weight
        large.model.norm.weight[:16] = small.model.norm.weight / 2
        for index, own in enumerate(small.model.layers):
            layer = large.model.layers[index]
            for norm in ("input_layernorm", "post_attention_layernorm"):
                getattr(layer, norm).weight[:16] = getattr(own, norm).weight / 2
            for norm in ("q_norm", "k_norm"):
                getattr(layer.self_attn, norm).weight[:] = getattr(own.self_attn, norm).weight
            theirs, ours = layer.self_attn, own.self_attn
            for head in range(2):  # of keys; two queries each here, five there
                rows = slice(8 * head, 8 * head + 8)
                theirs.k_proj.weight[rows, :16] = ours.k_proj.weight[rows]
                theirs.v_proj.weight[rows, :16] = ours.v_proj.weight[rows]
                for query in range(2):
                    there, here = 8 * (5 * head + query), 8 * (2 * head + query)
                    part = ours.q_proj.weight[here : here + 8]
                    theirs.q_proj.weight[there : there + 8, :16] = part
                    part = ours.o_proj.weight[:, here : here + 8]
                    theirs.o_proj.weight[:16, there : there + 8] = part
            layer.mlp.gate_proj.weight[:24, :16] = own.mlp.gate_proj.weight
            layer.mlp.up_proj.weight[:24, :16] = own.mlp.up_proj.weight
            layer.mlp.down_proj.weight[:16, :24] = own.mlp.down_proj.weight
    return large


def test_a_slice_of_a_planted_model_is_the_small_one() -> None:
    """To the bit; and the large model itself computes the same."""
    small = qwen3(0, **S)
    large = planted(small)
    ids = torch.randint(0, 64, (2, 11), generator=torch.Generator().manual_seed(0))
    found = qwen3(2, **S)
    sliced = tool("pretraining.slicing").sliced
    with torch.no_grad():
        expected = small(ids).logits
        assert (found(ids).logits - expected).abs().max() > 1  # negative control
        found.load_state_dict(sliced(large.state_dict(), large.config, small.config))
        assert torch.equal(found(ids).logits, expected)
        torch.testing.assert_close(large(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokenizer", ["QWEN", "MISTRAL"])
def test_where_values_were_told(tokenizer: str) -> None:
    """What stands there is the value, told of the same name and attribute."""
    samples = tool("pretraining.samples")
    chat = getattr(tool("zoo_chats"), tokenizer)
    tokens = samples.train_tokenizer(chat)
    rng = random.Random(0)
    places = 0
    for _ in range(12):
        sample = samples.chat_sample(rng, tokens, 20, 6, 5, 1.0, chat)
        for asked, told in sample.told_at.items():
            assert sample.ids[asked] == sample.ids[told] and told < sample.asked <= asked
            assert sample.recalled[asked] and sample.weights[asked] == samples.VALUE_WEIGHT
            answer = tokens.decode(sample.ids[asked - 8 : asked + 2])
            around = tokens.decode(sample.ids[max(told - 12, 0) : told + 8])
            name = next(word for word in reversed(answer.split()) if word in dialogues.NAMES[:20])
            assert sample.recalled[asked] in around and name in around
            places += 1
    assert places > 12 * 6
    words = samples.content_words(tokens)
    sample = samples.pairs_sample(rng, words, 100, 1)
    assert len(sample.told_at) == sum(sample.weights) == sample.recalled.count("pair") > 5
    for asked, told in sample.told_at.items():
        first, second = (sample.ids[place - 2 : place + 1] for place in (asked, told))
        assert first == second and told < sample.asked <= asked

"""What a conversion to latents costs the zoo's models, by rank, metric and width of the rotary key.

    python benchmarks/converted_mla.py --model tiny-qwen3-s --json FILE
    python benchmarks/converted_mla.py --model tiny-qwen3-s --recover 400 --json FILE

Held-out dialogues up to the first answer, by PyTorch in float32. For each setting of
``tools/convert_mla.py``: KL(original || converted) over the answers' tokens, the share of answers
whose every token is the converted model's first choice, and the largest difference of a logit.
Beside them, the share of the energy of keys and values that a rank leaves out (mean over layers):
by the singular values, which know the calibration alone, and as held-out dialogues have it. No
fine-tune follows a conversion. ``--recover``: instead, one narrow setting before and after that
many steps of ``tools/recover_mla.py``, at a rate for tiny models.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvlingo_mlx.embedded import zoo, zoo_names
from kvlingo_mlx.embedded.dialogues import for_distilling, for_fitting, held_out
from kvlingo_mlx.reporting import measure
from kvlingo_mlx.tokenization.samples import Sample, tokenise

LENGTH, SEQUENCES = 512, 64  # of the calibration
FULL = 1 << 20  # more than any rank
RANKS = (16, 24, 32, 48, 64, 96)
NARROW = {"rank": 32, "rotary": 32}  # what is recovered


def tool() -> ModuleType:
    """``tools/convert_mla.py``."""
    sys.path.append(str(Path(__file__).parents[1] / "tools"))
    return importlib.import_module("convert_mla")


def settings(width: int) -> Iterator[dict[str, Any]]:
    """What is tried; ``width`` is that of all keys."""
    for rotary in (width, 96, 64, 48, 40, 32):
        yield {"rank": FULL, "rotary": rotary}
    for rank, metric, rotary in itertools.product(RANKS, ("covariance", "weights"), (width, 64)):
        yield {"rank": rank, "rotary": rotary, "metric": metric}
    for rank in (24, 32, 48, 64):
        yield {"rank": rank, "rotary": width, "apart": True}
        for ranks in ("residual", "total"):
            yield {"rank": rank, "rotary": width, "ranks": ranks, "multiple": 8}


@torch.no_grad()
def answers(folder: Path, samples: list[Sample]) -> list[torch.Tensor]:
    """The logits (T, V) at each dialogue's answer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [
        model(torch.tensor([s.prefix + s.continuation])).logits[0, len(s.prefix) - 1 : -1].double()
        for s in samples
    ]


def compared(
    own: list[torch.Tensor], found: list[torch.Tensor], samples: list[Sample]
) -> dict[str, Any]:
    """KL a token, the share of right answers, the largest difference of a logit."""
    both = [(a.log_softmax(-1), b.log_softmax(-1)) for a, b in zip(own, found, strict=True)]
    kl = torch.cat([(p.exp() * (p - q)).sum(dim=-1) for p, q in both])
    right = [
        float((b.argmax(dim=-1) == torch.tensor(s.continuation)).all())
        for b, s in zip(found, samples, strict=True)
    ]
    most = max(float((a - b).abs().max()) for a, b in zip(own, found, strict=True))
    return {"kl": float(kl.mean()), "recall": sum(right) / len(right), "logits": most}


class Spectra:
    """What is left out of keys and values, told by singular values and found on other text."""

    def __init__(self, convert: ModuleType, folder: Path, work: Path, other: Path) -> None:
        """``work`` and ``other`` hold the moments of the calibration and of the held-out text."""
        self.convert, self.folder, self.work, self.other = convert, folder, work, other
        self.shape = convert.shape_of(AutoConfig.from_pretrained(folder))

    def of(self, chosen: dict[str, Any], ranks: list[int]) -> dict[str, float]:
        """Both shares for these settings and ranks, in percent, means over layers."""
        told, found = [], []
        for layer, rank in enumerate(ranks):
            name = self.convert.moments_file(layer)
            mine, others = (load_file(at / name)["covariance"] for at in (self.work, self.other))
            weights = self.convert.Weights(self.folder)
            tensors = weights.under(f"model.layers.{layer}.self_attn.")
            outputs = torch.cat([tensors[f"{n}_proj.weight"].double() for n in "kv"])
            settings = self.convert.Settings(**chosen)
            basis = self.convert.basis(outputs, mine, self.shape, settings)
            told.append(float(basis.energies[rank:].sum() / basis.energies.sum()))
            found.append(self._left_out(outputs, others.double(), basis, rank))
        return {"told": 100 * sum(told) / len(told), "found": 100 * sum(found) / len(found)}

    def _left_out(
        self, outputs: torch.Tensor, moment: torch.Tensor, basis: Any, rank: int
    ) -> float:
        """The share of the held-out energy, each head of keys and all values weighing as there."""
        kept = basis.directions[:, :rank]
        scaled = basis.scales[:, None] * outputs
        lacking = (scaled - kept @ (kept.T @ scaled)) / basis.scales[:, None]
        energy, lost = (((w @ moment) * w).sum(dim=1) for w in (outputs, lacking))
        keys, kv_heads = self.shape.keys, self.shape.kv_heads
        heads = (e[:keys].view(kv_heads, -1).sum(dim=1) for e in (lost, energy))
        of_keys = torch.div(*heads).mean()
        return float(of_keys + lost[keys:].sum() / energy[keys:].sum()) / 2


def recovered(model: Path, original: Path, root: Path, steps: int) -> Path:
    """The model after a fine-tune on dialogues that nothing else is measured on."""
    data, out = root / "dialogues.jsonl", root / "recovered"
    talks = (for_distilling(index, questions=1).conversation() for index in range(700))
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    script = Path(__file__).parents[1] / "tools" / "recover_mla.py"
    command = [sys.executable, script, model, original, out, "--data", data, "--steps", steps]
    command += ["--rate", 5e-4, "--tokens", 640, "--held-out", 12, "--validate-every", 1000]
    subprocess.run(list(map(str, command)), check=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-qwen3-s", choices=zoo_names())
    parser.add_argument("--dialogues", type=int, default=48)
    parser.add_argument("--recover", type=int, metavar="STEPS")
    parser.add_argument("--json", default="-")
    args = parser.parse_args()
    logging.disable_progress_bar()
    convert, folder = tool(), zoo(args.model)
    tokenizer, config = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    talks = held_out(args.dialogues, seed=3)
    told = [{"messages": d.conversation()[: len(d.messages) + 1]} for d in talks]
    samples, rows = [tokenise(record, tokenizer) for record in told], []
    own = answers(folder, samples)
    with tempfile.TemporaryDirectory() as root:
        work = Path(root) / "calibration"
        records = ({"messages": d.conversation()} for d in for_fitting(1000))
        tokens = convert.packed(records, tokenizer, SEQUENCES, LENGTH)
        convert.calibrate(config, convert.Weights(folder), tokens, work)
        others = ({"messages": d.conversation()} for d in held_out(1000, seed=4))
        unseen = convert.packed(others, tokenizer, SEQUENCES, LENGTH)
        convert.calibrate(config, convert.Weights(folder), unseen, Path(root) / "held-out")
        spectra = Spectra(convert, folder, work, Path(root) / "held-out")
        tried = [NARROW] if args.recover else settings(convert.shape_of(config).keys)
        for number, chosen in enumerate(tried):
            out = Path(root) / str(number)
            written = convert.convert(folder, work, out, convert.Settings(**chosen))
            row = compared(own, answers(out, samples), samples)
            row["left_out"] = spectra.of(chosen, written["kv_lora_ranks"])
            if args.recover:
                after = recovered(out, folder, Path(root), args.recover)
                row["recovered"] = compared(own, answers(after, samples), samples)
            rows.append({**chosen, "ranks_found": written["kv_lora_ranks"], **row})
            print(rows[-1], flush=True)
    native = compared(own, own, samples)["recall"]
    facts = {
        "model": args.model,
        "recover": args.recover,
        "dialogues": args.dialogues,
        "calibration": [SEQUENCES, LENGTH],
    }
    entry = measure.record("converted_mla", facts, {"native_recall": native, "rows": rows})
    measure.append_json(args.json, entry)


if __name__ == "__main__":
    main()

"""What vLLM takes to a first token, and for each token after it: the paper's table "app:tab:vllm".

One request at a time, of random tokens, by models of random weights at true widths and without
prefix caching. The paper's clients were served over HTTP; here vLLM is called in this process, so
the time to the first token lacks a server's. vLLM is no dependency of this package.
"""

from __future__ import annotations

import gc
import importlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.paper.timing.widths import SHAPES, TOKENS, shape_of
from kvlingo_mlx.errors import MissingExtraError

# The table's rows, and the shapes that are served.
SERVED_ROWS = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-1.7B": "qwen3-1.7b",
    "Qwen3-4B": "qwen3-4b",
    "Qwen3-8B": "qwen3-8b",
    "Gemma-3-4B": "gemma-3-4b",
    "Gemma-3-12B": "gemma-3-12b",
    "Gemma-3-12B, 4 KV heads": "gemma-3-12b-4kv",
}
SERVED = tuple(SERVED_ROWS.values())
ARCHITECTURES = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}
REQUESTS, DECODED, WARM_UPS = 16, 128, 2  # as the paper's table says; the warm-ups are ours


@dataclass(frozen=True)
class Serving:
    """How vLLM is timed.

    Attributes:
        tokens: Prompt lengths.
        requests: Requests of each length, one at a time.
        decoded: Tokens that a request generates.
        dtype: Of the weights.
    """

    tokens: tuple[int, ...] = TOKENS
    requests: int = REQUESTS
    decoded: int = DECODED
    dtype: str = "bfloat16"

    def check(self, names: Sequence[str]) -> None:
        """Refuse (ValueError) models that are not there, and prompts beyond their context."""
        if min(self.tokens, default=0) < 1 or self.requests < 1 or self.decoded < 2:
            raise ValueError(
                f"vLLM is asked for {self.requests} requests of {self.decoded} tokens after "
                f"prompts of {', '.join(map(str, self.tokens)) or 'none'}; give at least 1, 2 and 1"
            )
        longest = max(self.tokens) + self.decoded
        for name in names:
            if name not in SHAPES:
                raise ValueError(f"the model is {name!r}; give some of {', '.join(SHAPES)}")
            room = SHAPES[name]["max_position_embeddings"]
            if longest > room:
                raise ValueError(f"{longest} tokens are beyond the context of {name}, {room}")


def vllm() -> Any:
    """vLLM's module.

    Raises:
        MissingExtraError: It is not installed, or cannot be imported here.
    """
    try:
        return importlib.import_module("vllm")
    except ImportError as error:
        raise MissingExtraError(
            f"vLLM cannot be imported here ({error}): install it on the machine with the GPU by "
            "`pip install vllm`, or leave out vLLM's rows"
        ) from None


def time_models(
    names: Sequence[str] = SERVED,
    serving: Serving | None = None,
    listen: Callable[[str, dict[str, Any]], None] = lambda name, found: None,
) -> dict[str, Any]:
    """Time models one after the other; returns the results of a record of kind ``cuda_vllm``.

    Args:
        names: Of :data:`~.widths.SHAPES`; default :data:`SERVED`.
        serving: How they are timed.
        listen: Called with each model and length's findings as they come.

    Returns:
        For each model a list, one entry a length: ``tokens``, ``first_token`` and ``per_token``,
        seconds of each request.

    Raises:
        MissingExtraError: vLLM is not installed.
        ValueError: As for :meth:`Serving.check`.
    """
    serving = serving or Serving()
    serving.check(names)
    module = vllm()
    results: dict[str, Any] = {"version": str(module.__version__), "models": {}}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            engine = open_engine(module, name, Path(folder), serving)
            for tokens in serving.tokens:
                found = time_length(module, engine, name, tokens, serving)
                results["models"].setdefault(name, []).append(found)
                listen(name, found)
            del engine
            gc.collect()
    return results


def config_of_record(names: Sequence[str], serving: Serving) -> dict[str, Any]:
    """The settings as a record keeps them, with what makes a run comparable."""
    return {
        **asdict(serving),
        "models": list(names),
        "batch": 1,
        "stack": "vLLM",
        "client": "in process",
        "weights": "random",
    }


def write_config(name: str, folder: Path) -> None:
    """A folder that vLLM takes for a model's: its config.json alone."""
    from benchmarks.paper.gpu.switch import config_of

    shape = shape_of(name)
    config = config_of(shape)
    config.architectures = [ARCHITECTURES[shape["model_type"]]]
    config.save_pretrained(folder)


def open_engine(module: Any, name: str, folder: Path, serving: Serving) -> Any:
    """vLLM's ``LLM`` of random weights at a model's widths, without tokenizer or prefix cache."""
    write_config(name, folder)
    return module.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=serving.dtype,
        enable_prefix_caching=False,
        max_model_len=max(serving.tokens) + serving.decoded,
        max_num_seqs=1,
    )


def time_length(
    module: Any, engine: Any, name: str, tokens: int, serving: Serving
) -> dict[str, Any]:
    """Seconds to the first token, and for each token after it, of every request.

    Each is two calls, one that ends with the first token and one that goes on. A prompt's tokens
    are others in every call.
    """
    rng = np.random.default_rng(tokens)
    rows = SHAPES[name]["vocab_size"]

    def took(count: int) -> float:
        prompt = {"prompt_token_ids": rng.integers(rows, size=tokens).tolist()}
        asked = module.SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False
        )
        started = perf_counter()
        (answer,) = engine.generate([prompt], asked, use_tqdm=False)
        seconds = perf_counter() - started
        given = len(answer.outputs[0].token_ids)
        if given != count:
            raise RuntimeError(f"vLLM generated {given} tokens for {name} where {count} were asked")
        return seconds

    for _ in range(WARM_UPS):
        took(1)
    first, each = [], []
    for _ in range(serving.requests):
        first.append(took(1))
        each.append((took(serving.decoded) - first[-1]) / (serving.decoded - 1))
    return {"tokens": tokens, "first_token": first, "per_token": each}


def in_lines(name: str, found: dict[str, Any]) -> list[str]:
    """One length's findings as lines of text."""
    first, each = (1e3 * float(np.median(found[key])) for key in ("first_token", "per_token"))
    return [f"{name}, {found['tokens']} tokens, vLLM: {first:.1f} ms to the first token, "
            f"{each:.2f} ms for each one after it"]  # fmt: skip

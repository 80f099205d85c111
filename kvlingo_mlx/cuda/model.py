"""A frozen transformers model with the operations that training needs.

It reads one conversation at a time, without padding (appendix "Training protocol"). States are
(T, d) for T tokens, with the keys or values of all heads side by side.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PretrainedConfig
from transformers.utils import logging

from kvlingo_mlx.cuda import families
from kvlingo_mlx.cuda.families import POINTS, Positions, TorchFamily, family_of
from kvlingo_mlx.embedded import MODELS
from kvlingo_mlx.errors import KVLingoError, MissingModelError, UnsupportedModelError
from kvlingo_mlx.format import fingerprints
from kvlingo_mlx.format.geometry import CacheGeometry, vocabulary_fingerprint
from kvlingo_mlx.format.translator_config import ModelSpec
from kvlingo_mlx.format.translator_folder import probe
from kvlingo_mlx.loading.hub import MODEL_FILES, resolve


@dataclass(frozen=True)
class States:
    """Keys (at a capture point) and values of a prefix: per cache layer (T, heads * dim)."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def side(self, side: str) -> tuple[torch.Tensor, ...]:
        """The layers of ``"keys"`` or ``"values"``."""
        return self.keys if side == "keys" else self.values

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
        """The states with every array changed."""
        keys, values = (tuple(map(change, side)) for side in (self.keys, self.values))
        return States(keys, values)


@dataclass(frozen=True)
class TorchModel:
    """A frozen transformers model, with its tokenizer and the facts about its cache."""

    model: Any
    tokenizer: Any
    config: dict[str, Any]  # the text model's
    name: str
    revision: str | None = None
    path: Path | None = None

    @cached_property
    def family(self) -> TorchFamily:
        return family_of(self.config["model_type"])

    @cached_property
    def attentions(self) -> list[Any]:
        """The attention modules that own a cache, in cache order."""
        return self.family.attentions(self.model)

    @cached_property
    def geometry(self) -> CacheGeometry:
        return self.family.geometry(self.model)

    @property
    def context_length(self) -> int:
        """The most tokens that the model was made for."""
        return self.family.text(self.model).config.max_position_embeddings

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model and its cache."""
        return self.model.dtype

    # As a record of an MLX model has them: the cache's dtype, and no quantised weights.
    cache_dtype, bits = dtype, None

    @property
    def precision(self) -> str:
        """The name of the weights' dtype, for example ``bfloat16``."""
        return str(self.dtype).rsplit(".", 1)[-1]

    @cached_property
    @torch.no_grad()
    def projections(self) -> fingerprints.Sketch:
        """A sketch of the projections, as MLX models have it, to detect fine-tuned copies."""
        outputs = []
        for attention in self.attentions:
            for module in self.family.taps(attention):
                weight = module.weight.float()
                known = torch.tensor(probe(weight.shape[1]), device=weight.device).float()
                outputs.append((weight * known).sum(dim=-1).cpu().numpy())
        return fingerprints.sketch(outputs)

    @cached_property
    def weights_fingerprint(self) -> str:
        """Sha256 that distinguishes this model from all others, the same in both runtimes."""
        return fingerprints.weights_fingerprint(self)

    @cached_property
    def tokenizer_fingerprint(self) -> str:
        return vocabulary_fingerprint(self.tokenizer.get_vocab())

    @cached_property
    def norms_fingerprint(self) -> str:
        norms = {
            name: module.weight.detach().float().cpu().numpy()
            for name, module in self.family.text(self.model).named_modules()
            if type(module).__name__.endswith("RMSNorm") and hasattr(module, "weight")
        }
        return fingerprints.norms_fingerprint(norms, self.path)

    def spec(self) -> ModelSpec:
        """The description of this model that a translator carries."""
        return ModelSpec.of(self)

    # ---- forward passes ---------------------------------------------------------------

    def run(
        self, ids: torch.Tensor, cache: DynamicCache | None = None, **more: torch.Tensor
    ) -> torch.Tensor:
        """The final hidden states (rows, T, width) of ``ids`` after the contents of ``cache``."""
        decoder = self.family.text(self.model)
        output = decoder(ids, past_key_values=cache, use_cache=cache is not None, **more)
        return output.last_hidden_state

    def hidden(
        self, tokens: Sequence[int], cache: DynamicCache | None = None, **more: torch.Tensor
    ) -> torch.Tensor:
        """The final hidden states (T, width) of one text's ``tokens``."""
        return self.run(torch.tensor([list(tokens)], device=self.device), cache, **more)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next-token logits (T, vocabulary), in float32 or wider."""
        logits = self.family.logits(self.model, hidden)
        return logits if logits.dtype == torch.float64 else logits.float()

    @torch.no_grad()
    def states(self, tokens: Sequence[int], capture: str = "pre_norm") -> States:
        """The keys (at a capture point) and values of ``tokens``, read from position 0 on."""
        with self.tapped() as taken:
            self.hidden(tokens)
        return self.states_of(taken, capture)

    @contextlib.contextmanager
    def tapped(self, layers: int | None = None) -> Iterator[dict[Any, torch.Tensor]]:
        """Record the projections' outputs (T, d) in the first ``layers`` cache layers, or in all.

        One conversation is read.
        """
        taken: dict[Any, torch.Tensor] = {}

        def record(module: Any, _inputs: Any, output: torch.Tensor) -> None:
            taken[module] = output[0]

        taps = (module for a in self.attentions[:layers] for module in self.family.taps(a))
        hooks = [module.register_forward_hook(record) for module in taps]
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def states_of(
        self, taken: Mapping[Any, torch.Tensor], capture: str, layers: int | None = None
    ) -> States:
        """The keys and values in recorded outputs (see :meth:`tapped`), from position 0 on."""
        origin, keys, values = self.family.points[0], [], []
        for t, attention in enumerate(self.attentions[:layers]):
            outputs = [taken[module] for module in self.family.taps(attention)]
            key, value = self.family.states(attention, outputs)
            keys.append(self.advance(t, key, origin, capture))
            values.append(self.advance_values(t, value, origin, capture))
        return States(tuple(keys), tuple(values))

    # ---- keys and caches --------------------------------------------------------------

    def advance(
        self, layer: int, keys: torch.Tensor, origin: str, goal: str, start: Positions = 0
    ) -> torch.Tensor:
        """Keys (T, d) of a cache layer, taken from one capture point to a later one, (T, d).

        Rotary keys of a latent layer need only their rotation.
        """
        if origin == goal:
            return keys
        attention = self.attentions[layer]
        steps = _steps(origin, goal)
        heads = keys.reshape(len(keys), -1, self.family.key_dim(attention))
        if "pre_norm" in steps:
            heads = self.family.normalise(attention, heads)
        if "post_norm" in steps:
            heads = self.family.rotate(self.model, attention, heads, start)[0].transpose(0, 1)
        return heads.reshape(len(keys), -1)

    def advance_values(
        self, layer: int, values: torch.Tensor, origin: str, goal: str
    ) -> torch.Tensor:
        """The same for values (T, d)."""
        if "pre_norm" not in _steps(origin, goal):
            return values
        heads = values.view(len(values), self.geometry.layers[layer].kv_heads, -1)
        return self.family.normalise_values(self.attentions[layer], heads).flatten(1)

    def entry(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        capture: str,
        start: Positions = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Translated keys and values (T, d) in the form of the cache, (1, H, T, D) each."""
        keys = self.advance(layer, keys, capture, "post_rope", start)
        values = self.advance_values(layer, values, capture, "post_rope")
        heads = self.geometry.layers[layer].kv_heads
        by_head = (
            array.to(self.dtype).view(len(array), heads, -1).transpose(0, 1)[None]
            for array in (keys, values)
        )
        return self.family.stored(*by_head)

    def cache(
        self, entries: Sequence[tuple[torch.Tensor, torch.Tensor]], num_tokens: int
    ) -> DynamicCache:
        """A cache of ``num_tokens`` that holds the :meth:`entry` of every layer.

        A layer with a window needs its last tokens only, from ``geometry.first_kept`` on.
        """
        windowed = any(g.window is not None for g in self.geometry.layers)
        cache: Any = DynamicCache(config=self.model.config) if windowed else DynamicCache()
        for layer, (keys, values) in enumerate(entries):
            cache.update(keys, values, layer)
            if self.geometry.layers[layer].window is not None:
                cache.layers[layer].cumulative_length = num_tokens  # it counted the entries alone
        return cache


def _steps(origin: str, goal: str) -> tuple[str, ...]:
    """The steps between two capture points; each is named after the point before it."""
    first, last = ("post_norm" if point == "latent" else point for point in (origin, goal))
    return POINTS[POINTS.index(first) : POINTS.index(last)]


def read_config(name: str, path: Path) -> tuple[dict[str, Any], Any]:
    """A text model's config and its tokenizer, of a folder that messages call ``name``.

    Raises:
        MissingModelError: The config or the tokenizer is damaged.
        UnsupportedModelError: Its family cannot be trained.
    """
    with _damage(name):
        config, _ = PretrainedConfig.get_config_dict(path)
        if "bits" in (config.get("quantization") or {}):
            raise UnsupportedModelError(
                f"{name} has {config['quantization']['bits']}-bit weights of mlx-lm, which PyTorch "
                "cannot read; use --device mlx, or give the model that it was made from"
            )
        config = config | config.get("text_config", {})
        kind = config.get("model_type")
        needed = () if kind is None else family_of(kind).needed
        lacking = [name for name in ("model_type", *needed) if name not in config]
        if lacking:
            raise MissingModelError(
                f"{name} has no {', '.join(lacking)} in its config.json; download the model again"
            )
        return config, AutoTokenizer.from_pretrained(path)


def load(
    path_or_hf_repo: str, *, dtype: torch.dtype | str = torch.bfloat16, device: str = "cpu"
) -> TorchModel:
    """Load a frozen model by folder, Hub id, or the name of an embedded one.

    ``dtype`` may be ``"auto"``: as it is stored.

    Raises:
        MissingModelError: There is no such model, or it is incomplete or damaged.
        UnsupportedModelError: Its family cannot be trained, or mlx-lm runs it differently.
    """
    path, commit = resolve(path_or_hf_repo, None, MODEL_FILES, MissingModelError)
    config, tokenizer = read_config(path_or_hf_repo, path)
    with _damage(path_or_hf_repo):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        model, report = loaded
        _check_weights(path_or_hf_repo, report)
        family = family_of(config["model_type"])
        families.check_agreement(family, model, config, path_or_hf_repo)
        family.align(model)
    model = model.to(device).eval().requires_grad_(False)
    name = path.name if path.parent == MODELS else str(path_or_hf_repo)
    return TorchModel(model, tokenizer, config, name, commit, path)


@contextlib.contextmanager
def _damage(name: str) -> Iterator[None]:
    """Turn any error of transformers for a damaged folder into MissingModelError, without a bar."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    except KVLingoError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
        raise MissingModelError(
            f"{name} cannot be loaded ({why}); give a whole model folder or a Hub id"
        ) from None
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_weights(name: str, report: Mapping[str, Collection[Any]]) -> None:
    """Refuse weights that do not cover the model, as transformers makes up missing ones.

    Its report leaves out tied and derived tensors (a second head, RoPE's frequencies).
    """
    shapes = [
        f"{n} {tuple(found)}, not {tuple(wanted)}" for n, found, wanted in report["mismatched_keys"]
    ]
    kinds = ("missing", report["missing_keys"]), ("unexpected", report["unexpected_keys"])
    for what, names in (*kinds, ("misshapen", shapes)):
        if names:
            listed = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise MissingModelError(
                f"{name}: {len(names)} {what} weight(s) for its config.json: {listed}; download "
                "the model again"
            )

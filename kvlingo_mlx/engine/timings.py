"""Measured times to a first token, kept by pair and machine, from which ``auto`` chooses.

`kvlingo-mlx bench --save-timings` measures and writes them; `strategy="auto"` reads them. The
source's prefill may cost more than it saves (the paper's accelerator is at par at 1024 tokens,
appendix "Dense-to-MoE cache translation"). The turning point depends on both models, the maps and
the machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvlingo_mlx.caches.memory import weights_bytes
from kvlingo_mlx.engine.hybrid import Native
from kvlingo_mlx.errors import MalformedTimingsError, MissingTimingsError, printable
from kvlingo_mlx.format.atomic import sync_file
from kvlingo_mlx.format.geometry import canonical_json
from kvlingo_mlx.loading.translators import TranslatorFacts, home
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.reporting.measure import machine
from kvlingo_mlx.translators.base import Translator

VERSION = 1
WAYS = ("native", "accelerator", "switch")
# The fields of the file; "profile_version" dates from when these files were called profiles.
FIELDS = {"profile_version", "key", "prompt_tokens", "seconds"}
# The gain from which a translated cache is chosen: native is exact, and medians err by this much.
GAIN = 1.02
USUAL_STEP = 2048  # tokens per prefill chunk, in bench as in generate
STEEPEST = 2.0  # a prefill's seconds grow at most with the square of its tokens


@dataclass(frozen=True)
class Timings:
    """Median seconds to the first token by each way, for one pair on one machine.

    Attributes:
        key: The models, the maps and the machine, from :func:`key_of`.
        prompt_tokens: The measured lengths, ascending.
        seconds: For each of ``WAYS``, one median per length. A switch starts from a source that
            holds the conversation; the accelerator starts with the source's prefill.
    """

    key: Mapping[str, Any]
    prompt_tokens: tuple[int, ...]
    seconds: Mapping[str, tuple[float, ...]]

    def at(self, way: str, prompt_tokens: int) -> float:
        """Seconds expected at a length, interpolated linearly in log seconds over log tokens.

        Beyond the measured lengths the outermost slope goes on, held between 0 and 2.
        """
        x, y = np.log(self.prompt_tokens), np.log(self.seconds[way])
        wanted = math.log(prompt_tokens)
        if x[0] <= wanted <= x[-1] or len(x) == 1:
            return float(np.exp(np.interp(wanted, x, y)))
        near, far = (0, 1) if wanted < x[0] else (-1, -2)
        slope = (y[near] - y[far]) / (x[near] - x[far])
        slope = min(max(slope, 0.0), STEEPEST)
        return float(np.exp(y[near] + slope * (wanted - x[near])))

    def best(self, prompt_tokens: int, way: str = "accelerator") -> str:
        """``way``, or ``native`` unless ``way`` is faster by the factor ``GAIN``."""
        native, other = (self.at(name, prompt_tokens) for name in ("native", way))
        return way if GAIN * other < native else "native"


# ---- the key ----------------------------------------------------------------------------------


def key_of(
    source: LanguageModel,
    target: LanguageModel,
    maps: Translator | TranslatorFacts,
    native: Native | None = None,
    step_size: int = USUAL_STEP,
) -> dict[str, Any]:
    """What timings hold for: both models as loaded, the maps' work, the native part, the machine.

    The work is the maps' form and their FLOPs per token: two MLPs can differ in hidden width.
    ``native`` is the part of a prefix that the target reads itself; None is plain translation.
    ``step_size`` is the tokens per prefill chunk; each chunk reads a model's weights once more.
    """
    config = maps.config
    form = {
        "form": config.form,
        "nu": config.nu,
        "capture": config.capture,
        "bits": maps.bits,
        "dtype": maps.dtype,
        "flops_per_token": maps.flops_per_token,
    }
    own: dict[str, Any] = {} if native in (None, Native()) else {"native": asdict(native)}
    if step_size != USUAL_STEP:
        own["prefill_step_size"] = step_size
    return {
        "source": _model(source),
        "target": _model(target),
        "maps": form,
        "machine": machine(),
    } | own


def _model(model: LanguageModel) -> dict[str, Any]:
    """A model's identity and precision: the bytes of its weights distinguish 4 bits from 8."""
    return {
        "geometry": model.geometry.fingerprint,
        "norms": model.norms_fingerprint,
        "dtype": str(model.cache_dtype).rsplit(".", 1)[-1],
        "weight_bytes": weights_bytes(model),
    }


def _path(key: Mapping[str, Any], folder: str = "timings") -> Path:
    digest = hashlib.sha256(canonical_json(key).encode()).hexdigest()
    return home() / folder / f"{digest[:32]}.json"


def _kept(key: Mapping[str, Any]) -> Path:
    """The path of the timings: in their own folder, or in the folder used before."""
    path, before = _path(key), _path(key, "profiles")
    return before if not path.exists() and before.exists() else path


# ---- the file ---------------------------------------------------------------------------------


def write(timings: Timings) -> Path:
    """Write timings to the local store atomically, in place of older ones of the same key.

    Raises:
        ValueError: There are no lengths, or :func:`read` would refuse the timings.
    """
    path = _path(timings.key)
    facts = {
        "profile_version": VERSION,
        "key": dict(timings.key),
        "prompt_tokens": list(timings.prompt_tokens),
        "seconds": {way: list(times) for way, times in timings.seconds.items()},
    }
    wrong = _fault(facts, timings.key)
    if wrong is not None:
        raise ValueError(f"these times cannot be kept: {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".json", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(facts, indent=2) + "\n")
            file.flush()
            sync_file(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


def read(
    key: Mapping[str, Any], names: Sequence[str], translator: str | None = None, layers: int = 0
) -> Timings:
    """The stored timings of a key.

    Args:
        key: A key from :func:`key_of`.
        names: The names of source and target, for the command that an error message gives.
        translator: The folder or Hub id of a translator that is not the stored one; also for that.
        layers: The translator's own number of native layers: bench measures no other.

    Raises:
        MissingTimingsError: This pair has not been measured on this machine.
        MalformedTimingsError: The file breaks the format.
    """
    path = _kept(key)
    words = ["--source", names[0], "--target", names[1]]
    words += [] if translator is None else ["--translator", translator]
    if (chunks := key.get("prefill_step_size")) is not None:
        words += ["--prefill-step-size", str(chunks)]
    advice = f"`kvlingo-mlx bench {' '.join(words)} --save-timings`"
    own = asdict(Native(layers))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if (asked := key.get("native", asdict(Native()))) != own:
            parts = ", ".join(f"native_{name} {value}" for name, value in asked.items())
            kept = f"the translator's own {layers} native layers" if layers else "plain translation"
            raise MissingTimingsError(
                f"strategy auto goes by measured times, and none of {names[0]} to {names[1]} with "
                f"{parts} are in the local store; {advice} measures {kept}, which -c native_layers="
                f"{layers} asks for; or give native or accelerator"
            ) from None
        if (bits := key["maps"]["bits"]) is not None:
            raise MissingTimingsError(
                f"strategy auto goes by measured times, and {advice} keeps those of maps in "
                f"floats, not in {bits} bits; leave out quantize, or give native or accelerator"
            ) from None
        raise MissingTimingsError(
            f"strategy auto needs timings, and none of {names[0]} to {names[1]} with these "
            f"maps, in this precision and on this machine are in the local store; measure them "
            f"with {advice}, or give native or accelerator"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise _malformed(path, f"cannot be read ({type(error).__name__})", advice) from None
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        raise _malformed(path, "is not valid JSON", advice) from None
    wrong = _fault(facts, key)
    if wrong is not None:
        raise _malformed(path, wrong, advice)
    seconds = {way: tuple(map(float, facts["seconds"][way])) for way in WAYS}
    return Timings(key, tuple(facts["prompt_tokens"]), seconds)


def _malformed(path: Path, wrong: str, advice: str) -> MalformedTimingsError:
    return MalformedTimingsError(printable(f"{path}: {wrong:.200}; measure it again with {advice}"))


def _fault(facts: Any, key: Mapping[str, Any]) -> str | None:
    """The first reason why a file's content is not the timings of ``key``; None if it is."""
    if not isinstance(facts, dict) or "profile_version" not in facts:
        return "holds no timings"
    if facts["profile_version"] != VERSION:
        return f"profile_version is {facts['profile_version']!r}, expected {VERSION}"
    if set(facts) != FIELDS:
        return f"its fields are {sorted(facts)}, expected {sorted(FIELDS)}"
    if facts["key"] != dict(key):
        return "its key is of another pair or machine"
    lengths, seconds = facts["prompt_tokens"], facts["seconds"]
    if not _numbers(lengths, int) or lengths != sorted(set(lengths)):
        return f"prompt_tokens is {lengths!r}, expected ascending positive numbers"
    if not isinstance(seconds, dict) or set(seconds) != set(WAYS):
        return f"seconds must be of {', '.join(WAYS)}"
    for way, times in seconds.items():
        if not _numbers(times, float) or len(times) != len(lengths):
            return f"seconds of {way} must be {len(lengths)} positive numbers"
    return None


def _numbers(values: Any, kind: type) -> bool:
    """Whether ``values`` is a non-empty list of positive finite numbers."""
    return (
        isinstance(values, list)
        and len(values) > 0
        and all(type(v) in (int, kind) and 0 < v < math.inf for v in values)
    )

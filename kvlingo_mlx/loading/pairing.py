"""Whether a translator fits two models: refusals name what differs, lesser differences are told."""

from collections.abc import Iterator
from typing import Any

from kvlingo_mlx.errors import IncompatibleTranslatorError, UnsupportedModelError
from kvlingo_mlx.format.assignment import check_windows
from kvlingo_mlx.format.fingerprints import ROUNDED, SAME
from kvlingo_mlx.format.geometry import layer_differences
from kvlingo_mlx.format.translator_config import ModelSpec, TranslatorConfig
from kvlingo_mlx.loading.notes import tell, to_measure
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.tokenization.aligned_prefix import check_capture, check_layers


def matches(spec: ModelSpec, model: LanguageModel, *, allow_mismatch: bool = False) -> bool:
    """Whether ``model`` is the one that ``spec`` describes.

    ``allow_mismatch`` accepts another checkpoint of the same shape, whose norms differ; the shape
    and the vocabulary must always agree.
    """
    return _difference(spec, model, allow_mismatch) is None


def _difference(spec: ModelSpec, model: LanguageModel, allow_mismatch: bool) -> str | None:
    """The first kind of fact in which a model differs from a spec, in words, or None."""
    model = getattr(model, "full", model)  # another library's models are always whole
    geometry, expected = model.geometry, spec.fingerprint
    if spec.model_type != geometry.model_type:
        return f"model_type is {geometry.model_type}, expected {spec.model_type}"
    if layers := layer_differences(geometry.layers, spec.layers):
        return "; ".join(layers)
    if expected["geometry"] not in (None, geometry.fingerprint):
        return "RoPE, norm epsilon or embedding rows differ (geometry fingerprint)"
    if expected["tokenizer"] not in (None, model.tokenizer_fingerprint):
        return "the vocabulary differs (tokenizer fingerprint)"
    if not allow_mismatch and expected["norms"] not in (None, model.norms_fingerprint):
        return (
            "the weights are those of another checkpoint (norms fingerprint); "
            "allow_mismatch (--allow-mismatch) uses it all the same"
        )
    return None


def check_pair(
    config: TranslatorConfig,
    source: LanguageModel,
    target: LanguageModel,
    *,
    allow_mismatch: bool = False,
) -> None:
    """Refuse a translator that is not for ``source`` and ``target``; warn of lesser differences.

    Raises:
        IncompatibleTranslatorError: The message names the role and the fields that differ.

    Warns:
        KVLingoWarning: A model is another commit with the same norms, has few bits although the
            fit used another precision, or other projections under the same norms.
    """
    swapped = matches(config.source, target) and matches(config.target, source)
    if swapped and not matches(config.source, source):
        raise IncompatibleTranslatorError(
            f"{config.title} goes the other way round: swap the models, or load its reverse"
        )
    source, target = (getattr(model, "full", model) for model in (source, target))
    check_end(config, "source", source, allow_mismatch=allow_mismatch)
    check_end(config, "target", target, allow_mismatch=allow_mismatch)
    check_windows(source.geometry.layers, target.geometry.layers)
    if config.alignment is None:
        check_tokenizers(source, target)
    else:
        check_capture(config.capture)
        check_positions(target)
    for found in (*_lesser(config, "source", source), *_lesser(config, "target", target)):
        text = f"{config.title} is used, though {found}"
        tell(text, f"{text}; {to_measure(config, None)} measures what that costs")


def check_end(
    config: TranslatorConfig, role: str, model: LanguageModel, *, allow_mismatch: bool = False
) -> None:
    """Refuse a model that is not a translator's ``"source"`` or ``"target"`` (``role``).

    Raises:
        IncompatibleTranslatorError: The message names the field that differs.
    """
    spec = config.source if role == "source" else config.target
    if (text := _difference(spec, model, allow_mismatch)) is not None:
        raise IncompatibleTranslatorError(
            f"{config.title} does not fit the {role} model {model.name}: {text}"
        )
    if config.capture not in model.family.points:
        raise IncompatibleTranslatorError(
            f"{config.title} is for {config.capture} keys, which the {role} model {model.name} "
            f"does not have; its capture points are {', '.join(model.family.points)}"
        )


def _lesser(config: TranslatorConfig, role: str, model: LanguageModel) -> Iterator[str]:
    """Differences from the model with which a translator was made that do not forbid its use."""
    spec, fitted = config.source if role == "source" else config.target, config.fitted_on(role)
    known = None not in (spec.revision, model.revision) and spec.name == model.name
    if known and spec.revision != model.revision:  # copies elsewhere have their own commits
        yield (
            f"it was made with commit {spec.revision:.12} of {spec.name}, and this is "
            f"{model.revision:.12} (their norms are the same)"
        )
    if model.bits is not None and fitted not in (None, model.precision):
        yield f"it was fitted on {fitted} and {model.name} runs in {model.precision}"
    kept: Any = config.provenance.get("projections")
    numbers = kept.get(role) if isinstance(kept, dict) else None
    if numbers is None or model.projections is None:  # of quantised ones, rounding would hide it
        return
    apart = model.projections.difference(numbers)
    if apart is not None and apart > (SAME if fitted == model.precision else ROUNDED):
        yield (
            f"the key and value projections of {model.name} differ from those that it was fitted "
            f"on (by up to {apart:.1%}; the norms are the same): another fine-tune, or a LoRA "
            "adapter fused in"
        )


def check_positions(target: LanguageModel) -> None:
    """Refuse a target whose cache must have exactly one entry per token.

    Raises:
        UnsupportedModelError: Its layers have windows, which count entries, or its attention
            depends on absolute positions.
    """
    check_layers(target.geometry.layers, target.name)
    if not target.family.relative_positions:
        raise UnsupportedModelError(
            f"{target.name} cannot take over from a model of another tokenizer: its attention "
            "depends on more of two positions than their distance; choose another target"
        )


def check_one_tokenizer(config: TranslatorConfig, what: str, instead: str) -> None:
    """Refuse a translator between two tokenizers where ``what`` supports only one.

    ``instead`` says what to do.

    Raises:
        IncompatibleTranslatorError: The translator is between two tokenizers.
    """
    if config.alignment is not None:
        raise IncompatibleTranslatorError(
            f"{what} is not available here: {config.title} is between two tokenizers; {instead}"
        )


def check_tokenizers(
    source: LanguageModel,
    target: LanguageModel,
    then: str = "this pair needs a cross-tokenizer translator",
) -> None:
    """Refuse two models whose tokenizers differ; ``then`` ends the message with the consequence.

    Raises:
        IncompatibleTranslatorError: They differ; the message names the first id that does.
    """
    if source.tokenizer_fingerprint == target.tokenizer_fingerprint:
        return
    ours, theirs = (
        {i: token for token, i in model.tokenizer.get_vocab().items()} for model in (source, target)
    )
    first = next(i for i in sorted({*ours, *theirs}) if ours.get(i) != theirs.get(i))
    raise IncompatibleTranslatorError(
        f"the tokenizers of {source.name} and {target.name} differ (id {first} is "
        f"{ours.get(first)!r} and {theirs.get(first)!r}): {then}"
    )

"""The config of a translator that is to be fitted or trained."""

from typing import Any

from kvlingo_mlx.format.assignment import Assignment, by_depth, check_windows
from kvlingo_mlx.format.maps import check_states, unpaired_heads
from kvlingo_mlx.format.translator_config import TranslatorConfig, capture_point
from kvlingo_mlx.tokenization.aligned_prefix import check_capture, check_layers


def config_of_pair(
    source: Any,
    target: Any,
    *,
    assignment: Assignment | None = None,
    nu: int = 1,
    capture: str | None = None,
    **form: Any,
) -> TranslatorConfig:
    """The config of a translator between two models of either runtime.

    Args:
        assignment: The source layers of each target layer; None: ``nu`` of them by depth.
        capture: The capture point of keys; None: the first that both models have.
        form: ``kind``, ``head_mixing``, ``joint`` and ``state_maps`` of a TranslatorConfig.

    Raises:
        IncompatibleTranslatorError: The target has longer windows than the source, the source has
            no layer of a target layer's kind, or rotated keys are captured between two tokenizers.
        UnsupportedModelError: The tokenizers differ, and the target has windows.
        ValueError: Head-wise maps between head counts that do not divide, or a bad ``nu``.
    """
    ends, layers = (source.spec(), target.spec()), (source.geometry.layers, target.geometry.layers)
    capture = capture_point(source, target, capture)
    one = ends[0].fingerprint["tokenizer"] == ends[1].fingerprint["tokenizer"]
    if not one:
        check_capture(capture)
        check_layers(layers[1], target.name)
    if not form.get("head_mixing", True) and (reason := unpaired_heads(*ends)) is not None:
        raise ValueError(reason)
    check_windows(*layers)
    if form.get("state_maps"):
        check_states(*ends)
    return TranslatorConfig(
        *ends,
        assignment or by_depth(*layers, nu),
        capture=capture,
        alignment=None if one else "minimal_groups",
        **form,
    )

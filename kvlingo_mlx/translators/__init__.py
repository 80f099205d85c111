"""Translators on the device: what maps compute, and how their products are cut."""

from kvlingo_mlx.backend import mx, on_gpu

from kvlingo_mlx.format.kinds import SIDES
from kvlingo_mlx.format.maps import state_maps_of
from kvlingo_mlx.format.tensor_file import Weights
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.threads import working
from kvlingo_mlx.translators.base import Translator
from kvlingo_mlx.translators.products import apart, plan
from kvlingo_mlx.translators.quantised import check_fits
from kvlingo_mlx.translators.state_maps import StateMapped


def build(
    config: TranslatorConfig,
    weights: Weights,
    *,
    batched: bool | None = None,
    quantize: int | None = None,
) -> Translator:
    """Make the translator that ``config`` and ``weights`` describe.

    Args:
        batched: Split the products as for a GPU (True) or a CPU (False); None: as for this machine.
        quantize: The bits of the matrices, 8 or 4, in groups of 64; None: as stored.

    Raises:
        ValueError: ``quantize`` would change no matrix.
    """
    if quantize is not None:
        check_fits(weights, quantize)
    batched = on_gpu() if batched is None else batched
    own = apart(config, weights) if config.joint else weights
    groups = {side: plan(config, own, side, batched, quantize) for side in SIDES}
    states = tuple(StateMapped.of(each, weights) for each in state_maps_of(config))
    translator = Translator(config, weights.dtype, groups, states, quantize)
    with working():
        mx.eval([array for _, array in translator.tensors() if isinstance(array, mx.array)])
    return translator

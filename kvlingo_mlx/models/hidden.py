"""A model's final hidden states, and the logits of hidden states.

mlx-lm's models run a decoder and then their head, with whatever scale or cap belongs to it. Here
the two run apart: the decoder's output is recorded, or given to the head in the decoder's place.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from kvlingo_mlx.backend import mx

from kvlingo_mlx.families.base import text_model
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.models.reclassed import calling, hearing


def decoder_of(model: LanguageModel) -> Any:
    """The text model without its head."""
    text: Any = text_model(model.model)
    return text.get("model") or text.backbone  # the latter in nemotron_h


def hidden_states(model: LanguageModel, tokens: Sequence[int], cache: Sequence[Any]) -> mx.array:
    """The final hidden states (T, width) of ``tokens`` after the contents of ``cache``, lazily."""
    with recorded(model) as found:
        model.model(mx.array([list(tokens)]), cache=cache)  # the logits are never worked out
    return found[0][0]


@contextlib.contextmanager
def recorded(model: LanguageModel) -> Iterator[list[mx.array]]:
    """A list of the final hidden states (1, T, width) of each run inside this context, lazily."""
    found: list[mx.array] = []
    with hearing([decoder_of(model)], lambda decoder, output: found.append(output)):
        yield found


def logits_of(model: LanguageModel, hidden: mx.array) -> mx.array:
    """The next-token logits (T, vocabulary) of hidden states (T, width), in float32, lazily."""
    with calling([decoder_of(model)], lambda call: lambda *args, **kwargs: hidden[None]):
        logits = model.model(mx.zeros((1, len(hidden)), mx.int32))
    return logits[0].astype(mx.float32)

"""Hand a running conversation from one language model to another without reading it again.

Names are loaded when first used: importing this package loads neither MLX nor PyTorch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "load": "loading",
    "load_translator": "loading",
    "zoo": "embedded",
    "generate": "generation",
    "stream_generate": "generation",
    "hand_over": "transfer",
    "GenerationResponse": "generation",
    "folded_generate": "folding",
    "folded_stream_generate": "folding",
    "folded_hand_over": "folding",
    "LanguageModel": "language_model",
    "fit": "fitting",
    "Conversation": "conversation",
    "Translator": "translators.base",
    "KVLingoError": "errors",
    "MissingModelError": "errors",
    "UnsupportedModelError": "errors",
    "IncompatibleTranslatorError": "errors",
    "MalformedTranslatorError": "errors",
    "MissingTranslatorError": "errors",
    "PublishingError": "errors",
    "MissingProfileError": "errors",
    "MalformedProfileError": "errors",
    "MalformedConversationError": "errors",
    "CacheError": "errors",
    "NotEnoughMemoryError": "errors",
    "MissingExtraError": "errors",
    "KVLingoWarning": "errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])

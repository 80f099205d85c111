"""Hand a running conversation from one language model to another without reading it again.

Names are loaded when they are first used: importing this package loads neither MLX nor PyTorch. On
Linux, importing it also makes sure that MLX, when imported later, finds a fast BLAS (``blas.py``).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the names, for type checkers and editors
    from kvlingo_mlx.embedded import zoo as zoo
    from kvlingo_mlx.engine.conversation import Conversation as Conversation
    from kvlingo_mlx.engine.fill import hand_over as hand_over
    from kvlingo_mlx.engine.generation import generate as generate
    from kvlingo_mlx.engine.generation import stream_generate as stream_generate
    from kvlingo_mlx.engine.responses import GenerationResponse as GenerationResponse
    from kvlingo_mlx.errors import CacheError as CacheError
    from kvlingo_mlx.errors import IncompatibleTranslatorError as IncompatibleTranslatorError
    from kvlingo_mlx.errors import KVLingoError as KVLingoError
    from kvlingo_mlx.errors import KVLingoWarning as KVLingoWarning
    from kvlingo_mlx.errors import MalformedConversationError as MalformedConversationError
    from kvlingo_mlx.errors import MalformedTranslatorError as MalformedTranslatorError
    from kvlingo_mlx.errors import MissingExtraError as MissingExtraError
    from kvlingo_mlx.errors import MissingModelError as MissingModelError
    from kvlingo_mlx.errors import MissingTranslatorError as MissingTranslatorError
    from kvlingo_mlx.errors import NotEnoughMemoryError as NotEnoughMemoryError
    from kvlingo_mlx.errors import PublishingError as PublishingError
    from kvlingo_mlx.errors import RemoteModelError as RemoteModelError
    from kvlingo_mlx.errors import UnsupportedModelError as UnsupportedModelError
    from kvlingo_mlx.fitting import fit as fit
    from kvlingo_mlx.folding import folded_generate as folded_generate
    from kvlingo_mlx.folding import folded_hand_over as folded_hand_over
    from kvlingo_mlx.folding import folded_stream_generate as folded_stream_generate
    from kvlingo_mlx.loading.models import load as load
    from kvlingo_mlx.loading.translators import find_translator as find_translator
    from kvlingo_mlx.loading.translators import load_translator as load_translator
    from kvlingo_mlx.making import pair as pair
    from kvlingo_mlx.models.language_model import LanguageModel as LanguageModel
    from kvlingo_mlx.remote.model import connect as connect
    from kvlingo_mlx.translators.base import Translator as Translator

from kvlingo_mlx import blas
from kvlingo_mlx.version import __version__ as __version__

_NAMES = {  # by the module that defines them
    "engine.conversation": "Conversation",
    "embedded": "zoo",
    "errors": "KVLingoError KVLingoWarning CacheError IncompatibleTranslatorError "
    "MalformedConversationError MalformedTranslatorError MissingExtraError "
    "MissingModelError MissingTranslatorError NotEnoughMemoryError "
    "PublishingError RemoteModelError UnsupportedModelError",
    "fitting": "fit",
    "folding": "folded_generate folded_hand_over folded_stream_generate",
    "engine.fill": "hand_over",
    "engine.generation": "generate stream_generate",
    "engine.responses": "GenerationResponse",
    "loading.models": "load",
    "loading.translators": "find_translator load_translator",
    "making": "pair",
    "models.language_model": "LanguageModel",
    "remote.model": "connect",
    "translators.base": "Translator",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_HOMES)

blas.prepare()


if not TYPE_CHECKING:  # type checkers must report an unknown name as an error

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

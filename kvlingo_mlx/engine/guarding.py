"""Whether a translation looks as it did when its translator was made.

Over the last tokens of a prompt, which the target reads itself from the translated cache, the
predictions of both models are compared. The translator's receipt says how far apart they usually
are. This finds wrong maps, other fine-tunes, other languages and other kinds of text. It does not
find facts that got lost in a long prompt, since a prompt's last words seldom depend on them. So a
prompt longer than those that the translator was made and tested on is in doubt by its length.
"""

from dataclasses import dataclass

from kvlingo_mlx.backend import mx, nn

import numpy as np

from kvlingo_mlx.errors import IncompatibleTranslatorError
from kvlingo_mlx.format.translator_config import TranslatorConfig
from kvlingo_mlx.loading.grading import receipt_of
from kvlingo_mlx.loading.notes import tell, to_measure
from kvlingo_mlx.loading.pairing import check_one_tokenizer
from kvlingo_mlx.models.hidden import logits_of
from kvlingo_mlx.models.language_model import LanguageModel

WARN, HEAL, REREAD = "warn", "heal", "reread"  # what may be done about a translation in doubt
Read = tuple[LanguageModel, mx.array]  # a model, and its hidden states (T, width) of some tokens


@dataclass(frozen=True)
class Guarded:
    """What two models made of a prompt's tokens, the target after a translated cache."""

    tokens: int  # the number of these tokens
    divergence: float  # KL(source || target) of the next token, in nats, the mean over them
    limit: float  # the largest divergence that is nothing unusual, by the translator's receipt
    # Why the translation is in doubt, a phrase for each reason; empty if it is not
    doubts: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "; ".join(self.doubts) or (
            f"nothing unusual: the models are {self.divergence:.2f} nats apart over {self.tokens} "
            f"tokens of the prompt, at most {self.limit:.2f} are usual"
        )


def predictions(*read: Read) -> list[mx.array]:
    """The log probabilities (T, vocabulary) of two models for the token after each of these."""
    logits = [logits_of(model, hidden) for model, hidden in read]
    rows = min(each.shape[-1] for each in logits)  # a vocabulary may be padded differently
    return [nn.log_softmax(each[:, :rows]) for each in logits]


def divergence(source: Read, target: Read) -> float:
    """KL(source || target) of the next token, in nats, the mean over the tokens that both read."""
    ours, theirs = predictions(source, target)
    return float(np.array((mx.exp(ours) * (ours - theirs)).sum(axis=-1).mean()))


def judged(config: TranslatorConfig, divergence: float, tokens: int, prefix: int) -> Guarded:
    """A divergence over ``tokens`` at a ``prefix``'s end beside what the translator knew."""
    receipt = receipt_of(config)
    assert receipt is not None and receipt.guard is not None
    limit, doubts = receipt.guard.limit(tokens), []
    if not divergence <= limit:  # NaN, too
        doubts.append(
            f"the models are {divergence:.2f} nats apart over {tokens} tokens of the prompt, where "
            f"at most {limit:.2f} are usual"
        )
    longest = config.longest_prefix
    if longest is not None and prefix > longest:
        doubts.append(
            f"the prompt has {prefix + 1} tokens, and the translator was made and tested on "
            f"prefixes of at most {longest}"
        )
    return Guarded(tokens, divergence, limit, tuple(doubts))


def check_reference(config: TranslatorConfig) -> None:
    """Refuse a translator whose receipt does not say what is usual.

    Raises:
        IncompatibleTranslatorError: It has no receipt, one of an older version, or is between two
            tokenizers.
    """
    check_one_tokenizer(config, "guard (-c guard)", "leave it out")
    receipt = receipt_of(config)
    if receipt is None or receipt.guard is None:
        raise IncompatibleTranslatorError(
            f"the receipt of {config.title} does not say how far its models usually lie apart, "
            f"which guard compares; {to_measure(config, None)} measures it, and keeps it if "
            "the translator is in your store; or leave out guard (-c guard)"
        )


def warn(config: TranslatorConfig, found: Guarded) -> None:
    """Warn of a translation in doubt, each time."""
    tell(
        None,
        f"the translation from {config.source.name} to {config.target.name} is in doubt: {found}; "
        "with on_doubt='reread' (-c on_doubt=reread) the target reads such a prompt itself",
    )

"""The engine's answers beside the library's: the same tokens, whoever else asks meanwhile."""

import random
import re
import warnings
from pathlib import Path
from typing import Any

from kvlingo_mlx.backend import mx

import pytest
from mlx_lm.models.cache import make_prompt_cache

import kvlingo_mlx as kv
from kvlingo_mlx import caches
from kvlingo_mlx.embedded import dialogues, zoo
from kvlingo_mlx.models.language_model import LanguageModel
from kvlingo_mlx.serving.messages import Delta, GenerationRequest, Sampling
from kvlingo_mlx.serving.settings import PairRule
from tests.support import hybrid_models
from tests.support.engines import NAMES, Clients, Told, asked, said, user, zoo_clients
from tests.support.fixtures import Logged, Models, Patch
from tests.support.identity import identity_of
from tests.support.opened import written

WORDS = "Anna Oscar Maria Iris Rome Oslo Dallas code friend home lives works".split()
ALWAYS = PairRule(strategy="translate")
TIE = 1e-3  # nats between two first choices below which rounding may decide


@pytest.fixture
def clients(tmp_path: Path) -> Clients:
    return zoo_clients(tmp_path)


def question(rng: random.Random, client: int) -> str:
    """A question that no other client asks, so that no two of them share more than a header."""
    return f"{WORDS[client]} " + " ".join(rng.choices(WORDS, k=rng.randint(3, 12))) + "?"


def alone(model: str, messages: list[dict[str, Any]]) -> str:
    """The answer of a conversation of the library, without spaces around it."""
    models = {name: zoo(folder) for name, folder in NAMES.items()}
    talk = kv.Conversation(models, enable_thinking=False)
    return talk.reply(model, messages=messages, max_tokens=12).strip()


@pytest.mark.parametrize("doubt", ["warn", "reread"])
def test_a_guard_doubts_code(tmp_path: Path, doubt: str) -> None:
    """The zoo's models were never shown any; a session as in their training is not doubted."""
    plain = {"enable_thinking": False}
    (session,) = dialogues.held_out(1, seed=11, facts=(12, 18), questions=2)
    known = [*session.messages[:-1], user(session.questions[0])]
    code = "def f(x):\n    return x + 1\n" * 12
    clients = zoo_clients(tmp_path, guard=32, on_doubt=doubt)
    cases = ((known, session.questions[1], False), ([user(code)], code, True))
    for history, message, wrong in cases:
        first = clients.one("large", history, template=plain)
        assert first.usage.doubt is None
        after = [*history, said(first.text), user(message)]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", kv.KVLingoWarning)
            again = clients.one("moe", after, template=plain)
        doubts = [w for w in warned if "nats apart over 32 tokens" in str(w.message)]
        assert bool(doubts) == (wrong and doubt == "warn")
        assert (again.usage.doubt is not None) == wrong
        reread = wrong and doubt == "reread"
        assert (again.usage.translated_tokens == 0) == reread
        assert again.usage.strategy == ("reread" if reread else "translate")
        assert (again.usage.fallback or "").startswith("the translation was in doubt: ") == reread


def test_a_model_that_was_let_go_of_is_not_compared(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path, guard=32)
    code = "def f(x):\n    return x + 1\n" * 12
    first = clients.one("large", [user(code)])
    clients.engine.unload("large")
    again = clients.one("moe", [user(code), said(first.text), user(code)])
    assert again.usage.translated_tokens > 0 and again.usage.doubt is None


@pytest.mark.parametrize(
    ("facts", "strategy", "why"),
    [
        ({}, "translate", None),
        ({"max_kl": 9.0}, "translate", None),
        ({"max_kl": 0.0}, "reread", "the translator's KL of 0.* is above max_kl 0.0"),
        ({"pairs": {"large:moe": PairRule(strategy="reread")}}, "reread", "the settings say so"),
        ({"pairs": {"moe:large": PairRule(strategy="reread")}}, "translate", None),
        ({"max_kl": 0.0, "pairs": {"large:moe": PairRule(max_kl=9.0)}}, "translate", None),
        ({"max_kl": 0.0, "pairs": {"large:moe": ALWAYS}}, "translate", None),
        ({"pairs": {"large:moe": PairRule(shortest=900)}}, "reread", "shorter than 900 tokens"),
        ({"pairs": {"large:moe": PairRule(shortest=60)}}, "translate", None),
        ({"pairs": {"large:moe": PairRule(longest=60)}}, "reread", "longer than 60 tokens"),
    ],
)  # fmt: skip
def test_rules_of_pairs(tmp_path: Path, facts: Any, strategy: str, why: str | None) -> None:
    clients = zoo_clients(tmp_path, **facts)
    history = [user("Anna lives in Rome. " * 20 + "Where does Anna live?")]
    history += [said(clients.one("large", history).text), user("And Bob?")]
    usage = clients.one("moe", history).usage
    assert usage.strategy == strategy and (usage.translated_tokens > 0) == (strategy != "reread")
    assert usage.fallback is None if why is None else re.search(why, usage.fallback or "")
    if strategy == "reread":
        asked_for = clients.one("small", history, strategy="translate").usage
        assert asked_for.strategy == "translate"


@pytest.mark.parametrize("state_maps", [False, True], ids=["inputs", "states"])
def test_hybrids_answer_together_and_in_turns(
    families: Models, tmp_path: Path, state_maps: bool
) -> None:
    """Three clients at once, by two models of one weight, put away in between."""
    model = kv.load(families["granitemoehybrid"].path)
    if state_maps:  # unit matrices are then exact
        hybrid_models.forget_tails(model)
    folder = written(model, tmp_path / "one")
    (tmp_path / "copy").symlink_to(folder)
    identity_of(model, state_maps=state_maps).save(tmp_path / "same")
    facts = {
        "models": {"a": str(folder), "b": str(tmp_path / "copy")},
        "translators": (str(tmp_path / "same"),),
    }
    clients = zoo_clients(tmp_path, **facts)
    alone = [kv.Conversation({"a": model}, enable_thinking=False) for _ in range(3)]
    logged: list[list[dict[str, Any]]] = [[] for _ in alone]
    store = clients.engine.store
    for turn, names in enumerate(("aaa", "abb", "baa", "aab")):
        for client, history in enumerate(logged):
            history.append(user(f"{WORDS[client]} lives in {WORDS[turn]}. " * (client + 1)))
        asks = [asked(name, history) for name, history in zip(names, logged, strict=True)]
        for session, history, told in zip(alone, logged, clients.together(asks), strict=True):
            answer = session.stream_reply("a", history[-1]["content"], max_tokens=12)
            expected = "".join(response.content for response in answer)
            assert told.text.strip() == expected.strip()
            assert told.usage.cached_tokens + told.usage.translated_tokens > 0 or not turn
            history.append(said(told.text))
        store.budget = store.used - 1 if turn == 1 else 1
        store.make_room()  # to 8 bits, to disk
        store.budget = 10**12


def test_a_batch_is_the_single_answer_within_rounding(clients: Clients) -> None:
    rng = random.Random(3)
    asks = [
        asked("large", [user(question(rng, client) * (client + 1))], max_tokens=40, logprobs=0)
        for client in range(6)
    ]
    together = clients.together(asks)
    model = kv.load(zoo("tiny-qwen3-l"))
    for ask, told in zip(asks, together, strict=True):
        check_greedy(model, ask, told)


def check_greedy(model: LanguageModel, ask: GenerationRequest, told: Told) -> None:
    """Every token is the model's first choice after those before it, read by plain mlx-lm."""
    logprobs = [each for e in told.events if isinstance(e, Delta) for each in e.logprobs]
    tokens = [each.token for each in logprobs]
    prompt = model.tokenizer.apply_chat_template(
        [dict(m) for m in ask.messages or ()], add_generation_prompt=True, **ask.template
    )
    logits = model.model(mx.array([prompt + tokens]), cache=make_prompt_cache(model.model))
    rows = logits[0, len(prompt) - 1 : -1]
    rows = rows - mx.logsumexp(rows, axis=-1, keepdims=True)
    assert len(tokens) > 5
    for row, token, each in zip(rows, tokens, logprobs, strict=True):
        assert row.max().item() - row[token].item() < TIE
        assert abs(row[token].item() - each.logprob) < 1e-3


def test_what_cannot_be_healed_is_refused_at_the_start(tmp_path: Path) -> None:
    zoos = Path(__file__).parents[1] / "zoo" / "models"
    models = {"a": str(zoo("tiny-qwen3-s")), "b": str(zoos / "tiny-mistral")}
    with pytest.raises(kv.UnsupportedModelError, match="of different tokenizers cannot be healed"):
        zoo_clients(tmp_path, models=models, heal="idle")


def test_seeds_are_an_answers_own(clients: Clients) -> None:
    history = [user("Anna lives in Rome. Where?")]
    seeded = Sampling(temperature=1.0, seed=7)
    alone = clients.one("large", history, sampling=seeded, max_tokens=20).text
    other = clients.one("large", history, sampling=Sampling(temperature=1.0, seed=8)).text
    free = asked("large", [user("Oscar?")], sampling=Sampling(temperature=1.0), max_tokens=20)
    beside = clients.together([free, asked("large", history, sampling=seeded, max_tokens=20)])
    assert beside[1].text == alone and other != alone


def test_cancelled_work_is_kept(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path, prefill_step_size=16)
    history = [user("Anna lives in Rome. " * 30)]
    number, told = clients.send(asked("large", history))
    for _ in range(8):
        clients.engine.work()
    clients.engine.cancel(number)
    assert not clients.engine.busy and not told.begun
    again = clients.one("large", history)
    assert again.usage.cached_tokens >= 4 * 16
    assert again.text.strip() == alone("large", history)


def test_a_chunk_that_follows_is_computed_before_others_have_their_turn(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """Chunks that were merely queued would all run before the next token of another answer."""
    clients = zoo_clients(tmp_path, prefill_step_size=16)
    clients.engine.load("moe")  # the line of a model that is not there would not follow
    computed: list[int] = []
    append = caches.append

    def counted(*given: Any) -> None:
        computed.append(1)
        append(*given)

    monkeypatch.setattr(caches, "append", counted)
    _, told = clients.send(asked("large", [user("Anna lives in Rome. " * 30)], max_tokens=4))
    rounds: list[int] = []
    while clients.engine.busy:
        before = len(computed)
        clients.engine.work()
        rounds.append(len(computed) - before)
    assert sum(n > 0 for n in rounds) >= told.usage.prompt_tokens // 16
    assert max(rounds) <= 2, "a job may have a round's two turns"


def test_a_cancelled_answer_leaves_its_neighbours(clients: Clients) -> None:
    rng = random.Random(1)
    asks = [asked("large", [user(question(rng, n))], max_tokens=30) for n in range(3)]
    alone = [clients.one("large", list(a.messages or ()), max_tokens=30).text for a in asks]
    fresh = Clients(clients.engine)
    sent = [fresh.send(ask) for ask in asks]
    while not all(told.begun for _, told in sent):
        fresh.engine.work()
    fresh.engine.cancel(sent[1][0])
    fresh.work()
    assert sent[0][1].text == alone[0] and sent[2][1].text == alone[2]
    assert alone[1].startswith(sent[1][1].text)


def test_a_prefix_that_is_in_use_is_shared(clients: Clients) -> None:
    system = {"role": "system", "content": "Anna lives in Rome. " * 30}
    asks = [asked("large", [system, user(f"{name}?")], max_tokens=8) for name in WORDS[:3]]
    _, told = clients.send(asks[0])
    while not told.begun:
        clients.engine.work()
    rest = clients.together(asks[1:])
    for other in rest:
        assert other.usage.cached_tokens > 200
    for ask, other in zip(asks, (told, *rest), strict=True):
        expected = alone("large", list(ask.messages or ()))
        assert expected.startswith(other.text.strip()) and other.text


@pytest.mark.parametrize("model", ["large", "moe"])
def test_another_question_about_a_long_message_reads_the_question(
    clients: Clients, model: str
) -> None:
    """No message is shared; another model translates what the first has read."""
    choice = random.Random(1).choice
    text = " ".join(f"{choice(WORDS)} lives in {choice(WORDS)}." for _ in range(60))
    first = clients.one("large", [user(f"{text} Where does Anna live?")])
    history = [user(f"{text} Who lives in Rome, and who does not?")]
    second = clients.one(model, history)
    usage = second.usage
    assert usage.prompt_tokens > first.usage.prompt_tokens > 300
    assert usage.read_tokens < 40
    assert (usage.translated_tokens > 250) == (model == "moe")
    if model == "large":
        assert second.text.strip() == alone("large", history)


def test_refusals(clients: Clients) -> None:
    failed = clients.one("none", [user("Hello")]).failed
    assert "there is no model 'none'; there are large, moe, small" in failed.message
    failed = clients.one("large", [user("Anna " * 3000)]).failed
    assert failed.kind == "too_long" and "the context of large is" in failed.message
    # By these words coding agents know that they have to shorten a conversation.
    assert re.search(r"prompt is too long[^0-9]*\d+ tokens > 2048 maximum", failed.message)
    failed = clients.one("large", [user("x")], sampling=Sampling(logit_bias={10**7: 1.0})).failed
    assert "logit_bias names token 10000000" in failed.message
    bad = {"type": "string", "minLength": 5, "maxLength": 2}
    failed = clients.one("large", [user("x")], schema=bad).failed
    assert "response_format's schema is refused" in failed.message
    assert not clients.engine.busy


def completed(clients: Clients, model: str, prompt: Any, **facts: Any) -> Told:
    return clients.together(
        [GenerationRequest(model=model, prompt=prompt, max_tokens=12, **facts)]
    )[0]


def test_a_plain_text_is_gone_on_with(clients: Clients) -> None:
    """Several beside each other; by copies, which go other ways; in memory alone."""
    text = "The home of Anna is Rome. " * 16 + "The home of Oscar is Oslo. The home of Anna"
    tokens = kv.load(zoo("tiny-qwen3-l"), lazy=True).tokenizer.encode(text)
    ask = GenerationRequest(model="large", prompt=tuple(tokens), max_tokens=12)
    again = completed(clients, "large", text)
    assert all(told.text == again.text for told in clients.together([ask, ask]))
    other = completed(clients, "large", text[: len(text) // 2] + " And so on.")
    assert len(tokens) // 3 < other.usage.cached_tokens < len(tokens)
    assert completed(clients, "large", text).usage.read_tokens == 1  # a copy has gone the other way
    store = clients.engine.store
    store.budget = 1
    store.make_room()  # what has no messages is not kept on disk
    store.budget = 10**12
    assert not store.sessions and completed(clients, "large", text).text == again.text


def test_conversations_go_to_8_bits_and_to_disk_and_come_back(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path)
    histories = [[user(f"{name} lives in Rome. " * 20)] for name in WORDS[:4]]
    first = [clients.one("large", history) for history in histories]
    store = clients.engine.store
    assert clients.engine.status().conversations == (4, 0)
    store.budget = store.used - 1
    assert store.make_room()
    oldest = store.sessions[0].conversation
    assert oldest is not None and oldest.lines["large"].where == "8bit"
    store.budget = clients.engine.pool.weights + clients.engine.policy.nbytes + 1
    store.make_room()
    assert clients.engine.status().conversations == (0, 4)
    for session in store.sessions:  # of which keys are left in memory, and no more
        assert session.exchange is None and not session.messages and session.keys
    assert clients.engine.status().lines_bytes == 0
    store.budget = 10**12
    for history, told in zip(histories, first, strict=True):
        again = clients.one("large", [*history, said(told.text), user("Where?")])
        assert again.usage.cached_tokens >= told.usage.prompt_tokens - 5
    assert all(len(session.messages) == 4 for session in store.sessions)


def test_what_is_pinned_stays(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path, keep_conversations=False)
    clients.one("large", [user("Anna lives in Rome.")], pin=True)
    clients.one("large", [user("Oscar lives in Oslo.")])
    store = clients.engine.store
    store.budget = 1
    assert not store.make_room()
    (left,) = store.sessions
    assert left.pinned and left.exchange is not None


def test_models_come_and_go_within_the_memory(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path)
    engine, pool = clients.engine, clients.engine.pool
    history = [user("Anna lives in Rome. Where?")]
    first = clients.one("large", history)
    assert pool["large"].loaded and not pool["moe"].loaded
    engine.store.budget = engine.store.used + pool["moe"].weights - 1
    history += [said(first.text), user("And Oscar?")]
    answered = clients.one("moe", history)
    assert pool["moe"].loaded and not pool["large"].loaded
    assert answered.usage.translated_tokens > 0
    engine.load("large")
    assert not pool["moe"].loaded
    engine.unload("large")
    assert not pool["large"].loaded and clients.one("large", history).text
    engine.store.budget = 1000
    engine.unload("large")
    assert clients.one("large", history).failed.kind == "memory"
    with pytest.raises(kv.NotEnoughMemoryError, match="do not fit into the server's memory"):
        engine.load("large")


def test_a_model_that_answers_is_not_unloaded(clients: Clients) -> None:
    _, told = clients.send(asked("large", [user("Anna?")]))
    while not told.begun:
        clients.engine.work()
    with pytest.raises(ValueError, match="large is answering a request"):
        clients.engine.unload("large")
    clients.work()


def test_a_damaged_conversation_is_read_anew(tmp_path: Path) -> None:
    clients = zoo_clients(tmp_path)
    history = [user("Anna lives in Rome. " * 20)]
    told = clients.one("large", history)
    clients.engine.close()
    (file,) = (tmp_path / "kept").glob("*/lines.*")
    blob = bytearray(file.read_bytes())
    blob[-9] ^= 1
    file.write_bytes(bytes(blob))
    again = zoo_clients(tmp_path)
    assert again.one("large", history).text == told.text
    assert not list((tmp_path / "kept").glob("*/lines.*"))


@pytest.mark.parametrize(
    "line",
    [
        "x-anthropic-billing-header: cc_version=2; cch={n:05x};",
        " - You are powered by the model {n}.",
        "Model: {n}",
        "  * Provider: {n}",
        "Platform: {n}",
    ],
)
def test_volatile_lines_do_not_break_a_prefix(clients: Clients, line: str) -> None:
    """In system prompts, wherever they stand; what others say is read as it is."""

    def history(role: str, number: int) -> list[dict[str, Any]]:
        told = {"role": role, "content": f"{line.format(n=number)}\n{'Anna lives in Rome. ' * 10}"}
        return [user("Hello. " * 10), told, user("Where?")]

    for role, kept in (("system", True), ("user", False)):
        first = clients.one("large", history(role, 1)).usage.prompt_tokens
        again = clients.one("large", [*history(role, 2), said("In Rome."), user("Who?")])
        assert (again.usage.cached_tokens >= first - 5) == kept
    other = [{"role": "system", "content": "Oscar lives in Oslo. " * 10}, user("Where?")]
    assert clients.one("large", other).usage.cached_tokens == 0


def test_a_model_goes_on_where_it_holds_most(tmp_path: Path) -> None:
    """Not where only a model has read more from which it cannot take over."""
    rule = PairRule(strategy="reread")
    pairs = {f"{a}:{b}": rule for a in NAMES for b in NAMES if a != b}
    clients = zoo_clients(tmp_path, pairs=pairs)
    text = "Anna lives in Rome. " * 9
    ask = asked("small", [user(text)], max_tokens=1)
    _, told = clients.send(asked("large", [user(text)], max_tokens=1))
    clients.together([ask])
    history = [user(text), said(told.text), user("Who?")]
    own = clients.one("small", [user(text)], max_tokens=1)
    assert own.usage.read_tokens == 1
    for _ in range(2):
        history += [said(clients.one("large", history).text), user("Where?")]
    assert clients.one("large", history).usage.cached_tokens > 60
    assert clients.one("small", history).usage.cached_tokens >= own.usage.prompt_tokens - 5


def test_a_refused_request_leaves_nothing(clients: Clients) -> None:
    """Neither a session, nor a pin, nor what reading anew would have dropped."""
    bad = {"sampling": Sampling(logit_bias={10**7: 1.0}), "pin": True, "strategy": "reread"}
    assert clients.one("large", [user("Anna lives in Rome. " * 20)], **bad).failed
    assert not clients.engine.store.sessions
    history = [user("Anna lives in Rome. " * 20)]
    history += [said(clients.one("large", history).text), user("Where?")]
    history += [said(clients.one("moe", history).text), user("Who?")]
    assert clients.one("moe", history, **bad).failed
    (session,) = clients.engine.store.sessions
    assert not session.pinned and session.line("moe").spans[0].passes
    assert clients.one("moe", history).usage.read_tokens < 40


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr("kvlingo_mlx.serving.session_store.MOST_HERE", 2)
    monkeypatch.setattr("kvlingo_mlx.serving.session_store.MOST_KEPT", 3)
    clients = zoo_clients(tmp_path)
    for name in WORDS[:5]:
        clients.one("large", [user(f"{name} lives in Rome.")], max_tokens=2)
    here, away = clients.engine.status().conversations
    assert (here, away) == (2, 1)
    assert len(list((tmp_path / "kept").glob("*.json"))) == 1


def test_a_fault_ends_one_request(clients: Clients, monkeypatch: Patch, caplog: Logged) -> None:
    def broken(*_: object) -> None:
        raise LookupError("SECRET")

    monkeypatch.setattr("kvlingo_mlx.serving.scheduler.sampler_of", broken)
    failed = clients.one("large", [user("SECRET")]).failed
    assert failed.kind == "internal" and "SECRET" not in failed.message + caplog.text
    assert "LookupError" in caplog.text and "test_scheduler.py" in caplog.text
    monkeypatch.undo()
    assert clients.one("large", [user("SECRET")]).text


def test_reading_anew_drops_what_was_translated(clients: Clients) -> None:
    history = [user("Anna lives in Rome. " * 20 + "Where does Anna live?")]
    first = clients.one("large", history)
    history += [said(first.text), user("And Bob?")]
    assert clients.one("moe", history).usage.translated_tokens > 0
    again = clients.one("moe", history, strategy="reread")
    assert again.usage.translated_tokens == 0
    assert again.usage.read_tokens == again.usage.prompt_tokens
    assert clients.one("moe", history).usage.cached_tokens == again.usage.prompt_tokens - 1

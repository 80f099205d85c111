"""Which records a training reads: planted ones of many languages, and of an evaluation."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.paper.reproducing.record_filter import RecordFilter, is_english, reads_english
from kvlingo_mlx.embedded import dialogues
from kvlingo_mlx.embedded.lookback import lookback
from kvlingo_mlx.training import command_line
from kvlingo_mlx.training.data import Stream
from kvlingo_mlx.training.mixture import Mixture, plain_text
from kvlingo_mlx.training.on_mlx.pair import MLXPair
from kvlingo_mlx.training.plan import TrainingPlan
from kvlingo_mlx.training.recipe import Recipe
from tests.support.languages import LANGUAGES

MODEL = Path(dialogues.__file__).parent / "models" / "tiny-qwen3-s"
ALONE = Mixture(packed_share=0)
MORE = {
    "fr": "Le bateau quitte le port à six heures du matin. Le mardi, il emporte la boulangère, "
    "qui vend son pain sur l'île, et trois enfants qui vont à l'école là-bas.",
    "it": "Il traghetto lascia il porto alle sei del mattino. Il martedì porta la fornaia, che "
    "vende il suo pane sull'isola, e tre bambini che vanno a scuola.",
    "pt": "A balsa sai do porto todos os dias e leva o padeiro que vende o seu pão na ilha, e as "
    "crianças que não querem ficar em casa com os pais.",
    "nl": "De veerboot vertrekt om zes uur in de ochtend uit de haven. Op dinsdag gaat de bakker "
    "mee, die haar brood op het eiland verkoopt, en drie kinderen.",
    "sv": "Den gamla mannen sade att det var kallt och att han inte ville ha mer te, men de andra "
    "som satt med honom drack upp allt.",
    "de, no umlaut": "Wir fahren morgen mit dem Zug in die Stadt, weil der Wagen nicht mehr will "
    "und das Wetter auch nicht besser ist als gestern.",
    "id": "Kapal itu meninggalkan pelabuhan pada pukul enam pagi dan membawa tukang roti yang "
    "menjual rotinya di pulau itu, dengan tiga anak.",
    "pl": "Prom odpływa z portu o szóstej rano. We wtorki płynie nim piekarka, która sprzedaje na "
    "wyspie chleb, i troje dzieci, które chodzą tam do szkoły.",
}
ENGLISH = (
    LANGUAGES["en"],
    "Fix this:\n```python\ndef f(x):\n    return [y for y in x if y is not None]\n```\nIt fails.",
    "The café in São Paulo where Zoë and Müller met: is it still open on Sundays? 🙂",
    "Translate the sentence 'Je ne sais pas' into German, and explain why it is so.",
    "Solve x^2 + 3x - 4 = 0 for x, and show that both roots are real numbers. Use $\\alpha$.",
    "I'd like you to write a haiku about the sea; it mustn't rhyme, and it's for my mother.",
    "I see 7 services: mobile, support, sales, design, research, billing, payments.",
    "Explain how a lock keeps a canal level.",
    "Rio de Janeiro versus Buenos Aires: compare prices, weather, beaches, food.",
    "hi",
    "1 + 1 = ?",
    "",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(MODEL)
    made.model_max_length = 10**9
    return made


def talk(*texts: str, **more: Any) -> dict[str, Any]:
    """A record as Nemotron's: an empty system message, then questions and answers."""
    roles = ("user", "assistant")
    turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {
        "uuid": "0", "license": "cc-by-4.0", "used_in": ["nano_v3"], "reasoning": "off",
        "messages": [{"role": "system", "content": ""}, *turns], **more,
    }  # fmt: skip


def write(path: Path, records: Iterable[Any]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("text", ENGLISH)
def test_english(text: str) -> None:
    assert reads_english(text)


@pytest.mark.parametrize("name", [*sorted(set(LANGUAGES) - {"en"}), *MORE])
def test_other_languages(name: str) -> None:
    text = {**LANGUAGES, **MORE}[name]
    assert not reads_english(text)
    assert not is_english({}, [LANGUAGES["en"], text])  # one text of another is enough


def test_what_it_cannot_tell() -> None:
    """Its limits, as the docstring says them: few words, and languages that it lacks."""
    assert reads_english("Hola, buenos amigos.")
    assert reads_english("Mae hen wlad fy nhadau yn annwyl i mi, gwlad beirdd a chantorion")


@pytest.mark.parametrize(
    ("fields", "english"),
    [
        ({"language": "English"}, True),
        ({"language_code": "eng_Latn"}, True),
        ({"metadata": {"language": "english (US)"}}, True),
        ({"language": "enm"}, False),
        ({"meta": {"lang": "de"}}, False),
        ({"metadata": None}, None),
        ({"language": None, "lang": 3}, None),
    ],
)
def test_the_field_decides(fields: dict[str, Any], english: bool | None) -> None:
    """Whatever the words are; a field that says nothing leaves it to them."""
    for text, reads in ((LANGUAGES["en"], True), (LANGUAGES["de"], False)):
        assert is_english(talk(text, text, **fields), [text, text]) == (
            reads if english is None else english
        )


def test_a_stream_of_english_records(tmp_path: Path, tokenizer: Any) -> None:
    """Of eleven languages and fields, in Nemotron's schema: what is drawn is English."""
    records, kept = [], set()
    for number in range(30):
        for name, text in LANGUAGES.items():
            question = f"#{number} {name} {text}"
            records.append(talk(question, text))
            kept |= {question} if name == "en" else set()
        told = f"#{number} told {LANGUAGES['de']}"
        records.append(talk(told, LANGUAGES["de"], metadata={"language": "en"}))
        records.append(talk(f"#{number} not {LANGUAGES['en']}", "Yes.", language="fr"))
        records.append(talk(f"#{number} mixed {LANGUAGES['en']}", LANGUAGES["es"]))
        records.append({"messages": []})
        kept.add(told)
    path = write(tmp_path / "all.jsonl", records)
    accepts = RecordFilter(english=True)
    stream = Stream([path], tokenizer, ALONE, accepts=accepts)
    drawn = [tokenizer.decode(stream.sample(n).prefix) for n in range(stream.survey.records)]
    drawn += [tokenizer.decode(sample.prefix) for sample in stream.held_out(stream.reserved)]
    assert len(drawn) == len(kept)
    assert all(sum(question in text for text in drawn) == 1 for question in kept)
    assert accepts.left_out["not English"] == len(records) - len(kept) - 30
    assert stream.skipped == len(records) - len(kept)
    assert str(accepts) == f"{accepts.left_out['not English']:,} records not English"
    everything = Stream([path], tokenizer, ALONE)
    assert everything.survey.records > 5 * stream.survey.records
    texts = [{"text": f"{n} {text} " * 60} for n in range(8) for text in LANGUAGES.values()]
    plain = Stream(
        [write(tmp_path / "texts.jsonl", texts)], tokenizer, plain_text(8, 8), accepts=accepts
    )
    assert plain.survey.records + plain.reserved == 8


QUESTION = "Which of the three ferries leaves the harbour first on a Tuesday?"


@pytest.mark.parametrize(
    ("evaluated", "left_out"),
    [
        (talk(QUESTION, "The first."), True),
        (talk("Hi!", "Hello.", QUESTION.upper() + "  ", "Yes."), True),
        ({"question": QUESTION.replace(" ", "\n"), "answer": "#### 1"}, True),
        (talk("Hi!", QUESTION), True),
        (talk(QUESTION + " And which last?", "The first."), False),
        (talk("Hi!", "Hello."), False),
    ],
)
def test_what_is_evaluated_on_is_left_out(
    tmp_path: Path, tokenizer: Any, evaluated: dict[str, Any], left_out: bool
) -> None:
    records = [talk(f"Question number {n}, which nobody else asks, is this.", "Yes.")
               for n in range(40)]  # fmt: skip
    records += [talk("Hi!", "Hello."), talk("Hi!", "Hello.", QUESTION, "The second.")]
    judged = write(tmp_path / "judged.jsonl", [{"text": "Nothing of interest."}, evaluated])
    accepts = RecordFilter(apart_from=(judged,))
    stream = Stream([write(tmp_path / "d.jsonl", records)], tokenizer, ALONE, accepts=accepts)
    assert accepts.left_out == ({"evaluated on": 1} if left_out else {})
    kept = stream.survey.records + stream.reserved
    assert kept <= 42 - left_out and kept >= 40
    drawn = [tokenizer.decode(stream.sample(i).prefix) for i in range(60)]
    drawn += [tokenizer.decode(sample.prefix) for sample in stream.held_out(8)]
    if left_out:
        assert not any("ferries" in text for text in drawn)
    assert list(accepts.settings["apart_from"]) == [judged]


def test_a_training_keeps_what_it_leaves_out(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told, stays in the provenance, and a command without it is another one."""
    monkeypatch.setattr(MLXPair, "receipt", lambda *rest: None)
    chats = [{"messages": chat} for chat in lookback(120)]
    german = [talk(f"{n}: {LANGUAGES['de']}", LANGUAGES["de"]) for n in range(20)]
    data = write(tmp_path / "d.jsonl", [*chats, *german])
    judged, said = write(tmp_path / "judged.jsonl", chats[:30]), list[str]()

    def train(out: str, data: str, accepts: RecordFilter) -> command_line.Done:
        options = command_line.Options(
            source=str(folders["dense"]), target=str(folders["wide"]), data=(data,), device="mlx",
            packed_share=0.0, max_continuation=8, accepts=accepts,
        )  # fmt: skip
        plan = TrainingPlan(fit_samples=4, held_out=2, recipe=Recipe(steps=1, batch=1))
        heard = command_line.Listeners(lambda *_: None, lambda _: None, said.append)
        done = command_line.train(options, plan, out, heard)
        assert done is not None
        return done

    found = train(str(tmp_path / "t"), data, RecordFilter(True, (judged,))).provenance
    told = next(text for text in said if text.startswith("data: left out"))
    (count,) = [int(word) for word in told.split("20 records not English, ")[1].split()[:1]]
    assert count >= 30 and "evaluated on" in told  # several chats may open alike
    assert found["english"] is True and list(found["apart_from"]) == [judged]
    with pytest.raises(ValueError, match="that this command did not make"):
        train(str(tmp_path / "t"), data, RecordFilter(True))
    with pytest.raises(ValueError, match="is left: 20 records not English, of 20"):
        german_alone = write(tmp_path / "de.jsonl", german)
        train(str(tmp_path / "u"), german_alone, RecordFilter(True))
    with pytest.raises(ValueError, match="absent.jsonl does not exist"):
        train(str(tmp_path / "v"), data, RecordFilter(apart_from=("absent.jsonl",)))

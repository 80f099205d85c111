"""The verb with real models, asked by the published clients of both APIs."""

import time
from itertools import permutations
from pathlib import Path
from typing import Any

import anthropic
import httpx
from mlx_lm import generate as mlx_generate

import kvlingo_mlx as kv
from kvlingo_mlx.embedded import zoo
from tests.support import hybrid_models
from tests.support.served import PLAIN, ZOO, Server, served


def test_a_server_heals_while_nothing_is_asked(tmp_path: Path) -> None:
    """What it then says is what a conversation says that is healed before each question."""
    models = {name: zoo(folder) for name, folder in ZOO.items()}
    talk = kv.Conversation(models, enable_thinking=False)
    messages, used, healed = list[Any](), set[str](), 0
    facts = "Anna lives in Rome. Oscar lives in Oslo. Maria lives in Lima. " * 6
    with served(tmp_path, models, "-c", "heal=idle") as server:
        assert server.status()["healed"] == 0
        for turn, name in enumerate(("large", "moe", "moe", "large")):
            question = f"{'' if turn else facts}Where does Oscar live? {turn}"
            messages.append({"role": "user", "content": question})
            answer = server.openai.chat.completions.create(
                model=name, messages=messages, max_tokens=16, extra_body=PLAIN
            )
            messages.append(answer.choices[0].message)
            said = talk.reply(name, question, max_tokens=16)
            assert answer.choices[0].message.content.strip() == said.strip()
            used.add(name)  # others are not loaded, so their lines do not follow
            for each in used:
                healed += talk.lines[each].left(answers=False)
                assert talk.heal(each) == 0
            server.until(lambda: server.status()["healed"] == healed)  # noqa: B023
        time.sleep(0.5)
        assert server.status()["healed"] == healed > 250  # and then it rests
        assert (
            f"kvlingo_healed_tokens_total {float(healed)}"
            in httpx.get(f"{server.url}/metrics").text
        )


def test_a_fast_hybrid_builds_and_a_dense_one_plans(tmp_path: Path) -> None:
    """The recipe, by models of the types of Qwen3.6-35B-A3B and Qwen3.8-27B."""
    kinds = {"build": "qwen3_5_moe", "plan": "qwen3_5"}
    folders = {n: hybrid_models.write_hybrid_model(tmp_path / n, k) for n, k in kinds.items()}
    models = {name: kv.load(folder) for name, folder in folders.items()}
    maps = [
        str(hybrid_models.random_translator(*ends).save(tmp_path / str(number)))
        for number, ends in enumerate(permutations(models.values()))
    ]
    talk = kv.Conversation(models, maps, enable_thinking=False, eager=False)
    turns = {"Add a page.": "build", "Why?": "plan", "Go on.": "build", "I am stuck.": "plan"}
    messages, options = list[Any](), [word for path in maps for word in ("--translator", path)]
    with served(tmp_path / "home", folders, "--route", "plan-build", *options) as server:
        for question, name in turns.items():
            messages.append({"role": "user", "content": question})
            answer = server.openai.chat.completions.create(
                model="auto", messages=messages, max_tokens=8, extra_body=PLAIN
            )
            said, told = talk.reply(name, question, max_tokens=8), answer.usage.model_dump()
            messages.append(answer.choices[0].message)
            assert (answer.model, messages[-1].content.strip()) == (name, said.strip())
            translated = told["kvlingo"]["translated_tokens"]
            assert translated == talk.last_switch.translated and (translated > 0) is (
                len(messages) > 2
            )


def test_an_answer_that_a_client_has_begun_is_gone_on_with(zoo_server: Server) -> None:
    """As transformers renders it and mlx-lm goes on with it; the conversation keeps all of it."""
    loaded = kv.load(zoo(ZOO["large"]))
    messages: list[Any] = [{"role": "user", "content": "Oscar lives in Oslo. Where is Oscar?"}]
    begun = [*messages, {"role": "assistant", "content": "Oscar"}]
    prompt = loaded.tokenizer.apply_chat_template(
        begun, tokenize=False, continue_final_message=True, enable_thinking=False
    )
    ids = loaded.tokenizer.encode(prompt, add_special_tokens=False)
    expected = mlx_generate(loaded.model, loaded.tokenizer, ids, max_tokens=12)
    client = anthropic.Anthropic(base_url=zoo_server.url, api_key="none", max_retries=0)
    asked = {"model": "large", "messages": begun, "extra_body": PLAIN}
    said = client.messages.create(max_tokens=12, **asked)
    assert said.content[0].text == expected != ""
    assert client.messages.count_tokens(**asked).input_tokens == len(ids)
    cut = client.messages.create(max_tokens=12, stop_sequences=[expected[4:8]], **asked)
    assert cut.content[0].text == expected[:4]
    whole = [{"role": "assistant", "content": "Oscar" + expected}, {"role": "user", "content": "?"}]
    for name in ZOO:
        answer = zoo_server.openai.chat.completions.create(
            model=name, messages=[*messages, *whole], max_tokens=4, extra_body=PLAIN
        )
        told = answer.usage.model_dump()["kvlingo"]
        # All before the answer's header, whose empty thought the template drops later on.
        assert told["cached_tokens"] + told["translated_tokens"] > len(ids) // 2, told

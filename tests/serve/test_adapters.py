"""Tests of LoRA adapters on the server: a request chooses one by the name of the model."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvexport
from kvexport.commands.options import adapters_of
from kvexport.engine.engine import Engine
from kvexport.errors import UsageError
from kvexport.language.chat import ChatTemplate
from kvexport.serve.app import create_app
from kvexport.serve.settings import ServeSettings
from tests.support.http_server import TEMPLATE, Running, running

SAID = [{"role": "user", "content": "anna has the lamp"}]


@pytest.fixture(scope="module")
def adapted(adapted_artifact: Path, adapters: dict[str, Path]) -> Engine:
    engine = kvexport.load(adapted_artifact, threads=1, adapters=adapters)
    engine.chat_template = ChatTemplate({"default": TEMPLATE}, {}, "the test")
    return engine


@pytest.fixture(scope="module")
def serving(adapted: Engine) -> Iterator[Running]:
    with running(adapted) as server:
        yield server


def ask(server: Running, path: str, **body: Any) -> Any:
    status, _, answer = server.ask(path, body)
    assert status == 200, answer
    return answer


def texts(server: Running, model: str | None) -> list[str]:
    name = {} if model is None else {"model": model}
    chat = ask(server, "/v1/chat/completions", messages=SAID, max_tokens=24, **name)
    message = ask(server, "/v1/messages", messages=SAID, max_tokens=24, **({"model": "tiny"} | name))
    response = ask(server, "/v1/responses", input=SAID, max_output_tokens=24, **name)
    completion = ask(server, "/v1/completions", prompt="user anna has the lamp. say ", max_tokens=24, **name)
    assert {answer["model"] for answer in (chat, message, response, completion)} == {model or "tiny"}
    return [
        chat["choices"][0]["message"]["content"],
        message["content"][0]["text"],
        response["output"][0]["content"][0]["text"],
        completion["choices"][0]["text"],
    ]


def test_every_api_answers_with_the_adapter_that_the_model_names(serving: Running) -> None:
    answers = {model: texts(serving, model) for model in (None, "one", "two")}
    assert all(len(set(same)) == 1 for same in answers.values())
    assert len({same[0] for same in answers.values()}) == 3


def test_the_list_of_models_has_the_adapters(serving: Running) -> None:
    status, _, listed = serving.ask("/v1/models")
    assert status == 200
    assert [(model["id"], model.get("parent")) for model in listed["data"]] == [
        ("tiny", None),
        ("one", "tiny"),
        ("two", "tiny"),
    ]


def test_an_unknown_model_is_refused_with_the_names_of_all(serving: Running) -> None:
    status, _, answer = serving.ask("/v1/chat/completions", {"messages": SAID, "model": "three"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert answer["error"]["message"] == "there is no model 'three' here, but one, tiny, two"


def test_a_session_of_another_adapter_is_read_again_by_a_chat_and_refused_by_a_completion(serving: Running) -> None:
    def turn(model: str, **session: str) -> str:
        answer = ask(serving, "/v1/chat/completions", messages=messages, max_tokens=8, model=model, **session)
        text: str = answer["choices"][0]["message"]["content"]
        return text

    messages = list(SAID)
    first = turn("two", session_id="kept")
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "who"}]
    assert turn("one", session_id="kept") == turn("one") != turn("two")
    body = {"prompt": "who", "max_tokens": 8, "session_id": "kept", "model": "two"}
    status, _, answer = serving.ask("/v1/completions", body)
    assert (status, answer["error"]["code"]) == (409, "session_of_another_adapter")


def test_an_adapter_with_the_name_of_the_model_is_refused(adapted: Engine) -> None:
    with pytest.raises(UsageError, match="'two' is the name of the model and of an adapter"):
        create_app(adapted, ServeSettings(names=("two",)))


def test_the_option_names_a_folder() -> None:
    assert adapters_of(["sql=adapters/sql", "b=c=d"]) == {"sql": "adapters/sql", "b": "c=d"}
    for wrong, words in ((["sql"], "expected a name and a folder"), (["a=b", "a=c"], "names 'a' twice")):
        with pytest.raises(UsageError, match=words):
            adapters_of(wrong)

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from tandem.protocol.config import RouterConfig
from tandem.protocol.errors import ConfigError
from tandem.protocol.messages import FinishReason
from tandem.router.backend import GenerateRequest
from tandem.text.tokenizer import Tokenizer
from tandem.text.tool_calls.formats import TOOL_FORMATS
from tandem.text.tool_calls.reasoning import REASONING_FORMATS
from tests.support.fake_backend import FakeBackend, Step, backend_of, closing, delta_of, events, make_app
from tests.support.openai_sdk import openai_sdk
from tests.support.toy_tokenizer import build_tokenizer

CHAT = "/v1/chat/completions"
ROLES = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
NOW_WITH_ALL = {
    "type": "function",
    "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🎉"}}\n</tool_call>'
TWO_CALLS = f'I look.\n{CALL}\n<tool_call>\n{{"name": "now"}}\n</tool_call>'


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "tools": [WEATHER, NOW], **fields}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    """A `tool_choice` as openai-python types it."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def prompt_of(backend: FakeBackend) -> str:
    return backend.tokenizer.decode(backend.requests[-1].token_ids)


async def choice_of(backend: FakeBackend, body: dict[str, Any], **config: Any) -> dict[str, Any]:
    async with closing(backend, **config) as client:
        response = await client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def joined(chunks: list[Any]) -> dict[str, Any]:
    """A choice joined from its chunks; checks that each call's id, type and name come once and first."""
    assert chunks.pop() == "[DONE]"
    content, reasoning, calls, finish = "", "", list[dict[str, Any]](), None
    for chunk in chunks:
        (choice,) = chunk["choices"]
        assert finish is None
        finish = choice["finish_reason"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        assert delta.get("reasoning_content") == delta.get("reasoning")
        for part in delta.get("tool_calls") or ():
            if part["index"] == len(calls):
                assert (part["type"], part["function"]["arguments"]) == ("function", "")
                calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
            else:
                assert (part.keys(), part["function"].keys()) == ({"index", "function"}, {"arguments"})
                assert part["index"] == len(calls) - 1
                calls[-1]["arguments"] += part["function"]["arguments"]
    return {"content": content, "reasoning": reasoning, "calls": calls, "finish_reason": finish}


def names_and_arguments(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["name"], json.loads(call["arguments"])) for call in calls]


async def test_a_call_is_an_answer_of_its_own(tokenizer: Tokenizer) -> None:
    choice = await choice_of(backend_of(tokenizer, CALL), chat())
    (call,) = choice["message"].pop("tool_calls")
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": None}, "tool_calls")
    assert call.pop("id").startswith("call_")
    assert call == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich 🎉"}'}}


@pytest.mark.parametrize("run", [1, 4, 1000])
async def test_a_stream_joins_to_the_plain_answer(tokenizer: Tokenizer, run: int) -> None:
    plain = await choice_of(backend_of(tokenizer, TWO_CALLS), chat())
    async with closing(backend_of(tokenizer, TWO_CALLS, run=run)) as client:
        stream = joined(events(await client.post(CHAT, json=chat(stream=True))))
    assert stream["content"] == plain["message"]["content"] == "I look."
    assert names_and_arguments(stream["calls"]) == [("weather", {"city": "Zürich 🎉"}), ("now", {})]
    assert names_and_arguments([call["function"] for call in plain["message"]["tool_calls"]]) == names_and_arguments(
        stream["calls"]
    )
    assert stream["finish_reason"] == plain["finish_reason"] == "tool_calls"
    assert len({call["id"] for call in stream["calls"]}) == 2


async def test_the_openai_sdk_joins_streamed_calls(tokenizer: Tokenizer) -> None:
    async with openai_sdk(backend_of(tokenizer, TWO_CALLS)) as client:
        body: Any = chat(model="org/toy", n=2)
        async with client.chat.completions.stream(**body) as stream:
            seen = [event.type async for event in stream]
            final = await stream.get_final_completion()
        plain = await client.chat.completions.create(**body)
    assert "tool_calls.function.arguments.delta" in seen
    assert seen.count("tool_calls.function.arguments.done") == 4
    for completion in (final, plain):
        for choice in completion.choices:
            assert choice.finish_reason == "tool_calls"
            calls: Any = choice.message.tool_calls
            assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
                ("weather", {"city": "Zürich 🎉"}),
                ("now", {}),
            ]


async def test_a_template_without_tools_gets_them_as_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The template of these tests raises errors, so it may refuse a system message that the client did not send."""
    backend = backend_of(tokenizer, "hello")
    choice = await choice_of(backend, chat(messages=[{"role": "system", "content": "Be brief."}, USER]))
    assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": "hello"}, "stop")
    assert prompt_of(backend).startswith("<s><system>Be brief.\n\nYou can call")
    assert '{"name": "now", "description": "", "parameters": {"type": "object"' in prompt_of(backend)
    await choice_of(backend, chat())
    assert prompt_of(backend).startswith("<s><user>You can call")
    assert prompt_of(backend).endswith("</tool_call>\n\nhi<assistant>")
    plain = backend_of(Tokenizer(build_tokenizer(tmp_path, ROLES)), "hello")
    await choice_of(plain, chat())
    assert prompt_of(plain).startswith("<system>You can call")
    assert prompt_of(plain).endswith("</tool_call><user>hi")


USER = {"role": "user", "content": "Weather?"}
HISTORY: list[dict[str, Any]] = [
    USER,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "2", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "2", "content": "noon"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "3", "function": {"name": "now"}}]},
]


async def test_a_template_without_calls_gets_them_as_text(tmp_path: Path) -> None:
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, ROLES)), "hello")
    await choice_of(backend, {"messages": HISTORY})
    assert prompt_of(backend) == (
        '<user>Weather?<assistant>I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n'
        '</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        "<user><tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response>"
        '<assistant><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    )


CALLS = (
    "{# tools #}{% for message in messages %}<{{ message.role }}>{% for call in message.tool_calls %}"
    "{{ call.function.name CALL }}{% endfor %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("+ ' ' + call.function.arguments", ['{"city":"Rome"}', "{}"]),  # DeepSeek: an object cannot be joined
        ("}} {{ call.function.arguments", ['{"city":"Rome"}', "{}"]),  # an object would be shown as Python does
        ("}} {{ call.function.arguments | tojson", ['{"city": "Rome"}', "{}"]),
        (
            "}} {{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson",
            ['{"city": "Rome"}', "{}"],
        ),
        ("}} {{ call.function.arguments.items() | list", ["[('city', 'Rome')]", "[]"]),
    ],
)
async def test_a_template_gets_arguments_as_it_shows_them(tmp_path: Path, shown: str, expected: list[str]) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, CALLS.replace("CALL", shown)))
    for given in ('{"city":"Rome"}', {"city": "Rome"}):  # /v1/messages has objects
        backend = backend_of(tokenizer, "hello")
        function = {"name": "weather", "arguments": given}
        calls = [{"id": "1", "function": function}, {"id": "2", "function": {"name": "now", "arguments": "{}"}}]
        await choice_of(backend, {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": calls}]})
        assert prompt_of(backend) == f"<user>Weather?<assistant>weather {expected[0]}now {expected[1]}"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Rome", "days": 3', {"city": "Rome", "days": 3}),  # cut by max_tokens
        ('{"city": "Ro', {}),
        ("Rome", {}),
        ("", {}),
        ("[1]", {}),
        ('"Rome"', {}),
        (None, {}),
        ([], {}),
    ],
)
async def test_a_call_with_broken_arguments_ends_nothing(tmp_path: Path, arguments: Any, shown: dict[str, Any]) -> None:
    """Many templates refuse arguments that are not an object, and the client would resend them forever."""
    template = CALLS.replace("CALL", "}} {{ call.function.arguments.items() | list")
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), "hello")
    call = {"id": "1", "function": {"name": "weather", "arguments": arguments}}
    await choice_of(backend, {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]})
    assert prompt_of(backend) == f"<user>Weather?<assistant>weather {list(shown.items())}"


async def test_a_template_that_takes_one_call_a_message_gets_one_after_the_other(tmp_path: Path) -> None:
    template = (
        "{# tools #}{% for message in messages %}<{{ message.role }}>{% if message.tool_calls | length > 1 %}"
        "{{ raise_exception('one call only') }}{% endif %}{{ message.content }}"
        "{% for call in message.tool_calls %} {{ call.function.name }}{% endfor %}{% endfor %}"
    )
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), "hello")
    results = [{"role": "tool", "tool_call_id": id, "content": f"result {id}"} for id in ("2", "other", "1")]
    await choice_of(backend, {"messages": [*HISTORY[:2], *results, USER]})
    assert prompt_of(backend) == (
        "<user>Weather?<assistant>I look. weather<tool>result 1<assistant> now<tool>result 2<tool>result other"
        "<user>Weather?"
    )


async def test_a_format_of_a_templates_calls_is_used_without_tools(tmp_path: Path) -> None:
    """DeepSeek V3.1: its chat template shows calls but no tools; the client describes those in the system message."""
    template = CALLS.replace("CALL", "+ '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>'")
    template = template.removeprefix("{# tools #}")
    call = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city":"Rome"}<｜tool▁call▁end｜>'
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), call)
    choice = await choice_of(backend, chat())
    assert "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>" in prompt_of(backend)
    message = choice["message"]
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city":"Rome"}'}
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
    await choice_of(backend, chat(messages=[USER, message, result]))
    assert prompt_of(backend).endswith('<assistant>weather<｜tool▁sep｜>{"city":"Rome"}<｜tool▁call▁end｜><tool>sunny')


async def test_calls_that_a_template_cannot_show_are_text(tmp_path: Path) -> None:
    """DeepSeek R1 shows calls only beside null content, which transformers leaves out."""
    template = (
        "{# <｜tool▁sep｜> #}{% for message in messages %}<{{ message.role }}>{% if message.content is none %}"
        "{{ message.tool_calls }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    )
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), CALL)
    choice = await choice_of(backend, chat(messages=HISTORY[:2]))
    assert choice["finish_reason"] == "tool_calls"
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt_of(backend)


@pytest.mark.parametrize("content", ["I look.", None])
async def test_a_template_without_content_beside_reasoning_gets_one(tmp_path: Path, content: str | None) -> None:
    """The template of gpt-oss calls reasoning `thinking`."""
    template = (
        "{# tools #}{% for message in messages %}{% if message.tool_calls and message.content and message.thinking %}"
        "{{ raise_exception('not both') }}{% endif %}<{{ message.thinking or '' }}>{{ message.content }}"
        "{% for call in message.tool_calls %} {{ call.function.name }}{% endfor %}{% endfor %}"
    )
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), "ok")
    answer = {"role": "assistant", "content": "It is sunny.", "reasoning": "So."}
    await choice_of(backend, {"messages": [{**HISTORY[1], "content": content, "reasoning": "Why?"}, answer]})
    shown = "Why?" if content is None else f"Why?\n{content}"
    assert prompt_of(backend) == f"<{shown}> weather now<So.>It is sunny."


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
async def test_templates_know_reasoning_by_either_name(tmp_path: Path, name: str) -> None:
    template = f"{{% for message in messages %}}<{{{{ message.{name} }}}}>{{{{ message.content }}}}{{% endfor %}}"
    backend = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), "ok")
    for given in ("reasoning", "reasoning_content"):
        await choice_of(backend, {"messages": [{"role": "assistant", "content": "a", given: "why"}]})
        assert prompt_of(backend) == "<why>a"


MISTRAL = "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}{% endif %}" + ROLES + "{# [TOOL_CALLS][THINK] #}"
MISTRAL_TOKENS = ("[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]")


@pytest.fixture
def mistral(tmp_path: Path) -> Tokenizer:
    return Tokenizer(build_tokenizer(tmp_path, MISTRAL, MISTRAL_TOKENS))


async def test_tools_reach_a_template_and_markers_are_special_tokens(mistral: Tokenizer) -> None:
    backend = backend_of(mistral, '[THINK]Rome.[/THINK]ok[TOOL_CALLS]weather[ARGS]{"city": "Rome"}')
    choice = await choice_of(backend, chat())
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Rome"}'}
    assert (len(call["id"]), call["id"].isalnum()) == (9, True)
    assert (choice["message"]["content"], choice["message"]["reasoning_content"]) == ("ok", "Rome.")
    assert json.loads(prompt_of(backend).split("[AVAILABLE_TOOLS]")[1].split("<user>")[0]) == [WEATHER, NOW_WITH_ALL]


async def test_the_backend_knows_which_tokens_call_a_tool(
    mistral: Tokenizer, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    harmony = Tokenizer(build_tokenizer(tmp_path / "harmony", "{{ tools }}" + ROLES + "{# <|channel|> #}", HARMONY))
    marked, all_parts, in_letters = (backend_of(one, "hi") for one in (mistral, harmony, tokenizer))
    for backend, markers in ((marked, ["[TOOL_CALLS]", "[ARGS]"]), (all_parts, ["<|call|>"]), (in_letters, [])):
        await choice_of(backend, chat())
        await choice_of(backend, chat(tool_choice="none"))
        with_tools, without = (request.call_ids for request in backend.requests)
        assert with_tools == {backend.tokenizer.special_tokens[marker] for marker in markers}
        assert without == frozenset()


async def test_special_tokens_are_not_shown_where_there_is_no_call(mistral: Tokenizer) -> None:
    reply = "[TOOL_CALLS]no call</s>"
    assert (await choice_of(backend_of(mistral, reply), chat()))["message"]["content"] == "no call"
    shown = await choice_of(backend_of(mistral, reply), chat(skip_special_tokens=False))
    assert shown["message"]["content"] == "[TOOL_CALLS]no call</s>"
    without_tools = await choice_of(backend_of(mistral, reply), {"messages": [USER]})
    assert without_tools["message"]["content"] == "no call"


HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY_REPLY = (
    "<|channel|>analysis<|message|>They ask of «<|end|>».<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.weather<|message|>{"city": "«<|channel|>final<|message|>»"}<|call|>'
)


@pytest.mark.parametrize("run", [1, 3, 1000])
@pytest.mark.parametrize("stop", ["never", "<|channel|>never", "<|message|>»"])
async def test_a_quoted_marker_of_harmony_is_text(tmp_path: Path, run: int, stop: str) -> None:
    """A marker between « and » consists of ordinary tokens, as a model writes one that it quotes."""
    tokenizer = Tokenizer(build_tokenizer(tmp_path, f"{{{{ tools }}}}{ROLES}<|start|>assistant", HARMONY))
    backend = backend_of(tokenizer, "", run=run)

    def ids_of(text: str, *, quoted: bool) -> list[int]:
        parts = text if quoted else [text]
        return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]

    parts = re.split("([«»])", HARMONY_REPLY)
    ids = [i for n, part in enumerate(parts) for i in ids_of(part, quoted=n % 4 == 2)]
    assert tokenizer.decode(ids) == HARMONY_REPLY

    def script(_: GenerateRequest) -> list[Step]:
        runs = [ids[start : start + run] for start in range(0, len(ids), run)]
        return [*map(delta_of, runs), delta_of([], FinishReason.STOP)]

    backend.script = script
    choice = await choice_of(backend, chat(stop=stop), tool_parser="harmony", reasoning_parser="harmony")
    assert choice["message"]["reasoning"] == "They ask of «<|end|>»."
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == '{"city": "«<|channel|>final' + ('<|message|>»"}' if stop.endswith("never") else "")


async def test_reasoning_that_the_template_opens_is_recognised(tmp_path: Path) -> None:
    template = ROLES + "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    tokenizer = Tokenizer(build_tokenizer(tmp_path, template))
    reply = "Let me see.\n</think>\n\nYes."
    plain = await choice_of(backend_of(tokenizer, reply), {"messages": [USER]})
    assert plain["message"] == {
        "role": "assistant", "content": "Yes.", "reasoning_content": "Let me see.", "reasoning": "Let me see.",
    }  # fmt: skip
    assert plain["finish_reason"] == "stop"
    async with closing(backend_of(tokenizer, reply)) as client:
        stream = joined(events(await client.post(CHAT, json={"messages": [USER], "stream": True})))
    assert (stream["content"], stream["reasoning"]) == ("Yes.", "Let me see.")
    whole = await choice_of(backend_of(tokenizer, reply), {"messages": [USER]}, reasoning_parser="none")
    assert whole["message"] == {"role": "assistant", "content": reply}


async def test_without_a_choice_of_tools_the_text_stays_as_it_is(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, CALL)
    for body in (chat(tool_choice="none"), chat(tools=[]), chat(tools=None, tool_choice="auto")):
        choice = await choice_of(backend, body)
        assert (choice["message"], choice["finish_reason"]) == ({"role": "assistant", "content": CALL}, "stop")
        assert "tool" not in prompt_of(backend)


async def test_without_parallel_calls_there_is_one(tokenizer: Tokenizer) -> None:
    choice = await choice_of(backend_of(tokenizer, TWO_CALLS), chat(parallel_tool_calls=False))
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_a_call_cut_by_max_tokens_ends_by_length(tokenizer: Tokenizer) -> None:
    choice = await choice_of(backend_of(tokenizer, CALL), chat(max_tokens=50))
    assert choice["finish_reason"] == "length"
    (call,) = choice["message"]["tool_calls"]
    assert '{"city": "Zürich 🎉"}'.startswith(call["function"]["arguments"])


async def test_stop_strings_and_logprobs_hold_for_the_text_with_its_markers(tokenizer: Tokenizer) -> None:
    stopped = await choice_of(backend_of(tokenizer, TWO_CALLS), chat(stop=["</tool_call>"]))
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("tool_calls", "</tool_call>")
    assert len(stopped["message"]["tool_calls"]) == 1
    body = chat(logprobs=True)
    plain = await choice_of(backend_of(tokenizer, TWO_CALLS), body)
    async with closing(backend_of(tokenizer, TWO_CALLS)) as client:
        chunks = events(await client.post(CHAT, json=body | {"stream": True}))
    entries = [entry for chunk in chunks[:-1] for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", ())]
    assert entries == plain["logprobs"]["content"]
    assert len(entries) == len(tokenizer.encode(TWO_CALLS, add_special_tokens=False))


async def test_the_other_routes_see_the_same_prompt(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, "hello")
    async with closing(backend) as client:
        usage = (await client.post(CHAT, json=chat())).json()["usage"]
        tokens = (await client.post("/tokenize", json=chat())).json()
        pin = await client.post("/v1/cache/pin", json=chat())
    assert tokens["tokens"] == backend.requests[0].token_ids == backend.cache.requests[0].token_ids, pin.text
    assert usage["prompt_tokens"] == tokens["count"]


async def test_tools_for_the_server_are_not_shown_to_the_model(tokenizer: Tokenizer) -> None:
    backend = backend_of(tokenizer, "hello")
    hosted = [{"type": "web_search_preview"}, {"type": "custom", "custom": {"name": "sql"}}]
    async with closing(backend) as client:
        response = await client.post(CHAT, json=chat(tools=[hosted[0], NOW, hosted[1]]))
        alone = await client.post(CHAT, json=chat(tools=hosted))
        await client.post(CHAT, json=chat(tools=[NOW]))
    assert response.status_code == alone.status_code == 200
    why = "(the model does not see it)"
    assert response.headers["x-tandem-ignored"] == f"tools.web_search_preview {why}, tools.custom {why}"
    assert backend.requests[0].token_ids == backend.requests[2].token_ids


TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<thought>", "close": "</thought>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>\w+)",
            "close": "<|/call|>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"content": "text"},
    },
}


@pytest.fixture
def templated(tmp_path: Path) -> Tokenizer:
    """A model whose own format is not known, with a response template in its checkpoint."""
    folder = build_tokenizer(tmp_path, "{{ tools }}" + ROLES + "<assistant><thought>", ("<|call|>", "<|/call|>"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"response_template": TEMPLATE}))
    return Tokenizer(folder)


@pytest.mark.parametrize("run", [1, 1000])
async def test_a_checkpoints_response_template_is_used(templated: Tokenizer, run: int) -> None:
    reply = 'Hm.</thought>I look.<|call|>weather{"city": "Rome"}<|/call|><|call|>now{}<|/call|>'
    plain = await choice_of(backend_of(templated, reply), chat())
    assert (plain["message"]["content"], plain["message"]["reasoning"]) == ("I look.", "Hm.")
    assert names_and_arguments([call["function"] for call in plain["message"]["tool_calls"]]) == [
        ("weather", {"city": "Rome"}),
        ("now", {}),
    ]
    async with closing(backend_of(templated, reply, run=run)) as client:
        stream = joined(events(await client.post(CHAT, json=chat(stream=True))))
        forced = await client.post(CHAT, json=chat(tool_choice="required"))
    assert (stream["content"], stream["reasoning"], len(stream["calls"])) == ("I look.", "Hm.", 2)
    assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice")
    without = await choice_of(backend_of(templated, reply), {"messages": [USER]})
    assert without["message"]["content"].startswith("I look.<|call|>")


def test_a_response_template_that_is_not_there_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="response_template cannot be used"):
        make_app(FakeBackend(tokenizer), tool_parser="response_template")


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_allowed_tools_hide_the_others(tokenizer: Tokenizer, mode: str) -> None:
    backend = backend_of(tokenizer, TWO_CALLS)
    async with closing(backend) as client:
        for fields in ({"tool_choice": allowed("weather", mode=mode)}, {"tools": [WEATHER], "tool_choice": mode}):
            response = await client.post(CHAT, json=chat(**fields))
            assert response.status_code == 200, response.text
    some, one = backend.requests
    assert (some.token_ids, some.sampling.grammar) == (one.token_ids, one.sampling.grammar)
    assert bool(some.sampling.grammar) == (mode == "required")


FORCED: list[Any] = ["required", {"type": "function", "function": {"name": "now"}}]


@pytest.mark.parametrize("choice", FORCED)
async def test_a_forced_call_is_a_grammar_for_the_backend(tokenizer: Tokenizer, choice: Any) -> None:
    backend = backend_of(tokenizer, TWO_CALLS)
    answer = await choice_of(backend, chat(tool_choice=choice, n=2, response_format={"type": "json_object"}))
    first, second = (request.sampling.grammar for request in backend.requests)
    assert first == second
    assert r"\"now\"" in first
    assert (r"\"weather\"" in first) == (choice == "required")
    assert len(answer["message"]["tool_calls"]) == (2 if choice == "required" else 1)
    assert answer["finish_reason"] == "tool_calls"
    assert all(json.dumps(tool["function"]["name"]) in prompt_of(backend) for tool in (WEATHER, NOW))


async def test_a_response_format_leaves_room_for_calls_and_reasoning(tokenizer: Tokenizer, tmp_path: Path) -> None:
    backend = backend_of(tokenizer, TWO_CALLS)
    wanted = {"response_format": {"type": "json_object"}}
    await choice_of(backend, chat(**wanted))
    assert "<tool_call>" in backend.requests[-1].sampling.grammar
    await choice_of(backend, chat(tool_choice="none", **wanted))
    assert "<tool_call>" not in backend.requests[-1].sampling.grammar
    template = ROLES + "<think>"
    thinking = backend_of(Tokenizer(build_tokenizer(tmp_path, template)), 'Hm.</think>{"a": 1}')
    message = (await choice_of(thinking, {"messages": [USER], **wanted}))["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", '{"a": 1}')
    assert "</think>" in thinking.requests[-1].sampling.grammar
    await choice_of(thinking, {"messages": [USER]})
    assert thinking.requests[-1].sampling.grammar == ""


async def test_a_format_that_is_not_known_is_refused_and_can_be_forced(tmp_path: Path) -> None:
    tokenizer = Tokenizer(build_tokenizer(tmp_path, "{{ tools }}" + ROLES))
    for config in ({}, {"tool_parser": "none"}):
        async with closing(backend_of(tokenizer, "hello"), **config) as client:
            response = await client.post(CHAT, json=chat())
        assert response.status_code == 400
        assert "--tool-parser" in response.json()["error"]["message"]
    reply = '{"name": "weather", "parameters": {}}'
    choice = await choice_of(backend_of(tokenizer, reply), chat(), tool_parser="llama3_json")
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"


def test_the_flags_name_the_formats() -> None:
    hints = get_type_hints(RouterConfig)
    assert set(get_args(hints["tool_parser"])) == {"auto", "none", "response_template", *TOOL_FORMATS}
    assert set(get_args(hints["reasoning_parser"])) == {"auto", "none", *REASONING_FORMATS}
    wrong: Any = "qwen"
    with pytest.raises(ConfigError, match="tool_parser='qwen' must be one of auto, none, deepseek_v3, deepseek_v31"):
        RouterConfig(tool_parser=wrong)

"""Fields that a request type does not have: only what would change the answer is refused, the others are named."""

from __future__ import annotations

import logging
import uuid
from difflib import get_close_matches
from typing import Any, get_type_hints

import msgspec
import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as text
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from tandem.frontend.http import ignored_fields
from tandem.frontend.http.ignored_fields import MAX_HEADER_CHARS, begin_ignored, ignored_headers, note_ignored
from tandem.frontend.messages.schema import CountTokensRequest, MessagesRequest
from tandem.frontend.openai import other_fields
from tandem.frontend.openai.other_fields import MAX_COLONS, MAX_NAME_CHARS, UNSERVED, check_other_fields
from tandem.frontend.openai.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    PinFields,
    PrefetchFields,
    TokenizeRequest,
    UnpinFields,
)
from tandem.frontend.responses.schema import ResponsesRequest
from tandem.protocol.errors import RequestError
from tests.support.fake_backend import Client

# What each client library declares for a body.
DECLARED: list[tuple[type[msgspec.Struct], Any]] = [
    (ChatRequest, chat.CompletionCreateParamsStreaming),
    (CompletionRequest, text.CompletionCreateParamsStreaming),
    (ResponsesRequest, responses.ResponseCreateParamsStreaming),
    (MessagesRequest, message_create_params.MessageCreateParamsStreaming),
    (CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
]
REQUEST_TYPES: list[type[msgspec.Struct]] = [
    *(request_type for request_type, _ in DECLARED),
    TokenizeRequest,
    DetokenizeRequest,
    PinFields,
    UnpinFields,
    PrefetchFields,
]
# Fields that servers and clients of this API know besides, by who reads or sends them.
OF_OTHERS = {
    "vLLM 0.32": "watermarking length_penalty spaces_between_special_tokens truncation_side logprob_token_ids "
    "documents media_io_kwargs mm_processor_kwargs request_id session_id return_tokens_as_token_ids return_token_ids "
    "routed_experts_prompt_start return_token_offsets return_prompt_text mm_payload return_mm_kwargs "
    "kv_transfer_params ec_transfer_params vllm_xargs repetition_detection stream_interval thinking_token_budget "
    "include_reasoning "
    "early_stopping guided_decoding_backend prompt_embeds enable_response_messages previous_input_messages",
    "SGLang": "rid session_params lora_path custom_logit_processor custom_params return_hidden_states no_stop_trim "
    "separate_reasoning stream_reasoning return_cached_tokens_details bootstrap_host bootstrap_port bootstrap_room "
    "data_parallel_rank stop_regex logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs",
    "llama.cpp": "cache_prompt id_slot n_predict n_probs n_keep samplers min_keep mirostat mirostat_tau mirostat_eta "
    "typical_p tfs_z repeat_penalty repeat_last_n dry_multiplier xtc_probability timings_per_token grammar "
    "return_tokens post_sampling_probs image_data penalize_nl",
    "Ollama": "keep_alive options format num_ctx num_predict think template raw images context",
    "TGI": "max_new_tokens do_sample details return_full_text top_n_tokens decoder_input_details inputs parameters",
    "text-generation-webui": "mode character instruction instruction_template negative_prompt guidance_scale top_a",
    "OpenRouter": "models route provider transforms plugins usage reasoning preset debug trace",
    "Mistral": "random_seed safe_prompt prompt_mode",
    "hosts": "reasoning_format search_settings search_parameters deferred safety_model prompt_truncate_len "
    "context_length_exceeded_behavior raw_output search_mode enable_thinking thinking_budget disable_search "
    "cached_content",
    "OpenAI": "user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention verbosity "
    "reasoning_effort prediction moderation conversation user_id",
    "litellm, LangChain, lm-eval": "timeout max_retries num_retries api_key api_base base_url custom_llm_provider "
    "extra_body extra_headers tags drop_params guardrails until gen_kwargs system num_beams length",
}


def check(fields: dict[str, Any], request_type: type[msgspec.Struct] = ChatRequest) -> list[str]:
    """What is ignored."""
    ignored = begin_ignored()
    check_other_fields(msgspec.json.encode(fields), request_type)
    return ignored


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("temprature", "temperature"),
        ("tempreature", "temperature"),
        ("max_token", "max_tokens"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("stream_option", "stream_options"),
        ("topp", "top_p"),
        ("Stop", "stop"),
        ("sed", "seed"),
        ("message", "messages"),
        ("frequence_penalty", "frequency_penalty"),
        ("response_fromat", "response_format"),
        ("sufix", "suffix"),
    ],
)
async def test_a_misspelt_field_is_named_in_a_header(client: Client, written: str, meant: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"model": "org/toy", "messages": messages, "max_tokens": 1, written: 1}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["x-tandem-ignored"] == f"{written} (did you mean {meant}?)"


@pytest.mark.parametrize(
    ("request_type", "field", "written", "meant"),
    [
        (ChatRequest, "stream_options", "include_usge", "stream_options.include_usage"),
        (ChatRequest, "response_format", "json_shema", "response_format.json_schema"),
        (CompletionRequest, "structured_outputs", "regexp", "structured_outputs.regex"),
        (MessagesRequest, "thinking", "budget_token", "thinking.budget_tokens"),
        (ResponsesRequest, "text", "formatt", "text.format"),
    ],
)
def test_a_misspelt_subfield_is_named(request_type: type[msgspec.Struct], field: str, written: str, meant: str) -> None:
    assert check({field: {written: 1}}, request_type) == [f"{field}.{written} (did you mean {meant}?)"]


@pytest.mark.parametrize(("request_type", "declared"), DECLARED)
def test_every_field_of_a_client_library_is_accepted(request_type: type[msgspec.Struct], declared: Any) -> None:
    names = get_type_hints(declared).keys() - (UNSERVED.keys() - set(request_type.__struct_fields__))
    assert len(names) >= 10
    check(dict.fromkeys(names, 1), request_type)


@pytest.mark.parametrize("request_type", REQUEST_TYPES)
@pytest.mark.parametrize("who", OF_OTHERS)
def test_no_field_of_another_server_is_taken_for_a_typing_mistake(request_type: type[msgspec.Struct], who: str) -> None:
    for name in OF_OTHERS[who].split():
        assert check({name: 1}, request_type) in ([name], [])


def test_a_field_that_is_not_served_says_what_it_may_be() -> None:
    with pytest.raises(RequestError) as raised:
        check({"best_of": 3})
    assert raised.value.message == "'best_of' is not supported by this server: got 3; leave it out, or send 1."
    with pytest.raises(RequestError, match="prompt_logprobs"):
        check({"prompt_logprobs": 1, "brand_new": 1})
    assert check({"best_of": 1, "suffix": None, "brand_new": 1}) == ["brand_new", "best_of"]


def test_what_is_not_known_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ignored_fields, "_logged", set())
    with caplog.at_level(logging.INFO, ignored_fields.__name__):
        for _ in range(3):
            assert check({"brand_new": "secret", "store": "x", "metadata": None}) == ["brand_new", "store"]
    assert [record.getMessage() for record in caplog.records] == [
        f"Requests have {name}, which is ignored; each response says so in x-tandem-ignored."
        for name in ("brand_new", "store")
    ]


def test_the_header_is_bounded_and_holds_no_line_breaks() -> None:
    ignored = begin_ignored()
    note_ignored('a\r\nset-cookie: "x", y\x00é')
    assert ignored_headers(ignored) == [(b"x-tandem-ignored", b"a??set-cookie: ?x?? y??")]
    for i in range(100):
        note_ignored(f"{i}" * 1000)
    [(_, value)] = ignored_headers(ignored)
    assert len(value) <= MAX_HEADER_CHARS + 5
    assert value.endswith(b", ...")
    assert ignored_headers(begin_ignored()) == []


def test_many_names_and_long_ones_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def compare(word: str, *args: Any, **options: Any) -> list[str]:
        compared.append(word)
        return get_close_matches(word, *args, **options)

    monkeypatch.setattr("difflib.get_close_matches", compare)
    brand = f"brand_{uuid.uuid4().hex[:8]}"  # outcomes are remembered for as long as the process lives
    check({f"{brand}_{i}": 1 for i in range(MAX_COLONS - 1)})
    assert len(compared) == other_fields.MAX_UNKNOWN_NAMES
    check({f"{brand}_{i}": 1 for i in range(MAX_COLONS + 1)})
    assert len(compared) == other_fields.MAX_UNKNOWN_NAMES  # the first one again
    check({"temperature" * 20: 1, "n" * (MAX_NAME_CHARS + 1): 1})
    assert len(compared) == other_fields.MAX_UNKNOWN_NAMES

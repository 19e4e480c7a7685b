"""What vLLM's parsers make of texts that `benchmarks.tool_parsers` wrote. It is run by the Python of vLLM.

    VLLM_PYTHON -P benchmarks/tool_parsers_vllm.py texts.jsonl results.jsonl --model MODEL_FOLDER

Each text is parsed as a whole, and in pieces of 1 to 4 tokens. The model's tokenizer gets the marks of all formats as
tokens. For gpt-oss the parser is its authors', openai_harmony, within vLLM's; it needs TIKTOKEN_ENCODINGS_BASE to name
a folder with o200k_base.tiktoken. With `--mistral-common` the texts of Mistral are parsed by its authors' library
instead: calls only, and as a whole.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SEED = 1


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("texts", type=Path)
    arguments.add_argument("results", type=Path)
    arguments.add_argument("--model", type=Path, required=True, help="folder of a model, for its tokenizer")
    arguments.add_argument("--mistral-common", action="store_true")
    options = arguments.parse_args()
    logging.disable(logging.CRITICAL)  # parsers log each text that they cannot read
    parsers = MistralParsers() if options.mistral_common else Parsers(options.model)
    rng = random.Random(SEED)
    with options.texts.open() as texts, options.results.open("w", buffering=1) as results:
        for line in texts:
            results.write(json.dumps(parsers.result(json.loads(line), rng)) + "\n")


class Parsers:
    """vLLM's parsers, by the names of its options."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._tokenizers: dict[tuple[str, ...], Any] = {}
        self._classes: dict[tuple[str, str | None], Any] = {}

    def result(self, item: dict[str, Any], rng: random.Random) -> dict[str, Any]:
        """The text's pieces, and what they are parsed to as a whole and one by one."""
        is_harmony = item["tool_parser"] == "openai"
        tokenizer = self._tokenizer(tuple(item["marks"]), is_harmony)
        ids = (
            _harmony_ids(item["text"], item["quoted"])
            if is_harmony
            else tokenizer.encode(item["text"], add_special_tokens=False)
        )
        pieces = list(_pieces(_harmony_decode if is_harmony else tokenizer.decode, ids, rng))
        prompt = tokenizer.encode(item["prompt_end"], add_special_tokens=False)
        whole, whole_s = self._timed(item, tokenizer, lambda parser, request: _whole(parser, request, item, ids))
        streamed, streamed_s = self._timed(
            item, tokenizer, lambda parser, request: _streamed(parser, request, pieces, prompt)
        )
        return {"id": item["id"], "pieces": [text for text, _ in pieces], "whole": whole, "streamed": streamed,
                "whole_s": whole_s, "streamed_s": streamed_s}  # fmt: skip

    def _timed(self, item: dict[str, Any], tokenizer: Any, parse: Any) -> tuple[dict[str, Any], float]:
        """What a new parser makes of a text, or the error it raises; and the seconds that it takes."""
        request = _request(item)
        parser = self._class(item)(tokenizer, request.tools, chat_template_kwargs={"thinking": True})
        started = time.perf_counter()
        answer = _answer_of(lambda: parse(parser, request))
        return answer, time.perf_counter() - started

    def _class(self, item: dict[str, Any]) -> Any:
        from vllm.parser.parser_manager import ParserManager

        names = item["tool_parser"], item["reasoning_parser"]
        if names not in self._classes:
            self._classes[names] = ParserManager.get_parser(
                *names, enable_auto_tools=True, is_harmony=names[0] == "openai"
            )
        return self._classes[names]

    def _tokenizer(self, marks: tuple[str, ...], is_harmony: bool) -> Any:
        from transformers import AutoTokenizer

        if marks not in self._tokenizers:
            tokenizer = AutoTokenizer.from_pretrained(self._model)
            tokenizer.add_tokens(list(marks))
            vocab = tokenizer.get_vocab()
            tokenizer.get_vocab = lambda: vocab  # each parser asks for it, and it takes 20 ms to make
            if is_harmony:
                tokenizer.decode = _harmony_decode  # the parser shows with it what it cannot read
            self._tokenizers[marks] = tokenizer
        return self._tokenizers[marks]


class MistralParsers:
    """The parser of mistral_common, by the tokenizer that comes with it."""

    def __init__(self) -> None:
        import mistral_common
        from mistral_common.tokens.tokenizers.base import TokenizerVersion
        from mistral_common.tokens.tokenizers.tekken import Tekkenizer

        data = json.loads((Path(mistral_common.__file__).parent / "data" / "tekken_240911.json").read_text())
        old = Tekkenizer.DEPRECATED_SPECIAL_TOKENS
        marks = ("[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
        new = [{"rank": len(old) + i, "token_str": mark, "is_control": True} for i, mark in enumerate(marks)]
        config = data["config"]
        self._tokenizers = {
            form: Tekkenizer(
                data["vocab"],
                [*old, *new],
                config["pattern"],
                config["default_vocab_size"],
                config["default_num_special_tokens"],
                TokenizerVersion(version),
            )
            for form, version in (("mistral", "v7"), ("mistral_v11", "v11"))
        }

    def result(self, item: dict[str, Any], _: random.Random) -> dict[str, Any]:
        """What it makes of the calls of a text, or the error it raises."""
        answer = _answer_of(lambda: self._calls(item))
        return {"id": item["id"], "pieces": [item["text"]], "whole": answer, "streamed": answer,
                "whole_s": 0.0, "streamed_s": 0.0}  # fmt: skip

    def _calls(self, item: dict[str, Any]) -> dict[str, Any]:
        from mistral_common.experimental.tools import _decode_tool_calls, _split_content_and_tool_calls

        tokenizer = self._tokenizers[item["form"]]
        ids: list[int] = []
        for part in re.split(r"(\[TOOL_CALLS\]|\[ARGS\])", item["text"]):
            is_mark = part.startswith("[") and part.isupper() and (part != "[ARGS]" or item["form"] != "mistral")
            ids += [tokenizer.get_special_token(part)] if is_mark else tokenizer.encode(part, bos=False, eos=False)
        _, parts = _split_content_and_tool_calls(ids, tokenizer.get_special_token("[TOOL_CALLS]"))
        calls = _decode_tool_calls(parts, tokenizer)
        return {
            "reasoning": "",
            "content": "",
            "calls": [[call.function.name, call.function.arguments] for call in calls],
        }


def _answer_of(parse: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a parser makes of a text, or the error it raises. The Python of vLLM does not know our fault boundaries."""
    try:
        return parse()
    except Exception as exc:  # whatever a parser raises is its result
        return {"error": f"{type(exc).__name__}: {exc}"}


def _request(item: dict[str, Any]) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    messages = [{"role": "user", "content": "Hello"}]
    return ChatCompletionRequest(model="m", messages=messages, tools=item["tools"], tool_choice="auto")


def _whole(parser: Any, request: Any, item: dict[str, Any], ids: Sequence[int]) -> dict[str, Any]:
    reasoning, content, calls = parser.parse(
        item["text"], request, enable_auto_tools=True, model_output_token_ids=list(ids)
    )
    return {
        "reasoning": reasoning or "",
        "content": content or "",
        "calls": [[call.name, call.arguments] for call in calls or ()],
    }


def _streamed(
    parser: Any, request: Any, pieces: Sequence[tuple[str, list[int]]], prompt: Sequence[int]
) -> dict[str, Any]:
    answer: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    calls: list[list[str]] = answer["calls"]
    for position, (text, ids) in enumerate(pieces):
        delta = parser.parse_delta(
            text, ids, request, prompt_token_ids=list(prompt), finished=position == len(pieces) - 1
        )
        if delta is None:
            continue
        answer["content"] += delta.content or ""
        answer["reasoning"] += delta.reasoning or ""
        for call in delta.tool_calls or ():
            while len(calls) <= call.index:
                calls.append(["", ""])
            if call.function is not None:
                calls[call.index][0] += call.function.name or ""
                calls[call.index][1] += call.function.arguments or ""
    return answer


def _pieces(decode: Any, ids: Sequence[int], rng: random.Random) -> Iterator[tuple[str, list[int]]]:
    """Runs of tokens with their text. An incomplete character waits for its last token, as in vLLM's detokenizer."""
    start, shown = 0, ""
    while start < len(ids):
        end = start
        while True:
            end = min(end + rng.randint(1, 4), len(ids))
            text = decode(list(ids[:end]))
            if end == len(ids) or not text.endswith("\ufffd"):
                break
        yield text[len(shown) :], list(ids[start:end])
        start, shown = end, text


def _harmony_ids(text: str, quoted: Sequence[int]) -> list[int]:
    """Token ids of a text. The marks that begin at `quoted` consist of ordinary tokens."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    ids: list[int] = []
    start = 0
    for position in quoted:
        ids += get_encoding().encode(text[start:position] + "<", allowed_special="all")
        start = position + 1
    ids += get_encoding().encode(text[start:], allowed_special="all")
    return ids


def _harmony_decode(ids: list[int]) -> str:
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    text: str = get_encoding().decode(ids)
    return text


if __name__ == "__main__":
    main()

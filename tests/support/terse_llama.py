"""A Llama with weights set by hand, which answers "Done." and has room for the prompts of coding agents.

Agents need a model that ends its answers, keeps strings short where a schema leaves them open, and reads prompts of
30,000 tokens in seconds on a CPU. No small checkpoint does so. The layers add nothing here: the next token depends on
the last one alone.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

MAX_MODEL_LEN = 131072
HIDDEN_SIZE = 32
ANSWER = ("\n", "Done", ".")  # a chat template ends with a line break; each of these is followed by the next one
ANSWER_TEXT = "".join(ANSWER[1:])
# What comes after any other token, the first that a grammar allows: the end, or what closes a JSON value.
ENDINGS = ('"', "}", "]", '"}', ",")


def save_terse_model(folder: Path, tokenizer_folder: Path) -> Path:
    """The model with the tokenizer and chat template of another one."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_folder / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        _set_weights(model, [_token(tokenizer, text) for text in ANSWER], [_token(tokenizer, text) for text in ENDINGS])
    model.save_pretrained(folder)
    return folder


def _token(tokenizer: AutoTokenizer, text: str) -> int:
    [token_id] = tokenizer.encode(text, add_special_tokens=False)
    return int(token_id)


def _set_weights(model: LlamaForCausalLM, answer: list[int], endings: list[int]) -> None:
    """A token's hidden state is one-hot: 0, or its place in the answer, counted from 1."""
    [layer] = model.model.layers
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.zero_()
    embedding, head = model.model.embed_tokens.weight.zero_(), model.lm_head.weight.zero_()
    embedding[:, 0] = 1.0
    head[model.config.eos_token_id] = 30.0
    for rank, token_id in enumerate(endings):
        head[token_id] = 25.0 - rank
    for place, (token_id, following) in enumerate(pairwise(answer), start=1):
        embedding[token_id, 0], embedding[token_id, place] = 0.0, 1.0
        head[following, place] = 60.0

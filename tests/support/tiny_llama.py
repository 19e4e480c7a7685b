"""A Llama of random weights small enough that a step takes a millisecond, with a byte tokenizer if wanted."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.toy_tokenizer import build_tokenizer

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
EOS_TOKEN_ID = 2


def save_tiny_model(
    folder: Path,
    *,
    vocab_size: int = VOCAB_SIZE,
    hidden_size: int = 64,
    num_heads: int = 4,
    num_layers: int = 2,
    max_model_len: int = MAX_MODEL_LEN,
) -> Path:
    """The same weights each time; large enough that greedy output depends on every token before it."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 2),
        max_position_embeddings=max_model_len,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        tie_word_embeddings=False,
        initializer_range=0.3,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def save_tiny_text_model(folder: Path, *, vocab_size: int = 300, max_model_len: int = 2048, **shape: int) -> Path:
    """The same with a tokenizer of bytes and a chat template, for servers that speak text."""
    build_tokenizer(folder)
    return save_tiny_model(folder, vocab_size=vocab_size, max_model_len=max_model_len, **shape)

"""The KV pool's memory: how many blocks it has, and the tensor that holds them."""

from __future__ import annotations

import logging
import math

import psutil
import torch

from tandem.engine.kv_pool import KvPool
from tandem.engine.loader import LoadedModel
from tandem.protocol.config import GPU_MEMORY_SHARE, EngineConfig
from tandem.protocol.errors import ConfigError
from tandem.runtime import large_pages

logger = logging.getLogger(__name__)

# A CPU's memory is shared with all other processes: a laptop of 8 GB gives 0.5 GB to each worker, and machines of 32 GB
# and more give 2 GiB.
_CPU_SHARE_OF_FREE, _CPU_SHARE_OF_TOTAL, _CPU_CAP_BYTES = 1 / 4, 1 / 16, 2 << 30


def shard_block_shape(config: EngineConfig, model: LoadedModel) -> tuple[int, int, int, int, int]:
    """The part of a block that each rank has: [num_kv_heads, num_layers, 2, block_size, head_dim]."""
    return (model.num_kv_heads, model.num_layers, 2, config.block_size, model.head_dim)


def default_gpu_pool_bytes(share: float, used_bytes: int, free_bytes: int, total_bytes: int) -> int:
    """Size of a pool on a GPU, of which a worker may take this share, and of which it has taken `used_bytes`.

    Raises ConfigError if nothing is left. Other workers of the same GPU may not have taken their share yet.
    """
    mine = int(total_bytes * share) - used_bytes
    if min(mine, free_bytes) <= 0:
        raise ConfigError(
            f"gpu_memory_share={share:g} of a GPU with {total_bytes / 1e9:.1f} GB leaves no room for a KV pool: this "
            f"worker's weights and graphs take {used_bytes / 1e9:.1f} GB, and {free_bytes / 1e9:.1f} GB of the GPU "
            "are free; start fewer workers, or a smaller model"
        )
    return min(mine, int(free_bytes * GPU_MEMORY_SHARE))


def default_cpu_pool_bytes(free_bytes: int, total_bytes: int) -> int:
    """Size of a pool in a CPU's memory if none is configured."""
    return int(min(free_bytes * _CPU_SHARE_OF_FREE, total_bytes * _CPU_SHARE_OF_TOTAL, _CPU_CAP_BYTES))


def num_blocks(config: EngineConfig, model: LoadedModel, reserved_bytes: int = 0) -> int:
    """Blocks of the pool. Raises ConfigError if the configured size does not fit the device or holds too few.

    `reserved_bytes` of a GPU stay free for what is allocated after the pool.
    """
    block_bytes = model.num_ranks * math.prod(shard_block_shape(config, model)) * model.kv_dtype.itemsize
    if model.device.type == "cuda":
        free_bytes, total_bytes = min(map(torch.cuda.mem_get_info, range(model.num_ranks)))
        free_bytes -= reserved_bytes
        share = config.gpu_memory_share or GPU_MEMORY_SHARE
        used_bytes = torch.cuda.memory_reserved() + reserved_bytes
        pool_bytes = config.pool_bytes or model.num_ranks * default_gpu_pool_bytes(
            share, used_bytes, free_bytes, total_bytes
        )
        free_bytes *= model.num_ranks
    else:
        free_bytes, total_bytes = psutil.virtual_memory().available, psutil.virtual_memory().total
        pool_bytes = config.pool_bytes or default_cpu_pool_bytes(free_bytes, total_bytes)
    if pool_bytes > free_bytes:
        raise ConfigError(
            f"pool_bytes={pool_bytes} does not fit: {free_bytes} bytes are free on {model.device.type} after loading "
            f"the weights{' and keeping room for CUDA graphs' if reserved_bytes else ''}"
        )
    count = pool_bytes // block_bytes
    if count < 2:
        raise ConfigError(
            f"pool_bytes={pool_bytes} holds {count} blocks of {block_bytes} bytes; at least two are needed"
        )
    return count


def allocate_pool(config: EngineConfig, model: LoadedModel, count: int) -> KvPool:
    """A zeroed pool of `count` blocks on the model's device.

    A pool of a configured size takes its memory now: if there is too little, the start fails and not a request. A pool
    of the default size on a CPU takes memory as its blocks are first used.
    """
    shape = (count, *shard_block_shape(config, model))
    if model.device.type != "cpu":
        return KvPool([torch.zeros(shape, dtype=model.kv_dtype, device=model.device)])
    memory = large_pages.allocate(math.prod(shape) * model.kv_dtype.itemsize)
    shard = torch.frombuffer(memory, dtype=model.kv_dtype).view(shape)
    return KvPool([shard.zero_() if config.pool_bytes else shard])


def max_model_len(config: EngineConfig, model: LoadedModel, count: int) -> int:
    """The context to serve with a pool of `count` blocks. Raises ConfigError if the configured one cannot be served."""
    pool_tokens = count * config.block_size
    wanted = config.max_model_len or model.max_model_len
    if config.max_model_len > model.max_model_len:
        raise ConfigError(f"max_model_len={wanted} is over the model's own context of {model.max_model_len} tokens")
    if config.max_model_len > pool_tokens:
        raise ConfigError(
            f"max_model_len={wanted} does not fit the KV pool of {pool_tokens} tokens; lower it or raise pool_bytes"
        )
    if wanted > pool_tokens:
        logger.warning("the KV pool holds %d tokens: serving contexts up to that instead of %d", pool_tokens, wanted)
    return min(wanted, pool_tokens)

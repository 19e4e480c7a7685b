"""Tensor parallel: one engine on several ranks, each with a part of every layer's heads and weights.

Rank 0 is the worker's process, with scheduler, sampler, transports and all KV memory. The other ranks are followers:
processes that it starts, which load their shard and compute the steps that it announces.
"""

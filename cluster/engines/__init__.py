"""Servers of other engines (vLLM, SGLang) as workers: Ray starts, watches and replaces them."""

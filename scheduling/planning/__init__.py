"""A plan before buying: what a model's KV costs on a GPU, which memory pays, and advice on a running server."""

"""KV beyond a worker's pool: tiers, reads from peers, offloading, prefetching, pins."""

"""KV below the pool: host memory, local disk, object store. They see bytes by digest, never tokens or requests."""

"""Our own workers as a backend: the request flow, the connections to workers, pins, metrics."""

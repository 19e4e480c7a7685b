"""Moves KV blocks between workers: transports, leases, the sender's outbox. Knows neither models nor requests' text."""

if __name__ != "tandem.kv_transfer":
    raise ImportError("import tandem.kv_transfer: tandem is the one import root")

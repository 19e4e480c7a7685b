"""Moves KV blocks between workers: transports, leases, the sender's outbox. Knows neither models nor requests' text."""

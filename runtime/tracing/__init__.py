"""Traces of requests. Only `tracing.py` and `export.py` import OpenTelemetry, and only if `--tracing` is on."""

"""Measurements of Tandem, one module each: `python -m benchmarks.NAME`. See docs/benchmarks.md."""

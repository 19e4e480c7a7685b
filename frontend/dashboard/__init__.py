"""The dashboard: a page for operators, and the snapshots that it shows."""

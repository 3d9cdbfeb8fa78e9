"""Load on a whole server, and what its callers get: `python -m bench.serving`."""

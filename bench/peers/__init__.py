"""Other servers with the same model, set up from their packages and measured beside ours: `make bench-peers`."""

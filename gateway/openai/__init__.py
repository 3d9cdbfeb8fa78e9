"""The OpenAI-compatible HTTP API: its parameters, the shapes of its answers, and the server."""

"""The HTTP server: OpenAI-compatible routes over an `AsyncClient`."""

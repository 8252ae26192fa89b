"""The route handlers: they turn HTTP requests into calls of the client."""

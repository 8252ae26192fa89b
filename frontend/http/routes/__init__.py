"""The handlers of the routes: from an HTTP request to calls of the client."""

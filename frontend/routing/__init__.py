"""Several engines behind one client: chooses an engine for each request, and moves requests when an engine dies."""

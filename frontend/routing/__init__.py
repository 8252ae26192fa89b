"""Several engines behind one client: which of them gets a request, and where requests go when one dies."""

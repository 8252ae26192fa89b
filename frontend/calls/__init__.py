"""Calls: what a server keeps of each HTTP request, for tenants, traces and the access log."""

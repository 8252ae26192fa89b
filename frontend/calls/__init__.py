"""Calls: accounting of each HTTP request, for tenants, traces and the access log."""

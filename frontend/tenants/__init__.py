"""Tenants of a server (`--tenants FILE`): API keys with limits of their own, and the usage of each tenant."""

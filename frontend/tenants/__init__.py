"""Tenants of a server (`--tenants FILE`): keys with limits of their own, and how much each has used."""

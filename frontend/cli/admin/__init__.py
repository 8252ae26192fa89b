"""`octavo admin`: operators' commands for a running server, one file per command."""

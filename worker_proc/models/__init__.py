"""Model architectures, one file each, and their registry."""

"""Model architectures: one file each, and the table that finds them."""

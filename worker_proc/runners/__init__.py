"""What computes steps: a folder for each runner, which no other runner imports, and the table that finds them."""

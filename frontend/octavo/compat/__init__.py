"""Other engines' Python APIs on octavo, for programs that were written for them."""

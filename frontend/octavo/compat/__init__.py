"""Python APIs of other engines, implemented on octavo, for programs that were written for them."""

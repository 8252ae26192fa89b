"""From outputs of the client to the public JSON: pure functions, no input or output of their own."""

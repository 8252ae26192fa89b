"""KV blocks in the core: who holds them, what they contain, how many there are. No tensors."""

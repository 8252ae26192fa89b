"""KV blocks as the core sees them: who holds which, what they contain, how many there are. No tensors."""

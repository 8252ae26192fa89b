"""Models that `transformers` computes, with our attention and our products: for architectures without a family."""

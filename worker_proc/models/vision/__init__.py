"""Vision towers: from the pixels of an image to rows for a language model."""

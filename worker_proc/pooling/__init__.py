"""From the hidden states of a prompt to its vector, class scores, or those of each token."""

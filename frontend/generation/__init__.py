"""From the engine's token events to outputs with text: one sequence, and several for one prompt."""

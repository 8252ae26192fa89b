"""From a conversation to a prepared generation, for every API that takes messages. Knows no HTTP schema."""

"""Images and sounds of requests: where they come from, and what the model's processor makes of them."""

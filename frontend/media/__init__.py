"""Images, videos and audio clips of requests: how they are read, and what the model's processor makes of them.

A "row" of an item is one embedding vector, which takes one position of the prompt.
"""

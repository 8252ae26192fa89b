"""Harmony, the format of GPT-OSS: an answer is a sequence of messages in channels. Independent of HTTP."""

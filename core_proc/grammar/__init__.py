"""Grammars of outputs: compiled beside the step loop, followed token by token, and turned into masks.

No other folder knows that there are grammars, and only `matcher.py` knows which library does the work.
"""

"""Grammars of outputs: compiled outside the step loop, advanced token by token, and turned into masks.

No other folder knows that there are grammars, and only `matcher.py` knows which library is used.
"""

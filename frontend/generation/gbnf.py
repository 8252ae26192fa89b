"""Grammars in llama.cpp's notation (GBNF). The grammar compiler's library translates them to Lark's."""


def lark_of_gbnf(grammar: str) -> str:
    """Return the grammar in Lark's notation.

    Raises:
        ValueError: the grammar is invalid; the message says why.
    """
    # Imported here: the import is slow, and few requests need it.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(grammar)
    except Exception as error:  # the library raises bare Exception for every invalid grammar
        raise ValueError(str(error) or type(error).__name__) from error
    return lark

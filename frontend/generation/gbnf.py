"""Grammars in llama.cpp's notation (GBNF), which the compiler's library translates to Lark's."""


def lark_of_gbnf(grammar: str) -> str:
    """Return a grammar in Lark's notation.

    Raises:
        ValueError: it cannot be read; the message says why.
    """
    # Here and not above: the library's import takes a noticeable part of a second, and few grammars need it.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(grammar)
    except Exception as error:  # the library raises bare Exception for whatever is wrong with a grammar
        raise ValueError(str(error) or type(error).__name__) from error
    return lark

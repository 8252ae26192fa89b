"""Assembles streamed responses as a client would, and compares them with the result for the complete text."""

from octavo.frontend.tools.answer import AnswerDelta, AnswerFormat, AnswerStream, read_answer


def add_up(deltas: list[AnswerDelta], *, is_malformed: bool = False) -> tuple[str, str, list[tuple[str, str]]]:
    """Assemble a response as a client would, checking the rules of streams on the way."""
    reasoning, content = "", ""
    names: list[str] = []
    arguments: list[str] = []
    ids: set[str] = set()
    for delta in deltas:
        assert not (delta.reasoning and names), "reasoning behind a call"
        assert is_malformed or not (delta.content and names), "content behind a call"
        reasoning += delta.reasoning
        content += delta.content
        for call in delta.calls:
            if call.name is None:
                assert call.id is None and call.arguments, "a delta of nothing"
                assert call.index < len(names)
                arguments[call.index] += call.arguments
            else:
                assert call.id and call.id not in ids and call.index == len(names)
                ids.add(call.id)
                names.append(call.name)
                arguments.append(call.arguments)
    return reasoning, content, list(zip(names, arguments, strict=True))


def stream(pieces: list[str], style: AnswerFormat) -> tuple[str, str, list[tuple[str, str]]]:
    reader = AnswerStream(style)
    deltas = [reader.push(piece) for piece in pieces]
    deltas.append(reader.push("", is_final=True))
    return add_up(deltas, is_malformed=has_malformed_call("".join(pieces), style))


def has_malformed_call(text: str, style: AnswerFormat) -> bool:
    rest: str | None = text
    if style.reasoning is not None:
        rest = style.reasoning.split(text, style.initial_state, True).rest
    return rest is not None and any(call.is_malformed for call in style.tools.parse(rest, True).calls)


def check_stream(pieces: list[str], style: AnswerFormat) -> None:
    """Check that a stream has the contents of the complete text, and at most the start of a malformed call besides."""
    whole, streamed = add_up([read_answer("".join(pieces), style)]), stream(pieces, style)
    if not has_malformed_call("".join(pieces), style):
        assert streamed == whole
        return
    assert streamed[:2] == whole[:2]
    assert style.max_calls is not None or all(call in streamed[2] for call in whole[2])


def check_all_cuts(text: str, style: AnswerFormat) -> None:
    """Check the stream of single characters, and of every cut into two pieces."""
    whole = add_up([read_answer(text, style)])
    assert stream(list(text), style) == whole
    for cut in range(len(text) + 1):
        assert stream([text[:cut], text[cut:]], style) == whole, cut

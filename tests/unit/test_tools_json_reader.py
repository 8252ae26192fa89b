"""Incomplete JSON, against the standard library's parser on whole texts."""

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from octavo.frontend.tools.json_reader import StringEscaper, json_text, read_members, read_value, string_text

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
LAYOUTS = st.sampled_from([{}, {"indent": 1}, {"ensure_ascii": False}, {"separators": (",", ":")}])


@given(value=VALUES, layout=LAYOUTS, behind=st.sampled_from([" ", "]", "}", ",", "x", "\n<tag>"]))
def test_a_whole_value_ends_where_it_ends(value, layout, behind) -> None:
    text = json.dumps(value, **layout)
    span = read_value(f"--{text}{behind}", 2)
    assert (span.start, span.limit, span.is_whole) == (2, 2 + len(text), True)


@given(value=VALUES, layout=LAYOUTS)
def test_a_beginning_of_a_value_is_open_and_what_is_certain_of_it_grows(value, layout) -> None:
    text = json.dumps([value], **layout)
    limits = []
    for end in range(len(text)):
        span = read_value(text[:end], 0)
        assert not span.is_whole and not span.is_broken
        limits.append(span.limit)
    assert limits == sorted(limits)


@given(value=VALUES, noise=st.text('{}[],:"\\ 0e-+.truefalsn', min_size=1, max_size=3), place=st.integers(0, 200))
def test_complete_values_are_valid_json(value, noise, place) -> None:
    text = json.dumps(value)
    text = text[:place] + noise + text[place:]
    span = read_value(text, 0)
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text)
    except ValueError as error:
        # Only of escapes is more let through.
        assert not span.is_whole or "escape" in str(error)
    else:
        # A number at the end of the text might go on, and one before a letter is none.
        assert (span.is_whole and span.limit == end) or text[end - 1].isdigit()


@given(value=st.dictionaries(st.text(max_size=4), VALUES, max_size=4), layout=LAYOUTS)
def test_members_of_an_object(value, layout) -> None:
    text = json.dumps(value, **layout)
    *members, (nothing, whole) = read_members(text + ", 5", 0)
    assert {key: json.loads(text[span.start : span.limit]) for key, span in members} == value
    assert (nothing, whole.limit, whole.is_whole) == (None, len(text), True)


@given(written=st.text(max_size=12), layout=LAYOUTS)
def test_texts_of_strings_grow(written, layout) -> None:
    text = json.dumps(written, **({} if "indent" in layout else layout))
    expected = written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert string_text(text, read_value(text, 0)) == expected
    for end in range(1, len(text)):
        part = text[:end]
        assert expected.startswith(string_text(part, read_value(part, 0)).rstrip("\ufffd"))


def test_control_characters_in_strings_are_escaped_and_space_is_not() -> None:
    assert json_text('{\n"a": "x\ny\t"\n}') == '{\n"a": "x\\ny\\t"\n}'
    assert json_text('{"a": "x\n') == '{"a": "x\\n'
    assert json_text("plain") == "plain"


@given(
    pieces=st.lists(
        st.sampled_from(['"', "\\", "\n", "\t", "\x01", "a", "é", "{", '"k": "', '\\"', "\\\\", "\\\n"]), max_size=12
    )
)
def test_control_characters_are_escaped_however_the_text_is_cut(pieces: list[str]) -> None:
    text = "".join(pieces)
    escaper = StringEscaper()
    escaped = "".join(map(escaper.push, pieces))
    by_string = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL)
    assert escaped == by_string.sub(
        lambda string: "".join(json.dumps(c)[1:-1] if c < " " else c for c in string[0]), text
    )
    assert "".join(map(StringEscaper().push, [escaped])) == escaped

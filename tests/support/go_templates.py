"""Renders Helm charts without Helm: the part of Go's templates and of Sprig's functions that deploy/helm uses.

Anything else raises, so a chart that needs more fails its test instead of passing unseen.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

_TAG = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[|()]|[^\s|()]+')

Node = str | tuple[str, str, list[Any], list[Any]]
"""Text, or a tag: its keyword, its expression, and the nodes inside of it and after its `else`."""


def render_chart(folder: Path, values: dict[str, Any], release: str = "test") -> list[dict[str, Any]]:
    """Return the manifests of a chart.

    Args:
        folder: of the chart.
        values: laid over those of values.yaml.
        release: its name.
    """
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    data = {
        "Values": _merged(yaml.safe_load((folder / "values.yaml").read_text()), values),
        "Release": {"Name": release, "Namespace": "default", "Service": "Helm"},
        "Chart": {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
    }
    renderer = _Renderer(data)
    files = sorted((folder / "templates").iterdir(), key=lambda path: path.suffix != ".tpl")  # definitions first
    texts = [renderer.render(_parse(path.read_text()), data) for path in files]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def _merged(below: Any, above: Any) -> Any:
    if not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _merged(below.get(key), value) for key, value in above.items()}}


def _parse(text: str) -> list[Node]:
    """Return the nodes of a template."""
    stack: list[tuple[str, str, list[Any], list[Any]]] = [("root", "", [], [])]
    is_after_else = [False]
    end, strips = 0, False

    def add(node: Node) -> None:
        stack[-1][3 if is_after_else[-1] else 2].append(node)

    for tag in _TAG.finditer(text):
        before = text[end : tag.start()]
        before = before.lstrip() if strips else before
        add(before.rstrip() if tag[1] else before)
        end, strips = tag.end(), bool(tag[3])
        keyword, _, rest = tag[2].partition(" ")
        if keyword in ("if", "with", "range", "define"):
            node = (keyword, rest, [], [])
            add(node)
            stack.append(node)
            is_after_else.append(False)
        elif keyword == "else":
            assert not rest and not is_after_else[-1], tag[0]
            is_after_else[-1] = True
        elif keyword == "end":
            stack.pop()
            is_after_else.pop()
        else:
            add(("value", tag[2], [], []))
    assert len(stack) == 1, f"{stack[-1][0]} {stack[-1][1]} has no end"
    add(text[end:].lstrip() if strips else text[end:])
    return stack[0][2]


class _Renderer:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._defined: dict[str, list[Node]] = {}
        self._functions: dict[str, Callable[..., Any]] = {
            "include": lambda name, dot: self.render(self._defined[name], dot),
            "quote": lambda value: '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
            "default": lambda otherwise, value: value or otherwise,
            "toYaml": lambda value: yaml.safe_dump(value, sort_keys=False).rstrip("\n"),
            "nindent": lambda width, value: "".join(f"\n{' ' * width}{line}" for line in value.split("\n")),
            "printf": lambda form, *values: form % values,
            "trunc": lambda length, value: value[:length],
            "trimSuffix": lambda suffix, value: value.removesuffix(suffix),
            "add": lambda *values: sum(values),
            "not": lambda value: not value,
        }

    def render(self, nodes: Sequence[Node], dot: Any) -> str:
        return "".join(node if isinstance(node, str) else self._render_tag(*node, dot) for node in nodes)

    def _render_tag(self, keyword: str, expression: str, inside: list[Node], otherwise: list[Node], dot: Any) -> str:
        if keyword == "define":
            self._defined[self._evaluate(expression, dot)] = inside
            return ""
        value = self._evaluate(expression, dot)
        if keyword == "value":
            return str(value).lower() if isinstance(value, bool) else str(value)
        if keyword == "range":
            return "".join(self.render(inside, one) for one in value)
        if not value:
            return self.render(otherwise, dot)
        return self.render(inside, value if keyword == "with" else dot)

    def _evaluate(self, expression: str, dot: Any) -> Any:
        words = _WORD.findall(expression)
        value = self._pipeline(words, dot)
        assert not words, f"{expression!r} does not end at {words}"
        return value

    def _pipeline(self, words: list[str], dot: Any) -> Any:
        value = self._command(words, dot)
        while words and words[0] == "|":
            words.pop(0)
            value = self._command(words, dot, [value])
        return value

    def _command(self, words: list[str], dot: Any, last: Sequence[Any] = ()) -> Any:
        if words[0] in self._functions:
            function = self._functions[words.pop(0)]
            arguments = []
            while words and words[0] not in ("|", ")"):
                arguments.append(self._operand(words, dot))
            return function(*arguments, *last)
        assert not last, f"{words[0]} is no function"
        return self._operand(words, dot)

    def _operand(self, words: list[str], dot: Any) -> Any:
        word = words.pop(0)
        if word == "(":
            value = self._pipeline(words, dot)
            assert words.pop(0) == ")"
            return value
        if word.startswith('"'):
            return yaml.safe_load(word)
        if word.isdecimal():
            return int(word)
        assert word.startswith("."), f"unknown word {word!r}"
        for name in filter(None, word.split(".")):
            dot = dot[name]  # KeyError: a value that values.yaml lacks
        return dot

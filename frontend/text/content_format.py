"""Detects what a chat template expects as a message's content: a string, or OpenAI's list of parts.

It analyzes the template's syntax tree and renders nothing.
"""

from typing import Literal, TypeAlias

from jinja2 import nodes

ContentFormat: TypeAlias = Literal["string", "openai"]


class TemplateShape:
    """How one template uses message content.

    Names are followed through `for`, `set` and macro calls. Scopes are ignored: no known template uses the same name
    for a message's content and for something else.
    """

    def __init__(self, tree: nodes.Template) -> None:
        self._tree = tree
        self._lists = {"messages"}
        """Names that hold several messages."""
        self._messages: set[str] = set()
        """Names that hold one message."""
        self._contents: set[str] = set()
        """Names that hold a message's content."""
        while self._follow_names():
            pass

    @property
    def content_format(self) -> ContentFormat:
        """ "openai" if the template loops over the content of a message."""
        loops = self._tree.find_all(nodes.For)
        return "openai" if any(self._is_content(loop.iter) for loop in loops) else "string"

    @property
    def accepts_strings(self) -> bool:
        """Whether the template tests if a content is a string, and therefore accepts both forms."""
        tests = self._tree.find_all(nodes.Test)
        return any(test.name == "string" and self._is_content(test.node) for test in tests)

    def _follow_names(self) -> bool:
        """Classify names by their assignments; return True if a new one was found."""
        before = self._count()
        for loop in self._tree.find_all(nodes.For):
            if self._is_list(loop.iter) and isinstance(loop.target, nodes.Name):
                self._messages.add(loop.target.name)
        for assignment in self._tree.find_all(nodes.Assign):
            if isinstance(assignment.target, nodes.Name):
                self._learn(assignment.target.name, assignment.node)
        macros = {macro.name: macro for macro in self._tree.find_all(nodes.Macro)}
        for call in self._tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name in macros:
                parameters = macros[call.node.name].args
                for parameter, argument in zip(parameters, call.args, strict=False):
                    self._learn(parameter.name, argument)
                for keyword in call.kwargs:
                    self._learn(keyword.key, keyword.value)
        return self._count() > before

    def _learn(self, name: str, value: nodes.Node) -> None:
        if self._is_list(value):
            self._lists.add(name)
        elif self._is_message(value):
            self._messages.add(name)
        elif self._is_content(value):
            self._contents.add(name)

    def _count(self) -> int:
        return len(self._lists) + len(self._messages) + len(self._contents)

    def _is_list(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._lists
            case nodes.Getitem(node=inner, arg=nodes.Slice()) | nodes.Filter(node=inner):
                return self._is_list(inner)
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.Or(left=one, right=other):
                return self._is_list(one) or self._is_list(other)
        return False

    def _is_message(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._messages
            case nodes.Getitem(node=inner, arg=index) if not isinstance(index, nodes.Slice):
                return self._is_list(inner)
            case nodes.Filter(node=inner, name="first" | "last"):
                return self._is_list(inner)
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.Or(left=one, right=other):
                return self._is_message(one) or self._is_message(other)
        return False

    def _is_content(self, node: nodes.Node | None) -> bool:
        match node:
            case nodes.Name(name=name):
                return name in self._contents
            case (
                nodes.Getattr(node=inner, attr="content") | nodes.Getitem(node=inner, arg=nodes.Const(value="content"))
            ):
                return self._is_message(inner)
            case nodes.Call(node=nodes.Getattr(node=inner, attr="get"), args=[nodes.Const(value="content"), *_]):
                return self._is_message(inner)
            case nodes.Filter(node=inner):
                return self._is_content(inner)
            case nodes.CondExpr(expr1=one, expr2=other) | nodes.Or(left=one, right=other):
                return self._is_content(one) or self._is_content(other)
        return False

"""Sandbox for chat templates: Hugging Face's dialect of Jinja, without side effects and with a time limit.

Every loop iteration and every call checks the clock, so no template runs for long. The sandbox does not limit memory;
`template_process` does.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.frontend.text.content_format import TemplateShape
from octavo.protocol.errors import InvalidRequestError

TIME_LIMIT_S = 5.0
"""Time limit in seconds for rendering a conversation, which usually takes milliseconds."""


class TemplateTimeoutError(Exception):
    """The template ran for too long."""


class Compiled:
    """A compiled template, and facts from its syntax tree.

    Args:
        template: the template to render.
        tree: the template's syntax tree.
    """

    def __init__(self, template: jinja2.Template, tree: nodes.Template) -> None:
        self._template = template
        self.shape = TemplateShape(tree)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        """Names of the variables that the template uses."""
        self.texts = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
        """String constants in the template, such as the names of roles."""

    def render(self, variables: dict[str, Any]) -> str:
        """Return the rendered text.

        Raises:
            TemplateTimeoutError: rendering took longer than `TIME_LIMIT_S`.
            Exception: any exception that the template's expressions raise.
        """
        with _deadline():
            return self._template.render(variables)


@lru_cache(maxsize=16)
def compile_template(source: str) -> Compiled:
    """Compile a template. The most recently used ones are cached.

    Raises:
        InvalidRequestError: the template does not parse.
    """
    try:
        return Compiled(_environment.from_string(source), _environment.parse(source))
    except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
        raise InvalidRequestError(
            f"the chat template does not parse: {error}; give another with --chat-template", "chat_template"
        ) from error


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which checks the clock in every loop iteration and call."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            # Reading the attribute `clock` checks the time.
            loop.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("clock"), lineno=loop.lineno))
        return tree

    @property
    def clock(self) -> None:
        """Always `None`; reading it raises an error if the time is over."""
        _check_clock()

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an object from a template."""
        _check_clock()
        return super().call(context, obj, *args, **kwargs)


_running = threading.local()
"""Thread-local `end`: when the template that this thread renders must be finished."""


@contextmanager
def _deadline() -> Iterator[None]:
    _running.end = time.monotonic() + TIME_LIMIT_S
    try:
        yield
    finally:
        del _running.end


def _check_clock() -> None:
    if time.monotonic() > _running.end:
        raise TemplateTimeoutError


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets. In a prompt only its body matters."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own way to declare it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialize to JSON. Jinja's own filter escapes for HTML, on which models were not trained."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    """Let a template reject a conversation, for example if its roles do not alternate."""
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  (templates may pass it by this name)
    return datetime.now().strftime(format)


_environment = _Sandbox()

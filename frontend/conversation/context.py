"""`ChatContext`: the server settings and the engine that `prepare_chat` uses."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from octavo.frontend.conversation.settings import ChatSettings
from octavo.frontend.generation.params_resolver import ParamsResolver
from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.text.template_process import TemplateProcesses

if TYPE_CHECKING:
    from octavo.frontend.client import AsyncClient


@dataclass(frozen=True)
class ChatContext:
    """One engine and the settings of one server."""

    client: "AsyncClient"
    resolver: ParamsResolver
    settings: ChatSettings = field(default_factory=ChatSettings)
    trusts_request_templates: bool = False
    """Whether a request may bring its own chat template."""
    template_processes: TemplateProcesses = field(default_factory=TemplateProcesses)
    """Renders the templates that requests bring."""

    _latest: list[tuple[object, ChatTemplate]] = field(default_factory=list)
    """The template that was loaded last, with its source."""

    @property
    def chat_template(self) -> ChatTemplate:
        """The engine's chat template. It is loaded once, and again if another model replaces this one.

        Raises:
            InvalidRequestError: there is no template, or it does not parse.
        """
        source = self.client.tokenizer, self.client.config.chat_template
        if not self._latest or self._latest[0][0] != source:
            self._latest[:] = [(source, self.client.chat_template(self.settings.content_format))]
        return self._latest[0][1]

"""`ChatContext`: what `prepare_chat` needs to know about the server and its engine."""

from dataclasses import dataclass, field
from functools import cached_property
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
    """Render the templates that requests bring."""

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The engine's chat template, read once.

        Raises:
            InvalidRequestError: there is none, or it does not parse.
        """
        return self.client.chat_template(self.settings.content_format)

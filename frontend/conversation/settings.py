"""`ChatSettings`: how a server handles conversations, derived from its flags."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.frontend.harmony.parser import HARMONY_REASONING, HarmonyParser
from octavo.frontend.plugins.loading import load_plugin
from octavo.frontend.reasoning.parser import ReasoningParser
from octavo.frontend.reasoning.registry import reasoning_parser
from octavo.frontend.text.chat_template import RESERVED_VARIABLES, ChatTemplate, FormatChoice
from octavo.frontend.tools.detection import detect_tool_parser
from octavo.frontend.tools.parser import ToolParser
from octavo.frontend.tools.registry import parser_names, tool_parser
from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)

AUTO = "auto"
"""Name of the tool parser that the chat template determines."""


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """Chat settings of one server."""

    content_format: FormatChoice = "auto"
    template_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Template variables for requests that do not set them."""
    auto_parser: type[ToolParser] | None = None
    """Parses calls under tool_choice "auto"; `None` if the model may not make such calls."""
    hides_unused_tools: bool = False
    """Whether to omit the tools from the prompt if tool_choice is none."""
    reasoning: ReasoningParser | None = None
    role: str = "assistant"
    """Role of answers that do not continue a message."""

    @property
    def is_harmony(self) -> bool:
        """Whether answers are messages in channels (GPT-OSS)."""
        return self.reasoning is HARMONY_REASONING

    @classmethod
    def of(cls, config: ServerConfig, template: ChatTemplate | None = None) -> "ChatSettings":
        """Return the settings that the flags describe.

        Args:
            config: the configuration of the server.
            template: the model's template, which determines the tool parser "auto"; None: it is not known yet.

        Raises:
            ConfigError: a parser is unknown or missing, the plugin cannot be loaded, or the template's defaults are
            invalid.
        """
        plugins = {
            config.tool_parser_plugin: "--tool-parser-plugin",
            config.reasoning_parser_plugin: "--reasoning-parser-plugin",
        }
        for file, flag in plugins.items():
            if file is not None:
                load_plugin(file, flag)
        parser = _tool_parser(config.tool_call_parser, template)
        if config.tool_call_parser is not None and not config.enable_auto_tool_choice:
            logger.warning("--tool-call-parser has no effect without --enable-auto-tool-choice")
        if config.enable_auto_tool_choice and config.tool_call_parser is None:
            raise ConfigError(
                "--enable-auto-tool-choice needs a tool parser",
                hint=f"add --tool-call-parser auto, or one of {', '.join(parser_names())}",
            )
        reasoning = None if config.reasoning_parser is None else reasoning_parser(config.reasoning_parser)
        if parser is HarmonyParser and reasoning is None:
            reasoning = HARMONY_REASONING
        if parser is not None and (parser is HarmonyParser) != (reasoning is HARMONY_REASONING):
            raise ConfigError(
                f"--tool-call-parser {config.tool_call_parser} and --reasoning-parser {config.reasoning_parser} read "
                "different formats",
                hint="the format of GPT-OSS needs --tool-call-parser openai and --reasoning-parser openai_gptoss",
            )
        return cls(
            content_format=config.chat_template_content_format,
            template_defaults=_template_defaults(config.default_chat_template_kwargs),
            auto_parser=parser if config.enable_auto_tool_choice else None,
            hides_unused_tools=config.exclude_tools_when_tool_choice_none,
            reasoning=reasoning,
            role=config.response_role,
        )


def _tool_parser(name: str | None, template: ChatTemplate | None) -> type[ToolParser] | None:
    if name is None or (name == AUTO and template is None):
        return None
    if name != AUTO or template is None:
        return tool_parser(name)
    found = detect_tool_parser(template.source_with_tools)
    if found is None:
        raise ConfigError(
            "the chat template writes tool calls in no format that is known, or does not support tools",
            hint=f"set --tool-call-parser to one of {', '.join(parser_names())}",
        )
    logger.info("the chat template writes tool calls for the parser %s", found)
    return tool_parser(found)


def _template_defaults(text: str | None) -> dict[str, Any]:
    try:
        defaults = msgspec.json.decode(text or "{}", type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"default_chat_template_kwargs is not a JSON object: {error}",
            hint="""write --default-chat-template-kwargs '{"enable_thinking": false}'""",
        ) from None
    if reserved := defaults.keys() & RESERVED_VARIABLES:
        raise ConfigError(f"default_chat_template_kwargs must not hold {min(reserved)!r}")
    return defaults

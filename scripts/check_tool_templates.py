"""Renders a conversation with tool calls with each chat template in the given folders, and parses the calls back.

The parser is the one that `--tool-call-parser auto` selects for the template. Fetches nothing: docs/tool-calling.md
says where the templates came from.
"""

import argparse
import json
from itertools import takewhile
from pathlib import Path
from typing import Any

from octavo.frontend.text.chat_template import ChatTemplate
from octavo.frontend.tools.detection import detect_tool_parser
from octavo.frontend.tools.parser import FunctionTool
from octavo.frontend.tools.registry import tool_parser
from octavo.protocol.errors import InvalidRequestError

SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string", "description": "A text."},
        "n": {"type": "integer", "description": "A number."},
        "o": {"type": "object", "properties": {"k": {"type": "array", "items": {"type": "boolean"}}}},
    },
}
CALLS = [("first_one", {"s": "12", "n": 7}), ("second", {"s": 'é 日本 {"x": [1', "o": {"k": [True, False]}})]
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": SCHEMA}}
    for name, _ in CALLS
]
IDS = ("functions.NAME:NUMBER", "abcdefghNUMBER")
"""Call ids to try: some templates write the id, others check its form."""


def main() -> None:
    """Print one line for each template that supports tools."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="+", help="holds *.jinja")
    for folder in parser.parse_args().folder:
        for file in sorted(folder.glob("*.jinja")):
            source = file.read_text()
            name = detect_tool_parser(source)
            if name is not None:
                print(f"{file.stem}: {name}: {round_trip(source, name)}")


def round_trip(source: str, name: str) -> str:
    """Return the result: all calls came back, or one where the template allows no more, or the failure."""
    faults = []
    for calls in (CALLS, CALLS[:1]):
        for call_id in IDS:
            try:
                turn = turn_of(source, messages(calls, call_id))
            except InvalidRequestError as error:
                faults.append(error.message)
                continue
            tools = [FunctionTool(function, SCHEMA) for function, _ in CALLS]
            found = [(call.name, call.arguments) for call in tool_parser(name)(tools).parse(turn, True).calls]
            try:
                if [(function, json.loads(arguments)) for function, arguments in found] == calls:
                    return f"{len(calls)} calls" if len(calls) > 1 else f"one call ({faults[0]})"
            except ValueError:
                pass
            faults.append(f"{turn!r} gave {found}")
    return f"FAILED: {faults[0]}"


def messages(calls: list[Any], call_id: str) -> list[dict[str, Any]]:
    """Return a conversation with these calls."""
    written = [
        {
            "id": call_id.replace("NAME", name).replace("NUMBER", str(number)),
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for number, (name, arguments) in enumerate(calls)
    ]
    return [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "", "tool_calls": written}]


def turn_of(source: str, conversation: list[dict[str, Any]]) -> str:
    """Return the text of the last message: the suffix that rendering without it lacks."""
    template = ChatTemplate(source, dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), ""))
    texts = [
        template.render(part, tools=TOOLS, add_generation_prompt=False) for part in (conversation[:-1], conversation)
    ]
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False)))
    return texts[1][common:]


if __name__ == "__main__":
    main()

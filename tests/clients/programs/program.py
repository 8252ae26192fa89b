"""What all programs share: the server's address, a tool, a form, and the report of what was exercised."""

import sys
from typing import Any

BASE_URL, MODEL = sys.argv[1:3]
QUESTION = "What is the weather?"
CITIES = ["Ulm", "Bonn"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""A schema of few values: a random model ends soon, and answers can be checked."""


def exercised(feature: str) -> None:
    """Report that a feature was used and its result was right."""
    print(f"exercised: {feature}", flush=True)


def check_weather(arguments: dict[str, Any]) -> None:
    assert set(arguments) == {"city", "days"}, arguments
    assert arguments["city"] in CITIES and 1 <= arguments["days"] <= 9, arguments

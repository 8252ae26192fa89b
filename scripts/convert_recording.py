"""The program behind `scripts/convert_recording`: converts a recording of protocol version 2 to version 5.

Works on msgpack values, because the versions differ in the positions of values, and the message types of version 2 no
longer exist.
"""

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

VERSION = 5

NEW_SETTINGS: dict[str, Any] = {
    "step_time_target_s": 0.0,
    "logits_processors": [],
    "structured_output": {
        "max_grammar_bytes": 512 * 2**10,
        "grammar_timeout_s": 5,
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
    },
    "recovery": {},
    "remote": {},
}
"""Fields added to `ResolvedConfig` since, with the values under which the scheduler behaves as before."""

_LENGTH = struct.Struct("<I")


def convert(recording: bytes) -> bytes:
    """Return a recording of version 2 in the form of version 5, without a truncated last entry."""
    frames = []
    for body in _bodies(recording):
        converted = msgspec.msgpack.encode(_entry(msgspec.msgpack.decode(body)))
        frames.append(_LENGTH.pack(len(converted)) + converted)
    return b"".join(frames)


def _bodies(recording: bytes) -> Iterator[bytes]:
    start = 0
    while start + _LENGTH.size <= len(recording):
        (size,) = _LENGTH.unpack_from(recording, start)
        start += _LENGTH.size
        if start + size > len(recording):
            return
        yield recording[start : start + size]
        start += size


def _entry(entry: list[Any]) -> list[Any]:
    match entry:
        case ["opened", config, plan]:
            num_blocks = plan.pop("num_blocks")
            return ["opened", NEW_SETTINGS | config, plan | {"blocks_per_group": [num_blocks]}, VERSION]
        case ["submitted", client, submit]:
            return ["submitted", client, _submit(*submit)]
        case ["planned", [*plan]]:
            return ["planned", _plan(*plan)]
        case ["committed", [tag, sequence, token_ids, *rest]]:
            return ["committed", [tag, sequence, _packed(token_ids), *rest, []]]
        case _:
            return entry


def _submit(
    tag: str, name: str, prompt: list[int], sampling: list[Any], priority: int, salt: str | None, adapter: str | None,
    resume: list[int], *rest: Any,
) -> list[Any]:  # fmt: skip
    return [tag, name, _packed(prompt), ["sampling", *sampling], priority, salt, adapter, _packed(resume), *rest]


def _plan(
    tag: str, sequence: int, released: list[int], admitted: list[Any], appended: list[Any], scheduled: list[Any],
    awaits_masks: bool,
) -> list[Any]:  # fmt: skip
    return [
        tag,
        sequence,
        released,
        [
            [slot, name, _packed(token_ids), num_prompt_tokens, [block_ids], ["sampling", *sampling]]
            for slot, name, token_ids, num_prompt_tokens, block_ids, sampling in admitted
        ],
        [[slot, [block_ids]] for slot, block_ids in appended],
        [[slot, start, num_tokens, int(samples)] for slot, start, num_tokens, samples in scheduled],
        awaits_masks,
    ]


def _packed(token_ids: list[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def main(arguments: list[str]) -> int:
    """Convert the file named on the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/convert_recording", description=__doc__)
    parser.add_argument("source", type=Path, help="written by octavo serve --record-steps FILE of an earlier release")
    parser.add_argument("target", type=Path, help="output file for scripts/replay")
    options = parser.parse_args(arguments)
    try:
        options.target.write_bytes(convert(options.source.read_bytes()))
    except (OSError, msgspec.DecodeError, ValueError, TypeError, KeyError) as error:
        sys.stderr.write(f"cannot convert {options.source}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

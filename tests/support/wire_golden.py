"""The program behind `scripts/wire_golden`: writes the bytes of all `wire_samples` to tests/golden/wire.json."""

import argparse
import hashlib
import json
import sys
from pathlib import Path

from source_tree import ROOT
from wire_samples import MESSAGES

from octavo.protocol import PROTOCOL_VERSION

PATH = ROOT / "tests" / "golden" / "wire.json"


def sample_bytes() -> list[dict]:
    """Return each sample's name, its body in hexadecimal, and a digest of each of its buffers."""
    samples = []
    for number, (codec, message) in enumerate(MESSAGES):
        body, *buffers = codec.encode(message)
        digests = [f"{len(buffer)} bytes, sha256 {hashlib.sha256(buffer).hexdigest()}" for buffer in buffers]
        samples.append({"message": f"{number} {type(message).__name__}", "body": bytes(body).hex(), "buffers": digests})
    return samples


def main(arguments: list[str], path: Path = PATH) -> int:
    """Write the file and return the exit code."""
    parser = argparse.ArgumentParser(prog="scripts/wire_golden", description=__doc__)
    parser.add_argument(
        "--same-version",
        action="store_true",
        help="replace bytes of the present PROTOCOL_VERSION, which no release has spoken yet",
    )
    options = parser.parse_args(arguments)
    new = {"version": PROTOCOL_VERSION, "messages": sample_bytes()}
    old = json.loads(path.read_text()) if path.exists() else {"version": 0, "messages": []}
    kept = [one for one in old["messages"] if one in new["messages"]]
    if old["version"] == PROTOCOL_VERSION and kept != old["messages"] and not options.same_version:
        changed = [one["message"] for one in old["messages"] if one not in kept]
        sys.stderr.write(
            f"{', '.join(changed)}: not the bytes of version {PROTOCOL_VERSION} any more. Raise PROTOCOL_VERSION in "
            "protocol/__init__.py, or use --same-version if no release has spoken it\n"
        )
        return 1
    path.write_text(json.dumps(new, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

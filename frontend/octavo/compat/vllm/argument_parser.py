"""`FlexibleArgumentParser`: vLLM's command line parser for scripts."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from octavo.frontend.cli.argv import normalize_argv


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An `ArgumentParser` that accepts underscores for dashes, and members of a JSON value as flags: `--a.b 1`."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """See `ArgumentParser`."""
        return super().parse_known_args(normalize_argv(sys.argv[1:] if args is None else args), namespace)

    def check_port(self, value: str) -> int:
        """Parse a port number, for `type=`.

        Raises:
            ArgumentTypeError: it is not a port.
        """
        if not value.isdigit() or not 1024 <= int(value) <= 65535:
            raise argparse.ArgumentTypeError(f"a port is a number from 1024 to 65535, got {value!r}")
        return int(value)

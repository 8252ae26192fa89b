"""An HTTP process that serves no requests: it fails, dies or stays, depending on the root path."""

import select
import time

from octavo.protocol.control import ServerReady, ServerSpec
from octavo.protocol.errors import StartupError
from octavo.protocol.lifecycle import StartupReporter, StopSignal, run_child


def main(spec: ServerSpec, reporter: StartupReporter, stop: StopSignal) -> int:
    behaviour = spec.config.root_path
    if behaviour == "fail":
        raise StartupError("the tokenizer is upside down", hint="turn it round")
    reporter.mark_ready(ServerReady())
    if behaviour == "die":
        time.sleep(0.3)
        return 7
    patience = 2 if behaviour == "drain" else 1
    while stop.count < patience:
        select.select([stop], [], [], 30)
        stop.acknowledge()
    return 0


if __name__ == "__main__":
    run_child("Fake", ServerSpec, main)

"""The sandbox process that compiles grammars first; `sandbox.py` is the parent's side.

Reads grammars from standard input and replies to each with an error message, which is empty if there is no error.
"""

import os
import resource
import signal
import sys

from octavo.core_proc.grammar.matcher import GrammarFault, GrammarTokens, Matcher
from octavo.core_proc.grammar.sandbox import MEMORY_LIMIT_BYTES
from octavo.protocol.lifecycle import LENGTH, die_with_parent, read_message


def main(cpu_limit_s: int, parent: int) -> None:
    """Compile grammars until standard input ends, each within `cpu_limit_s` seconds of CPU time.

    Args:
        cpu_limit_s: in whole seconds.
        parent: process id of the core. It is passed because `getppid` would be too late: the core may have died by now.
    """
    die_with_parent(parent)
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the process group; the core decides
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # Steps of running requests take precedence.
    os.nice(5)
    tokens = GrammarTokens.of_bytes()
    source, answers = sys.stdin.fileno(), sys.stdout.buffer
    while True:
        try:
            (size,) = LENGTH.unpack(read_message(source, LENGTH.size))
            text = read_message(source, size).decode()
        except EOFError:
            return
        _limit_time(cpu_limit_s)
        answer = _fault_of(tokens, text).encode()
        answers.write(LENGTH.pack(len(answer)) + answer)
        answers.flush()


def _limit_time(seconds: int) -> None:
    """Have the kernel kill this process after this many more seconds of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _fault_of(tokens: GrammarTokens, source: str) -> str:
    try:
        matcher = Matcher.compile(tokens, source)
    except GrammarFault as fault:
        return str(fault)
    matcher.mask()  # some grammars defer work to the first mask
    return matcher.fault


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))

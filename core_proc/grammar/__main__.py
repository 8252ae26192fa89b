"""Entry of the process in which grammars are tried: see `trial.py`, its parent's side.

Reads sources of grammars from standard input and answers each with what is wrong, or with nothing.
"""

import os
import resource
import signal
import sys

from octavo.core_proc.grammar.matcher import GrammarFault, GrammarTokens, Matcher
from octavo.core_proc.grammar.trial import MEMORY_LIMIT_BYTES
from octavo.protocol.lifecycle import LENGTH, die_with_parent, read_message


def main(cpu_limit_s: int) -> None:
    """Try grammars until standard input ends, each within `cpu_limit_s` of processor time."""
    die_with_parent(os.getppid())
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to a whole group of processes, they are for others
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    # Trials are never urgent: the steps of running requests go first.
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
    """Have this process killed when it has taken so much more processor time than now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def _fault_of(tokens: GrammarTokens, source: str) -> str:
    try:
        matcher = Matcher.compile(tokens, source)
    except GrammarFault as fault:
        return str(fault)
    matcher.mask()  # some grammars put their work off until the first mask
    return matcher.fault


if __name__ == "__main__":
    main(int(sys.argv[1]))

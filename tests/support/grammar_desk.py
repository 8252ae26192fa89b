"""A scheduler with its grammars and the part of the step loop between them, over a vocabulary of letters."""

import select
from typing import Any

from client_events import by_request
from core_fakes import CLIENT, VOCAB_SIZE, cache_plan, core_config

from octavo.core_proc.grammar.compiler import GrammarCompiler
from octavo.core_proc.grammar.grammars import Grammars
from octavo.core_proc.scheduler.delivery import ClientEvent
from octavo.core_proc.scheduler.scheduler import Scheduler
from octavo.protocol.events import Finished, Tokens
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import ModelVocabulary, Submit
from octavo.protocol.steps import StepPlan, StepResult, TokenMask
from octavo.protocol.structured import GrammarKind, GrammarSpec

EOS = 0
STOP = 1
TOKENS = [b"<e>", b"<s>", *[bytes([97 + index]) for index in range(26)]]
VOCABULARY = ModelVocabulary([*TOKENS, *[b""] * (VOCAB_SIZE - len(TOKENS))], [EOS, STOP])


def token(letter: str) -> int:
    return TOKENS.index(letter.encode())


def letters(mask: bytes) -> str:
    """Return the tokens that a mask allows; the two special tokens as digits."""
    names = ["0", "1", *"abcdefghijklmnopqrstuvwxyz"]
    bits = int.from_bytes(mask, "little")
    assert len(mask) == 8 and bits < 1 << VOCAB_SIZE
    return "".join(name for index, name in enumerate(names) if bits >> index & 1)


class FakeWorkers:
    """Keeps the masks of each step that waited for masks."""

    def __init__(self) -> None:
        self.supplied: list[list[TokenMask]] = []

    def send_masks(self, masks: list[TokenMask]) -> None:
        self.supplied.append(masks)


class Desk:
    """A scheduler, its grammars, and the part of the step loop between them."""

    def __init__(self, compiler: GrammarCompiler, **changes: Any) -> None:
        config = core_config(**changes)
        self.scheduler = Scheduler(config, cache_plan(config), clock=lambda: 0.0)
        self.workers = FakeWorkers()
        self.grammars = Grammars(self.scheduler, self.workers, compiler)
        self.compiler = compiler
        self.plans: list[StepPlan] = []

    def submit(
        self, name: str, text: str, kind: GrammarKind = GrammarKind.REGEX, client: bytes = CLIENT, **fields: Any
    ) -> list[ClientEvent]:
        settings = {"max_tokens": 9, "seed": 0, "eos_token_ids": (EOS,), **fields.pop("sampling", {})}
        marker, parts, others = fields.pop("start_after", b""), fields.pop("parts", ()), fields.pop("other_markers", ())
        spec = GrammarSpec(kind, text, "structured_outputs.regex", marker, parts, other_markers=others)
        submit = Submit(name, [5, 6, 7], SamplingSpec(**settings), grammar=spec, **fields)
        return self.grammars.submit(client, submit)

    def wait(self) -> list[ClientEvent]:
        """Wait until nothing is being compiled."""
        events: list[ClientEvent] = []
        while self.grammars.num_waiting:
            assert select.select(self.grammars.wake_fds, [], [], 30)[0], "the compiler never said that it is done"
            events += self.grammars.take_ready()
        return events

    def start(self, name: str, text: str, **fields: Any) -> None:
        assert self.submit(name, text, **fields) + self.wait() == []

    def plan(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert plan is not None
        self.plans.append(plan)
        assert self.grammars.on_step() == []
        return plan

    def commit(self, *sampled: int) -> list[ClientEvent]:
        plan = self.plans.pop(0)
        events = self.scheduler.commit(StepResult(plan.sequence, pack_ids(sampled), [], []))
        return events + self.grammars.on_step()

    def take_letters(self) -> list[list[str]]:
        """Return the masks supplied since the last call."""
        supplied, self.workers.supplied = self.workers.supplied, []
        return [[letters(mask) for _, _, mask in masks] for masks in supplied]


def ends(events: list[ClientEvent]) -> list[Any]:
    """Return the finished requests and their reasons."""
    return [
        (event.request_id, event.reason if isinstance(event, Finished) else (event.kind, event.param))
        for _, event in by_request(events)
        if not isinstance(event, Tokens)
    ]

"""Logits processors in a worker: their batch, their order, and which requests a fault ends."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import AdapterLogitsProcessor, BatchUpdate, LogitsProcessor, SamplingParams
from octavo.protocol.alignment import AlignmentSpec
from octavo.protocol.code import ProcessorSource, take_code
from octavo.protocol.errors import ConfigError
from octavo.protocol.ids import pack_ids
from octavo.protocol.params import SamplingSpec
from octavo.protocol.steps import Admitted, StepPlan
from octavo.worker_proc.batch.state import BatchState
from octavo.worker_proc.sampling.processor_loading import load_processors
from octavo.worker_proc.sampling.processors import ProcessorFactory, Processors

VOCAB_SIZE = 40
MODULE = """
import torch
from octavo import LogitsProcessor

class Add(LogitsProcessor):
    def __init__(self, config, device, is_pin_memory):
        self.device = device
    def is_argmax_invariant(self):
        return False
    def update_state(self, batch_update):
        pass
    def apply(self, logits):
        return logits + 1.0

class Broken(Add):
    def __init__(self, config, device, is_pin_memory):
        raise RuntimeError("no such table")

class Shapeless:
    pass

VALUE = 3
"""


class Batch:
    """A worker's batch whose requests get tokens by hand."""

    def __init__(self) -> None:
        self.state = BatchState(num_slots=4, max_model_len=64, block_size=16, vocab_size=VOCAB_SIZE)
        self.sequence = 0

    def change(self, admit: dict[int, Any] | None = None, release: tuple[int, ...] = ()) -> None:
        admitted = [
            Admitted(
                slot,
                f"r{slot}",
                pack_ids([1, 2, slot]),
                3,
                [[0]],
                fields
                if isinstance(fields, AlignmentSpec)
                else SamplingSpec(**{"max_tokens": 8, "seed": slot, **fields}),
            )
            for slot, fields in (admit or {}).items()
        ]
        self.state.apply(StepPlan(self.sequence, list(release), admitted, [], []))
        self.sequence += 1

    def rows(self, *slots: int) -> list[Any]:
        return [self.state.rows[slot] for slot in slots]


class Recorder(LogitsProcessor):
    """Keeps a copy of the batch by the updates alone, and adds to each row the arguments of its request."""

    def __init__(self, config: Any, device: Any, is_pin_memory: bool) -> None:
        self.batch: dict[int, tuple[SamplingParams, list[int], list[int]]] = {}
        self.size = 0
        self.num_updates = 0

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        self.num_updates += 1
        self.size = batch_update.batch_size
        for index in batch_update.removed:
            del self.batch[index]
        for index, params, prompt, output in batch_update.added:
            assert prompt is not None
            self.batch[index] = params, prompt, output
        for source, target, _ in batch_update.moved:
            self.batch[target] = self.batch.pop(source)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert sorted(self.batch) == list(range(self.size)) == list(range(len(logits)))
        for index, (params, _, output) in self.batch.items():
            args = params.extra_args or {}
            if args.get("raises"):
                raise KeyError("raises")
            logits[index] += args.get("add", 0) + 100 * len(output)
        return logits


def processors_of(*kinds: type[LogitsProcessor]) -> Processors:
    def factory(kind: type[LogitsProcessor]) -> ProcessorFactory:
        return ProcessorFactory(kind.__name__, lambda: kind(None, torch.device("cpu"), False), kind.validate_params)  # type: ignore[arg-type]

    return Processors([factory(kind) for kind in kinds])


def logits(num_rows: int) -> torch.Tensor:
    return torch.arange(num_rows).float().unsqueeze(1).expand(num_rows, VOCAB_SIZE).contiguous()


def test_a_request_gets_its_own_row_whatever_the_batch_is() -> None:
    batch, processors = Batch(), processors_of(Recorder)
    batch.change({0: {"extra_args": {"add": 5}}, 1: {}, 2: {"extra_args": {"add": 7}}})
    given = logits(3)
    changed = processors.apply(given, batch.rows(2, 0, 1), batch.state)
    assert changed[:, 0].tolist() == [7.0, 1 + 5.0, 2.0]
    assert torch.equal(given, logits(3)), "the model's logits stay as they are"
    batch.state.record(batch.rows(2)[0], 3, 9)
    batch.change(release=(0,))
    assert processors.apply(logits(1), batch.rows(2), batch.state)[:, 0].tolist() == [107.0]
    assert processors.apply(logits(2), batch.rows(1, 2), batch.state)[:, 0].tolist() == [0.0, 108.0]


def test_alignments_are_not_seen() -> None:
    batch, processors = Batch(), processors_of(Recorder)
    batch.change({0: {"extra_args": {"add": 5}}, 1: AlignmentSpec(((0, 0),), 1, 1)})
    processors.admit(batch.rows(1)[0])
    changed = processors.apply(logits(2), batch.rows(0, 1), batch.state)
    assert changed[:, 0].tolist() == [5.0, 1.0] and processors.take_faults() == []
    assert processors.apply(logits(1), batch.rows(1), batch.state)[:, 0].tolist() == [0.0]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_processors_can_follow_the_batch_by_its_updates(data: Any) -> None:
    batch, processors, live = Batch(), processors_of(Recorder), set()
    for _ in range(12):
        leaving = tuple(slot for slot in sorted(live) if data.draw(st.booleans()))
        joining = [slot for slot in range(8) if (slot not in live or slot in leaving) and data.draw(st.booleans())]
        batch.change({slot: {"extra_args": {"add": slot}} for slot in joining}, leaving)
        live = (live - set(leaving)) | set(joining)
        drawing = data.draw(st.permutations(sorted(live)))[: data.draw(st.integers(0, 8))]
        if drawing:
            num_outputs = [row.num_known_tokens - 3 for row in batch.rows(*drawing)]
            changed = processors.apply(torch.zeros(len(drawing), VOCAB_SIZE), batch.rows(*drawing), batch.state)
            assert changed[:, 0].tolist() == [
                slot + 100 * count for slot, count in zip(drawing, num_outputs, strict=True)
            ]
            for row in batch.rows(*drawing):
                batch.state.record(row, row.num_known_tokens, 1)


def test_one_that_raises_ends_the_request_that_it_raised_for(caplog: pytest.LogCaptureFixture) -> None:
    batch, processors = Batch(), processors_of(Recorder)
    batch.change({0: {"extra_args": {"add": 5}}, 1: {"extra_args": {"raises": True}}, 2: {"extra_args": {"add": 7}}})
    changed = processors.apply(logits(3), batch.rows(0, 1, 2), batch.state)
    assert [changed[0, 0], changed[2, 0]] == [5.0, 9.0]
    assert changed[1].isnan().all(), "no token can be drawn from it"
    (fault,) = processors.take_faults()
    assert (fault.slot, fault.param) == (1, None)
    assert "KeyError" in fault.message
    assert "tried alone" in caplog.text
    caplog.clear()
    for row in batch.rows(0, 2):
        batch.state.record(row, 3, 4)
    changed = processors.apply(logits(3), batch.rows(0, 1, 2), batch.state)
    assert changed[:, 0].tolist()[::2] == [105.0, 109.0], "the others go on, with all their tokens"
    assert changed[1].isnan().all(), "as long as the core lets it run"
    assert processors.take_faults() == []
    assert not caplog.text
    batch.change({1: {"extra_args": {"add": 1}}}, release=(1,))
    assert processors.apply(logits(1), batch.rows(1), batch.state)[0, 0] == 1.0, "the slot's next request"


def test_outputs_of_a_request_that_left_never_hold_tokens_of_the_next_one() -> None:
    kept = []

    class Keeper(Recorder):
        def update_state(self, batch_update: BatchUpdate | None) -> None:
            super().update_state(batch_update)
            kept.extend(output for _, _, _, output in (batch_update.added if batch_update else ()))

    batch, processors = Batch(), processors_of(Keeper)
    batch.change({0: {}})
    processors.apply(logits(1), batch.rows(0), batch.state)
    # Its last token is drawn, then the slot gets another request with more tokens.
    batch.state.record(batch.rows(0)[0], 3, 7)
    batch.change({0: {}}, release=(0,))
    batch.state.record(batch.rows(0)[0], 3, 30)
    processors.apply(logits(1), batch.rows(0), batch.state)
    assert kept == [[], [30]]


class Picky(Recorder):
    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if "odd" in (sampling_params.extra_args or {}):
            raise ValueError("odd is not known here")


def test_parameters_are_checked_when_a_request_comes() -> None:
    batch, processors = Batch(), processors_of(Picky)
    batch.change({0: {"extra_args": {"odd": 1}}, 1: {"extra_args": {"add": 1}}})
    for row in batch.rows(0, 1):
        processors.admit(row)
    (fault,) = processors.take_faults()
    assert (fault.slot, fault.message, fault.param) == (0, "extra_args: odd is not known here", "extra_args")
    changed = processors.apply(logits(2), batch.rows(0, 1), batch.state)
    assert changed[0].isnan().all()
    assert changed[1, 0] == 2.0


class Invariant(Recorder):
    def is_argmax_invariant(self) -> bool:
        return True


def test_one_that_keeps_the_most_likely_token_leaves_greedy_requests_alone() -> None:
    batch, processors = Batch(), processors_of(Invariant)
    batch.change({0: {"extra_args": {"add": 5}}, 1: {"temperature": 1.0, "extra_args": {"add": 7}}})
    assert processors.apply(logits(2), batch.rows(0, 1), batch.state)[:, 0].tolist() == [0.0, 8.0]
    assert processors.apply(logits(1), batch.rows(0), batch.state)[:, 0].tolist() == [0.0]


class Shapeless(Recorder):
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:, :3]


def test_logits_of_another_shape_are_an_error() -> None:
    batch, processors = Batch(), processors_of(Shapeless)
    batch.change({0: {}})
    assert processors.apply(logits(1), batch.rows(0), batch.state).isnan().all()
    assert "shape" in processors.take_faults()[0].message


class Only(AdapterLogitsProcessor):
    """Allows one token, or what the prompt begins with."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        args = params.extra_args or {}
        if "only" in args:
            return lambda output, logits_V: keep(logits_V, args["only"] + len(output))
        return (lambda prompt, output, logits_V: keep(logits_V, prompt[0])) if args else None


def keep(logits_V: torch.Tensor, token_id: int) -> torch.Tensor:
    kept = torch.full_like(logits_V, -torch.inf)
    kept[token_id] = logits_V[token_id]
    return kept


def test_an_adapter_has_a_processor_for_each_request() -> None:
    batch, processors = Batch(), processors_of(Only)
    batch.change({0: {"extra_args": {"only": 9}}, 1: {}, 2: {"extra_args": {"prompt": 1}}})
    changed = processors.apply(logits(3), batch.rows(0, 1, 2), batch.state)
    assert [row.argmax().item() for row in changed] == [9, 0, 1]
    batch.state.record(batch.rows(0)[0], 3, 9)
    assert processors.apply(logits(1), batch.rows(0), batch.state)[0].argmax() == 10


def load(*sources: ProcessorSource) -> Processors | None:
    config: Any = SimpleNamespace(logits_processors=list(sources))
    return load_processors(config, torch.device("cpu"))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "my_processors.py"
    path.write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return path


def test_processors_are_found_by_module_file_and_entry_point(module: Path) -> None:
    info = module.parent / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[octavo.logits_processors]\nplus_one = my_processors:Add\n")
    names = ["my_processors:Add", f"{module}:Add", "plus_one"]
    processors = load(*(ProcessorSource(name) for name in names))
    batch = Batch()
    batch.change({0: {}})
    assert processors is not None
    assert processors.apply(logits(1), batch.rows(0), batch.state)[0, 0] == 3.0
    assert load() is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing_here:Add", "ModuleNotFoundError"),
        ("my_processors:Sub", "no attribute 'Sub'"),
        ("my_processors:Broken", "no such table"),
        ("my_processors:Shapeless", "no method is_argmax_invariant"),
        ("my_processors:VALUE", "neither a class nor a function"),
        ("nothing.py:Add", "not a Python file"),
        ("plus_two", "no installed package"),
    ],
)
def test_a_processor_that_cannot_be_loaded_says_why(module: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ProcessorSource(name))


def test_code_needs_permission_and_keeps_what_it_refers_to() -> None:
    forbidden = 7

    def never(output_token_ids: list[int], logits_V: torch.Tensor) -> torch.Tensor:
        logits_V[forbidden] = -torch.inf
        return logits_V

    given = {"logits_processors": ["my_processors:Add", never]}
    with pytest.raises(ConfigError, match="is code") as caught:
        take_code(dict(given), is_allowed=False)
    assert "allow_code=True" in caught.value.hint
    settings = dict(given)
    sources = take_code(settings, is_allowed=True)
    assert settings == {"logits_processors": ["my_processors:Add"]}
    batch, processors = Batch(), load(*sources)
    batch.change({0: {}})
    assert processors is not None
    assert processors.apply(logits(1), batch.rows(0), batch.state)[0].isneginf().nonzero().tolist() == [[forbidden]]
    with pytest.raises(ConfigError, match="cannot be pickled"):
        take_code({"logits_processors": [lambda lock=threading.Lock(): lock]}, is_allowed=True)
    with pytest.raises(ConfigError, match="neither a name"):
        take_code({"logits_processors": [3]}, is_allowed=True)
    assert take_code({"max_num_seqs": 3}, is_allowed=False) == []

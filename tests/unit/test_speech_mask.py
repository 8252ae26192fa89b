"""`SpeechMask` and the rule of timestamps, against the logits processors of `transformers`."""

import random
from typing import Any

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from octavo.kernels.native import library
from octavo.protocol.params import SamplingSpec
from octavo.protocol.speech_rules import SpeechRules
from octavo.worker_proc.sampling.sampler import Draw, Sampler, changed_logits
from octavo.worker_proc.sampling.state import SamplingState

VOCAB_SIZE, END, NO_TIMESTAMPS, FIRST = 101, 60, 69, 70
SUPPRESSED, SUPPRESSED_FIRST = (1, 2, 50), (3, END)
PROMPT = [61, 62]
TIMED = SpeechRules((*SUPPRESSED, NO_TIMESTAMPS), SUPPRESSED_FIRST, END, FIRST, 10)
PLAIN = SpeechRules(SUPPRESSED, SUPPRESSED_FIRST, END)


def expected_of(logits_V: torch.Tensor, output: list[int], rules: SpeechRules) -> torch.Tensor:
    """Return what the processors of `transformers` leave."""
    config: Any = GenerationConfig(eos_token_id=END)
    config.no_timestamps_token_id, config.max_initial_timestamp_index = NO_TIMESTAMPS, rules.max_initial_timestamp
    processors: list[Any] = [
        SuppressTokensLogitsProcessor(list(SUPPRESSED)),
        SuppressTokensAtBeginLogitsProcessor(list(SUPPRESSED_FIRST), begin_index=len(PROMPT)),
    ]
    if rules.first_timestamp:
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=len(PROMPT)))
    ids, scores = torch.tensor([PROMPT + output]), logits_V.unsqueeze(0)
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0]


def state_of(output: list[int], rules: SpeechRules, **fields: Any) -> SamplingState:
    spec = SamplingSpec(max_tokens=50, seed=1, speech_rules=rules, **fields)
    return SamplingState.prepare(spec, PROMPT, output, VOCAB_SIZE)


@pytest.mark.parametrize("rules", [TIMED, PLAIN], ids=["timestamps", "text"])
def test_tokens_that_are_left_are_those_of_transformers(rules: SpeechRules) -> None:
    """Sequences that the rules allow, drawn at random; a state that grows, and one that begins in the middle."""
    generator, native = torch.Generator().manual_seed(3), library.load()
    pick, num_timestamps = random.Random(5), 0
    for _ in range(12):
        output: list[int] = []
        grown = state_of([], rules)
        for _ in range(12):
            logits_V = 2 * torch.randn(VOCAB_SIZE, generator=generator)
            logits_V[FIRST:] += pick.choice([-6.0, 0.0, 3.0])
            expected = expected_of(logits_V, output, rules)
            left = expected.isfinite()
            for state in (grown, state_of(output, rules)):
                changed = changed_logits(logits_V, state, len(output))
                assert (changed > -1e31).tolist() == left.tolist(), output
                assert torch.equal(changed[left], logits_V[left])
                draw = Draw(state, 10, len(output))
                for sampler in (Sampler(VOCAB_SIZE), Sampler(VOCAB_SIZE, native)):
                    assert sampler.sample(logits_V.unsqueeze(0), [draw]) == [int(expected.argmax())]
            token = pick.choice(left.nonzero().flatten().tolist())
            num_timestamps += token >= FIRST
            output.append(token)
            grown.add(token)
    assert num_timestamps > 20, "or the sequences show nothing"


def test_a_long_silence_has_one_end() -> None:
    """A timestamp that ends a segment may come again at once, to begin the next one, but not a third time."""
    state = state_of([FIRST + 2, 5, FIRST + 9], TIMED)
    logits_V = torch.zeros(VOCAB_SIZE)
    logits_V[FIRST + 9] = 9.0
    assert Sampler(VOCAB_SIZE).sample(logits_V.unsqueeze(0), [Draw(state, 5, 3)]) == [FIRST + 9]
    state.add(FIRST + 9)
    assert Sampler(VOCAB_SIZE).sample(logits_V.unsqueeze(0), [Draw(state, 6, 4)])[0] < FIRST


def test_allowed_tokens_are_kept_beside_the_rules() -> None:
    state = state_of([9], PLAIN, allowed_token_ids=(1, 4, 7))
    changed = changed_logits(torch.zeros(VOCAB_SIZE), state, 1)
    assert (changed > -1e31).nonzero().flatten().tolist() == [4, 7]

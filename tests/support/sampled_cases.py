"""The cases of `kernels.sample` in the forms of its three implementations, made as a worker makes them."""

import torch

from octavo.kernels.sample import RequestTable, cases, reference
from octavo.kernels.sample.table import COLUMNS, SamplingWidths
from octavo.kernels.token_mask import pack_mask
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.sampling.columns import list_columns, scalar_columns
from octavo.worker_proc.sampling.sampler import Draw
from octavo.worker_proc.sampling.state import SamplingState

POSITION = 100


def state_of(request: cases.SamplingCase, vocab_size: int) -> SamplingState:
    """Return a worker's sampling state of a request."""
    penalties = {f"{name}_penalty": value for name, value in request.penalties.items()} if request.seen else {}
    spec = SamplingSpec(
        max_tokens=50,
        seed=request.seed,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        logit_bias=tuple(request.bias.items()),
        min_tokens=request.min_tokens,
        stop_token_ids=tuple(request.withheld),
        bad_words=tuple((token_id,) for token_id in request.bad),
        allowed_token_ids=tuple(request.allowed or ()),
        **penalties,
    )
    output = [token_id for token_id, count in request.seen.items() for _ in range(count)]
    state = SamplingState.prepare(spec, list(request.seen), output, vocab_size)
    state.first_timestamp = request.first_timestamp
    return state


def draws_of(requests: list[cases.SamplingCase], vocab_size: int) -> list[Draw]:
    """Return the draws of a host, each at a different position."""
    return [
        Draw(state_of(request, vocab_size), POSITION + index, request.num_outputs)
        for index, request in enumerate(requests)
    ]


def table_of(requests: list[cases.SamplingCase], vocab_size: int, device: torch.device) -> RequestTable:
    """Return a GPU's table with one request in each row."""
    widths = SamplingWidths(biases=4, withheld=3, bad=5, seen=8, mask_words=-(-vocab_size // 32))
    table = RequestTable.allocate(len(requests), widths, torch.device("cpu"))
    for slot, request in enumerate(requests):
        state = state_of(request, vocab_size)
        for name, values in (*scalar_columns(state).items(), *list_columns(state).items()):
            row = getattr(table, name)[slot : slot + 1].flatten()
            row[: len(values)] = torch.tensor(values, dtype=row.dtype)
        if request.allowed is not None:
            table.has_mask_S[slot] = 1
            table.allowed_SW[slot] = pack_mask(request.allowed, vocab_size)
    return RequestTable.of({name: getattr(table, name).to(device) for name in COLUMNS})


def logits_of(requests: list[cases.SamplingCase], vocab_size: int, seed: int = 0) -> torch.Tensor:
    """Return a row of logits for each request."""
    generator = torch.Generator().manual_seed(vocab_size + seed)
    spreads = torch.tensor([request.spread for request in requests]).unsqueeze(1)
    return spreads * torch.randn(len(requests), vocab_size, generator=generator)


def expected_of(rows: torch.Tensor, requests: list[cases.SamplingCase]) -> list[int]:
    """Return the tokens of the reference."""
    return [
        reference.sample(row, request, position=POSITION + index, num_outputs=request.num_outputs)
        for index, (row, request) in enumerate(zip(rows, requests, strict=True))
    ]

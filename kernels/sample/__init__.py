"""Samples the next token of every row of logits, with its request's parameters.

This package only fixes the order of other operations. Logits are changed first: bias, tokens withheld until
`min_tokens`, tokens that would complete a bad word, penalties, the mask of allowed tokens, which overrides the others,
and the timestamp rule. Greedy requests then take the most likely token; the others apply temperature, min_p, top_k,
top_p and noise. The operations are `penalties`, `token_mask`, `timestamp_mask`, `filter_logits`, `top_k` and
`gumbel_sample`. `reference.py` runs their references one after another, and every implementation must return the same
tokens.

On a CPU this is one native call; a `SampledRequest` points to memory that the caller owns. On a GPU it is
`sample_rows`, whose requests are rows of a `RequestTable`; it does not synchronize with the device. Through torch,
`octavo.worker_proc.sampling` calls the operations one by one.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require
from octavo.kernels.logprobs.memory import LogprobsMemory
from octavo.kernels.sample.native import NativeSampler as NativeSampler
from octavo.kernels.sample.native import SampledRequest as SampledRequest
from octavo.kernels.sample.table import RequestTable as RequestTable
from octavo.kernels.sample.table import SamplingWidths as SamplingWidths


def sample_rows(
    logits_RV: Tensor,
    table: RequestTable,
    slots_R: Tensor,
    positions_R: Tensor,
    num_outputs_R: Tensor,
    *,
    largest: float,
    out_R: Tensor | None = None,
    logprobs: LogprobsMemory | None = None,
    raw_RV: Tensor | None = None,
) -> Tensor:
    """Return the int64 token of every row; -1 if the largest logit is NaN or infinite.

    Args:
        logits_RV: any float type, not modified; rows are contiguous.
        table: the requests.
        slots_R: int64, the table row of each request.
        positions_R: int64, number of tokens before the drawn one.
        num_outputs_R: int64, number of output tokens among them.
        largest: logits that a request changes are clamped to this magnitude.
        out_R: int64, receives the tokens; newly allocated if `None`.
        logprobs: receives the logprobs that requests report (`table.report_S`); nothing is reported if `None`.
        raw_RV: logits of `raw` reports, if they differ from the logits that tokens are drawn from.

    Raises:
        ShapeError: slots, positions or output counts do not match the number of rows.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        slots_R.shape == positions_R.shape == num_outputs_R.shape == logits_RV.shape[:1],
        f"sample_rows: {tuple(logits_RV.shape)} logits, {tuple(slots_R.shape)} slots, "
        f"{tuple(positions_R.shape)} positions, {tuple(num_outputs_R.shape)} numbers of outputs",
    )
    implementations = {"cuda": lazy("octavo.kernels.sample.gpu", sample_rows)}
    run = choose("sample_rows", implementations, logits_RV.device)
    return run(
        logits_RV,
        table,
        slots_R,
        positions_R,
        num_outputs_R,
        largest=largest,
        out_R=out_R,
        logprobs=logprobs,
        raw_RV=raw_RV,
    )


def processed_logits(
    logits_RV: Tensor, table: RequestTable, slots_R: Tensor, num_outputs_R: Tensor, *, largest: float
) -> Tensor:
    """Return the float32 logits that `sample_rows` draws from; minus infinity for tokens that it cannot draw.

    Temperature and filters are not applied to greedy requests. A row that rules out every token is left unmasked.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": lazy("octavo.kernels.sample.gpu", processed_logits)}
    run = choose("processed_logits", implementations, logits_RV.device)
    return run(logits_RV, table, slots_R, num_outputs_R, largest=largest)


def rule_out_text(
    logits_RV: Tensor,
    table: RequestTable,
    rows_M: Tensor,
    slots_M: Tensor,
    num_outputs_M: Tensor,
    *,
    first_timestamp: int,
    largest: float,
) -> None:
    """Apply the timestamp rule (`octavo.kernels.timestamp_mask`) to some rows, in place, before `sample_rows`.

    Likelihoods are those after all other changes of the requests' logits.

    Args:
        logits_RV: float32.
        table: the requests.
        rows_M: int64, rows with the rule.
        slots_M: int64, the table row of each.
        num_outputs_M: int64, number of outputs before the drawn token.
        first_timestamp: id of the first timestamp token.
        largest: see `sample_rows`.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": lazy("octavo.kernels.sample.gpu", rule_out_text)}
    run = choose("rule_out_text", implementations, logits_RV.device)
    run(logits_RV, table, rows_M, slots_M, num_outputs_M, first_timestamp=first_timestamp, largest=largest)


def record_tokens(table: RequestTable, slots_R: Tensor, token_ids_R: Tensor, last_token_S: Tensor) -> None:
    """Store the drawn token of each row as the last token of its slot, and count it for the request's penalties.

    The table must have room for every token that a request can see. No request may be in two rows. A row without a
    token (-1) is not counted, and stores token 0, because its next step may have been launched already.

    Args:
        table: the requests.
        slots_R: int64, the table row of each request.
        token_ids_R: int64.
        last_token_S: int64, last token of each slot; overwritten.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": lazy("octavo.kernels.sample.gpu", record_tokens)}
    choose("record_tokens", implementations, token_ids_R.device)(table, slots_R, token_ids_R, last_token_S)

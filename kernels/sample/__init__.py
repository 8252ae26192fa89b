"""The next token of every row of logits, by its request's own parameters.

There is no arithmetic of its own here, only an order: logit bias, tokens withheld until `min_tokens` and those that
would complete a bad word, penalties, and the mask of the allowed tokens, which beats them all; then greedy requests
take the most likely token, and the others temperature, min_p, top_k, top_p and noise. The parts are the operations
`penalties`, `token_mask`, `filter_logits`, `top_k` and `gumbel_sample`, whose references say what is meant; through
torch, `octavo.worker_proc.sampling` calls them one by one.

On a CPU that is one native call, and a `SampledRequest` points to what the owner of a request keeps. On a GPU it is
`sample_rows`, whose requests are rows of a `RequestTable`, and which waits for nothing.
"""

from torch import Tensor

from octavo.kernels.dispatch import choose, require, when_called
from octavo.kernels.sample.native import NativeSampler as NativeSampler
from octavo.kernels.sample.native import SampledRequest as SampledRequest
from octavo.kernels.sample.table import RequestTable as RequestTable


def sample_rows(
    logits_RV: Tensor,
    table: RequestTable,
    slots_R: Tensor,
    positions_R: Tensor,
    num_outputs_R: Tensor,
    *,
    largest: float,
) -> Tensor:
    """Return the int64 token of every row; -1 where the largest logit is NaN or infinite.

    Args:
        logits_RV: any float, left as they are; the logits of a row lie side by side.
        table: the requests.
        slots_R: int64, the row of each one's request in the table.
        positions_R: int64, the number of tokens before the one that is drawn.
        num_outputs_R: int64, the number of outputs among them.
        largest: bound of the magnitude of logits that a request changes.

    Raises:
        ShapeError: there are not as many slots, positions and numbers of outputs as rows.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        slots_R.shape == positions_R.shape == num_outputs_R.shape == logits_RV.shape[:1],
        f"sample_rows: {tuple(logits_RV.shape)} logits, {tuple(slots_R.shape)} slots, "
        f"{tuple(positions_R.shape)} positions, {tuple(num_outputs_R.shape)} numbers of outputs",
    )
    implementations = {"cuda": when_called("octavo.kernels.sample.gpu", sample_rows)}
    run = choose("sample_rows", implementations, logits_RV.device)
    return run(logits_RV, table, slots_R, positions_R, num_outputs_R, largest=largest)


def processed_logits(
    logits_RV: Tensor, table: RequestTable, slots_R: Tensor, num_outputs_R: Tensor, *, largest: float
) -> Tensor:
    """Return the float32 logits that `sample_rows` draws from; minus infinity for what it cannot draw.

    Greedy requests have neither temperature nor filters. A row that may draw nothing has the logits that it has.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": when_called("octavo.kernels.sample.gpu", processed_logits)}
    run = choose("processed_logits", implementations, logits_RV.device)
    return run(logits_RV, table, slots_R, num_outputs_R, largest=largest)


def count_tokens(table: RequestTable, slots_R: Tensor, token_ids_R: Tensor) -> None:
    """Count, for the penalties of each row's request, a token that was drawn; -1 is none.

    A request has room for all tokens that it can come to see, and is in no two rows.

    Raises:
        UnsupportedDevice: no implementation for the device.
    """
    implementations = {"cuda": when_called("octavo.kernels.sample.gpu", count_tokens)}
    choose("count_tokens", implementations, token_ids_R.device)(table, slots_R, token_ids_R)

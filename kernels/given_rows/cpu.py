"""`take_given_rows` on the CPU through torch."""

from torch import Tensor


def take_given_rows(x_TD: Tensor, token_ids_T: Tensor, given_XD: Tensor, given_id: int) -> Tensor:
    """See `octavo.kernels.given_rows.take_given_rows`."""
    return given_XD[: len(x_TD)].to(x_TD.dtype).where((token_ids_T == given_id)[:, None], x_TD)


def all_given_rows(rows_T: Tensor, given_XD: Tensor) -> Tensor:
    """See `octavo.kernels.given_rows.all_given_rows`."""
    return given_XD[: len(rows_T)]

"""Reference of `take_given_rows`."""

import torch
from torch import Tensor


def take_given_rows(x_TD: Tensor, token_ids_T: Tensor, given_XD: Tensor, given_id: int) -> Tensor:
    """See `octavo.kernels.given_rows.take_given_rows`."""
    is_given = [int(token_id) == given_id for token_id in token_ids_T]
    return torch.stack([(given_XD if given else x_TD)[row].to(x_TD.dtype) for row, given in enumerate(is_given)])

"""Reads the slots of a step's requests before its first layer. Only on a GPU, where it is one launch."""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.dispatch import choose, lazy, require

PENDING = -1
"""Placeholder for a token id that the device samples and the host does not know yet: the last token of the slot."""
PADDING = -2
"""Token id of rows that no request has; their embeddings are NaN (`octavo.kernels.embedding.embeddings`)."""
DRAFTED = -16
"""Placeholder for the first draft of a slot, which the device has made and the host does not know yet; the next draft
is one less, and so on."""


def read_slots(
    token_ids_T: Tensor,
    token_slots_T: Tensor,
    last_token_S: Tensor,
    drafts_KS: Tensor,
    request_slots_R: Tensor,
    block_ids: Sequence[Tensor],
    block_tables: Sequence[Tensor],
) -> Tensor:
    """Return the token ids of a step, int64, and copy the block ids of its requests into its block tables.

    Args:
        token_ids_T: int64, `PENDING` or `DRAFTED` minus its number where the device knows the token; `PADDING` stays.
        token_slots_T: int64, the slot of each token.
        last_token_S: int64.
        drafts_KS: int64, contiguous, the drafts of each slot.
        request_slots_R: int64, the slot of each request.
        block_ids: block_ids_SP of each cache group, int32.
        block_tables: block_table_RP of each cache group, int32, overwritten.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        token_ids_T.shape == token_slots_T.shape
        and drafts_KS.shape[1:] == last_token_S.shape
        and [(len(request_slots_R), each.shape[1]) for each in block_ids] == [each.shape for each in block_tables],
        f"read_slots: {tuple(token_ids_T.shape)} tokens, {tuple(token_slots_T.shape)} slots of tokens, "
        f"{len(request_slots_R)} requests with block tables {[tuple(each.shape) for each in block_tables]}, "
        f"drafts {tuple(drafts_KS.shape)}",
    )
    implementations = {"cuda": lazy("octavo.kernels.slot_rows.gpu", read_slots)}
    run = choose("read_slots", implementations, token_ids_T.device)
    return run(token_ids_T, token_slots_T, last_token_S, drafts_KS, request_slots_R, block_ids, block_tables)


def rewind_rows(
    sampled_KS: Tensor,
    drafts_KS: Tensor,
    given_KE: Tensor,
    slots_E: Tensor,
    counts_E: Tensor,
    numbers: Sequence[Tensor],
) -> None:
    """Move the rows that follow the last draft of each request back to the first wrong draft.

    Args:
        sampled_KS: int64, contiguous; the tokens sampled in each slot at the positions of its drafts.
        drafts_KS: see `read_slots`.
        given_KE: int64, contiguous; the drafts of each request that the host knows, and `DRAFTED` minus its number for
            each other draft.
        slots_E: int64, the slot of each request.
        counts_E: int64, the number of drafts of each request.
        numbers: int64, with E numbers at least: indices and positions of the rows, from which the number of drafts from
            the first wrong one on is subtracted.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        given_KE.shape[1:] == slots_E.shape == counts_E.shape
        and sampled_KS.shape[1:] == drafts_KS.shape[1:]
        and len(given_KE) <= len(sampled_KS)
        and all(len(each) >= len(slots_E) for each in numbers),
        f"rewind_rows: {tuple(given_KE.shape)} drafts, {tuple(sampled_KS.shape)} and {tuple(drafts_KS.shape)} in "
        f"slots, {len(slots_E)} requests, {tuple(counts_E.shape)} counts, numbers {[each.shape for each in numbers]}",
    )
    implementations = {"cuda": lazy("octavo.kernels.slot_rows.gpu", rewind_rows)}
    run = choose("rewind_rows", implementations, slots_E.device)
    run(sampled_KS, drafts_KS, given_KE, slots_E, counts_E, numbers)


def advance_rows(
    positions_R: Tensor,
    slot_mapping_R: Tensor,
    slots_R: Tensor,
    limits_S: Tensor,
    block_ids_SP: Tensor,
    block_size: int,
    draws: Sequence[Tensor],
) -> Tensor:
    """Advance a step of requests with one row each to its next positions; return the number of keys each attends to.

    A request that reaches its limit stays there, and stores nothing from then on.

    Args:
        positions_R: int64, overwritten.
        slot_mapping_R: int64, overwritten; -1: the row is not stored.
        slots_R: int64, the slot of each request.
        limits_S: int64, positions that each slot has room for; 0: rows of this slot are padding, and attend to nothing.
        block_ids_SP: int32.
        block_size: token slots of a block of the cache.
        draws: positions and output counts of the draws, int64 with R numbers each; each number is increased by one.

    Raises:
        ShapeError: the shapes do not match.
        UnsupportedDevice: no implementation for the device.
    """
    require(
        positions_R.shape == slot_mapping_R.shape == slots_R.shape
        and all(each.shape == slots_R.shape for each in draws),
        f"advance_rows: {tuple(positions_R.shape)} positions, {tuple(slot_mapping_R.shape)} places in the cache, "
        f"{tuple(slots_R.shape)} slots, draws {[tuple(each.shape) for each in draws]}",
    )
    implementations = {"cuda": lazy("octavo.kernels.slot_rows.gpu", advance_rows)}
    run = choose("advance_rows", implementations, positions_R.device)
    return run(positions_R, slot_mapping_R, slots_R, limits_S, block_ids_SP, block_size, draws)

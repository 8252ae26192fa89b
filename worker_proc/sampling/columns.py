"""The columns of `kernels.sample.RequestTable` for one request: how each parameter is encoded for a GPU."""

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from octavo.kernels.logprobs.memory import IS_LOGIT, MAX_TOP, PROCESSED, RAW
from octavo.protocol.params import SamplingSpec
from octavo.worker_proc.sampling.state import SamplingState

Numbers: TypeAlias = npt.NDArray[np.generic]


def scalar_columns(state: SamplingState) -> dict[str, tuple[float, ...]]:
    """Return the numbers of a request by the names of their columns. `SlotTable` sets the mask."""
    spec, counts = state.spec, state.penalties
    columns: dict[str, tuple[float, ...]] = {
        "temperature_S": (spec.temperature,),
        "seed_S": (spec.seed - 2**64 if spec.seed >= 2**63 else spec.seed,),
        "top_k_S": (spec.top_k,),
        "top_p_S": (spec.top_p,),
        "log_min_p_S": (math.log(spec.min_p) if spec.min_p > 0.0 else -math.inf,),
        "min_tokens_S": (spec.min_tokens,),
        "num_biases_S": (state.bias_ids.numel(),),
        "num_withheld_S": (state.withheld_ids.numel(),),
        "num_bad_S": (state.bad_words.num_ids if state.bad_words else 0,),
        "has_penalties_S": (counts is not None,),
        "report_S": (_report_mode(spec),),
        "num_top_S": ((spec.logprobs or 0) if _report_mode(spec) else 0,),
    }
    if counts is not None:
        columns["penalties_S3"] = (state.repetition_penalty, spec.frequency_penalty, spec.presence_penalty)
    return columns


def is_reported_with_draw(spec: SamplingSpec) -> bool:
    """Return whether the kernels that draw can report all logprobs of a request that has any."""
    return not spec.logprob_token_ids and (spec.logprobs or 0) <= MAX_TOP


def _report_mode(spec: SamplingSpec) -> int:
    if spec.logprobs is None or not is_reported_with_draw(spec):
        return 0
    source = PROCESSED if spec.logprobs_mode.startswith("processed") else RAW
    return source | (IS_LOGIT if spec.logprobs_mode.endswith("logits") else 0)


def list_columns(state: SamplingState) -> dict[str, Numbers]:
    """Return the lists of a request by the names of their columns."""
    columns: dict[str, Numbers] = {
        "bias_ids_SB": state.bias_ids.numpy(),
        "bias_values_SB": state.bias_values.numpy(),
        "withheld_ids_SE": state.withheld_ids.numpy(),
    }
    if state.bad_words is not None:
        columns["bad_ids_SX"] = state.bad_words.ids[: state.bad_words.num_ids]
    if (counts := state.penalties) is not None:
        # Kernels count from here on, so the host's number is sent with every admission.
        columns["num_seen_S"] = np.array([counts.num_seen])
        columns["seen_ids_SL"] = counts.seen_ids[: counts.num_seen]
        columns["output_counts_SL"] = counts.output_counts[: counts.num_seen]
    return columns

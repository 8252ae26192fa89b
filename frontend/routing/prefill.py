"""Disaggregated prefill: some engines compute the prompts of requests, and others generate their tokens."""

import logging
from typing import TYPE_CHECKING

from octavo.frontend.wake_event import WakeEvent
from octavo.protocol.errors import OctavoError
from octavo.protocol.events import Finished
from octavo.protocol.kv_transfer import KVTransfer
from octavo.protocol.log import LimitedLog
from octavo.protocol.params import SamplingSpec
from octavo.protocol.requests import Submit

if TYPE_CHECKING:
    from octavo.frontend.routing.routed_link import RoutedLink

logger = logging.getLogger(__name__)
_log = LimitedLog(logger)

MIN_PREFILL_TOKENS = 128
"""Prompts with fewer uncached tokens are computed where their tokens are generated: one step suffices."""


async def prefill(routed: "RoutedLink", submit: Submit, identity: str) -> KVTransfer | None:
    """Have a prefill engine compute a prompt whose tokens another engine will generate.

    Args:
        routed: the engines.
        submit: the request.
        identity: identity of the engines for which the request was prepared.

    Returns:
        How the generating engine fetches the prompt's blocks. `None`: it computes the prompt itself, as it also does
        whenever the transfer fails.
    """
    params = submit.params
    if submit.kv_transfer is not None or not isinstance(params, SamplingSpec) or params.skip_reading_prefix_cache:
        return None
    taking, giving = routed.by_role(identity)
    if len(submit.prompt_token_ids) < MIN_PREFILL_TOKENS or not (taking and giving):
        return None
    if routed.choose(submit, taking)[1] < MIN_PREFILL_TOKENS:
        return None
    index, _ = routed.choose(submit, giving)
    alone = Submit(
        f"{submit.request_id}:prefill",
        submit.prompt_token_ids,
        SamplingSpec(max_tokens=1, seed=params.seed, temperature=0.0),
        submit.priority,
        submit.cache_salt,
        submit.adapter,
        prompt_embeds=submit.prompt_embeds,
        media=submit.media,
        kv_transfer=KVTransfer(leaves=True),
    )
    arrived = WakeEvent(routed.wake_queue)
    try:
        stream = routed.submit_to(index, alone, arrived)
        try:
            while True:
                await arrived.wait()
                arrived.clear()
                for event in stream.take():
                    if isinstance(event, Finished):
                        return event.kv_transfer
        finally:
            if not stream.is_over:
                routed.abort([alone.request_id])
    except OctavoError as error:
        _log.warning("a prompt is computed where its tokens are generated, as engine %d did not: %s", index, error)
        return None

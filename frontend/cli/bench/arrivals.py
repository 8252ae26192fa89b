"""Arrival times of a benchmark's requests, at a constant or changing rate.

The flags are those of `vllm bench serve`.
"""

import argparse
import math
import random
from collections.abc import Callable

from octavo.frontend.cli.errors import CommandError
from octavo.frontend.cli.parser import CommandParser

RAMPS = ("linear", "exponential")


def add_arrival_flags(parser: CommandParser) -> None:
    """Add the flags that describe the traffic."""
    group = parser.add_named_group("traffic", "The traffic")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X", help="requests per second; default: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution of the gaps: 1 is Poisson, less is burstier; default: 1",
    )
    group.add_argument("--ramp-up-strategy", choices=RAMPS, help="change the rate from request to request")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="X", help="rate at the first request")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="rate at the last request")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="limit on requests in flight; default: none")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="warm-up requests; at least one is sent")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="seed of prompts and arrivals; default: 0")


def arrivals_of(options: argparse.Namespace, count: int) -> list[float]:
    """Return arrival times in seconds after the first request, as the flags describe. The seed determines them.

    Raises:
        CommandError: the flags contradict each other, or a number is not positive.
    """
    return arrivals(count, _rate_of(options), options.burstiness, random.Random(options.seed))


def arrivals(count: int, rate: Callable[[float], float], burstiness: float, rng: random.Random) -> list[float]:
    """Return arrival times in seconds after the first request.

    The gaps have a gamma distribution with shape `burstiness` and mean 1 / rate.

    Args:
        count: number of requests.
        rate: requests per second as a function of the fraction of requests (0 to 1) that have arrived.
        burstiness: shape of the distribution, above 0; 1 is a Poisson process.
        rng: draws the gaps.

    Raises:
        CommandError: a number is not positive.
    """
    if not burstiness > 0:
        raise CommandError("--burstiness must be above 0")
    times = [0.0]
    for number in range(1, count):
        now = rate(number / max(1, count - 1))
        times.append(times[-1] + (0.0 if math.isinf(now) else rng.gammavariate(burstiness, 1 / (now * burstiness))))
    return times


def _rate_of(options: argparse.Namespace) -> Callable[[float], float]:
    strategy, start, end = options.ramp_up_strategy, options.ramp_up_start_rps, options.ramp_up_end_rps
    if strategy is None:
        if start is not None or end is not None:
            raise CommandError("a ramp needs a strategy", f"add --ramp-up-strategy {' or '.join(RAMPS)}")
        if not options.request_rate > 0:
            raise CommandError("--request-rate must be above 0")
        return lambda share: options.request_rate
    if not math.isinf(options.request_rate):
        raise CommandError("--request-rate and --ramp-up-strategy exclude one another", "remove one of them")
    if start is None or end is None or not (0 < start < math.inf and 0 < end < math.inf):
        raise CommandError("a ramp needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
    if strategy == "linear":
        return lambda share: start + (end - start) * share
    return lambda share: start * (end / start) ** share

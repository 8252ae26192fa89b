"""When the requests of a benchmark come: at one rate, or at one that grows. Sends nothing.

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
    """Add when requests are sent."""
    group = parser.add_named_group("traffic", "When it is sent")
    group.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="X", help="requests per second; default: all at once"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="shape of the gamma distribution between requests: 1 is Poisson, less comes in bursts; default: 1",
    )
    group.add_argument(
        "--ramp-up-strategy", choices=RAMPS, help="instead of one rate: one that changes from request to request"
    )
    group.add_argument("--ramp-up-start-rps", type=float, metavar="X", help="the rate of the first request")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="X", help="the rate of the last request")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in flight; default: no limit")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests before the clock starts; one is always"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals; default: 0")


def arrivals_of(options: argparse.Namespace, count: int) -> list[float]:
    """Return when each request comes by the flags, in seconds after the first; the same seed gives the same times.

    Raises:
        CommandError: the flags contradict one another, or a number is not positive.
    """
    return arrivals(count, _rate_of(options), options.burstiness, random.Random(options.seed))


def arrivals(count: int, rate: Callable[[float], float], burstiness: float, rng: random.Random) -> list[float]:
    """Return when each request comes, in seconds after the first.

    The gaps have a gamma distribution with shape `burstiness` and mean 1 / rate.

    Args:
        count: of requests.
        rate: requests per second, by the share of the requests (0 to 1) that have come.
        burstiness: above 0.
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
            raise CommandError("a ramp needs its form", f"add --ramp-up-strategy {' or '.join(RAMPS)}")
        if not options.request_rate > 0:
            raise CommandError("--request-rate must be above 0")
        return lambda share: options.request_rate
    if not math.isinf(options.request_rate):
        raise CommandError("--request-rate and --ramp-up-strategy exclude one another", "leave one of them out")
    if start is None or end is None or not (0 < start < math.inf and 0 < end < math.inf):
        raise CommandError("a ramp needs --ramp-up-start-rps and --ramp-up-end-rps, both above 0")
    if strategy == "linear":
        return lambda share: start + (end - start) * share
    return lambda share: start * (end / start) ** share

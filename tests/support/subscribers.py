"""Waits for subscribers of a broadcast, as a core does."""

import time

from octavo.protocol.channel import Publisher


def wait_for_subscribers(publisher: Publisher, count: int, timeout_s: float) -> None:
    """Block until `count` workers have subscribed; fail the test if they do not."""
    deadline = time.monotonic() + timeout_s
    num_subscribed = publisher.take_subscriptions()
    while num_subscribed < count:
        left_ms = int(1000 * (deadline - time.monotonic()))
        assert publisher.socket.poll(max(0, left_ms)), f"only {num_subscribed} of {count} subscribed"
        num_subscribed += publisher.take_subscriptions()

"""Calls to a server, again while what went wrong may pass by itself."""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from slime_core.errors import AccessError, SlimeError, UnavailableError
from slime_core.waits import Deadline

log = logging.getLogger(__name__)
T = TypeVar("T")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
QUIET_ATTEMPTS = 3


def retried(
    name: str,
    patience_s: float,
    action: Callable[[], T],
    caught: tuple[type[Exception], ...],
    translate: Callable[[Exception, str], SlimeError],
    renew: Callable[[], None] | None = None,
) -> T:
    """The action's result; waits longer and longer, by chance, between attempts.

    Args:
        name: URL of the object.
        patience_s: how long it may be tried again.
        caught: errors of the client.
        translate: what callers see of such an error; UnavailableError is tried again.
        renew: reads the credentials again where they are refused, once: they may have been renewed.
    """
    deadline = Deadline(name, patience_s)
    for attempt in itertools.count():
        try:
            return action()
        except caught as error:
            found = translate(error, name)
            if isinstance(found, AccessError) and renew is not None:
                renew()
                renew = None
                continue
            longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(attempt, 10))
            pause_s = random.uniform(0, longest)
            if not isinstance(found, UnavailableError) or pause_s > deadline.remaining_s:
                raise found from error
            level = logging.DEBUG if attempt < QUIET_ATTEMPTS else logging.WARNING
            log.log(level, "again: %s", found)
            time.sleep(pause_s)
    raise AssertionError("the loop above returns or raises")

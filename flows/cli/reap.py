"""`slime reap RUN [--address ADDRESS]`: ends what a run has left on a Ray cluster.

For a run on a cluster that stands already (RAY_ADDRESS, ray_address). It need not be of this
machine: --address ray://HOST:10001 reaches a cluster from elsewhere.
"""

from __future__ import annotations

import os

from slime_core.cluster.address import ANY, HOST_AND_PORT, OWN, VARIABLE
from slime_core.config.flags import FlagParser, parse
from slime_core.errors import ConfigError

CLIENT = "ray://"


def main(arguments: list[str]) -> int:
    """Ends the processes and says which; 0 also where there were none."""
    made = FlagParser(prog="slime reap", description=__doc__)
    made.add_argument("run", metavar="RUN", help="id, or its beginning")
    made.add_argument(
        "--address", help="HOST:PORT, auto or ray://HOST:10001 (default: RAY_ADDRESS, else auto)"
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks")
    options = parse(made, arguments)
    address = _reachable(options.address or os.environ.get(VARIABLE) or ANY)
    from slime_core.cluster.reaping import reap

    reaped = reap(address, options.run)
    if reaped.run_id is None:
        others = f" (it has {', '.join(reaped.others)})" if reaped.others else ""
        print(f"the Ray cluster {address} has nothing of a run {options.run}{others}")
        return 0
    if (about := reaped.about) is not None:
        print(
            f"run {reaped.run_id} (store {about.store_url}), started by {about.owner}, which was "
            f"heard {about.silent_s:.0f} s ago"
        )
    for line in reaped.ended:
        print(f"ended {line}")
    print(f"nothing of run {reaped.run_id} is on the Ray cluster {address} any more")
    return 0


def _reachable(address: str) -> str:
    """The address, once it is known that something answers there."""
    if address.startswith(CLIENT):
        from slime_core.cluster.reach import connect

        connect(address, address.removeprefix(CLIENT).rstrip("/"))
        return address
    if address == OWN or not (address == ANY or HOST_AND_PORT.fullmatch(address)):
        raise ConfigError(f"--address {address}: give HOST:PORT, {ANY} or {CLIENT}HOST:10001")
    from slime_core.cluster.reach import cluster_facts

    return cluster_facts(address).address

"""The process that runs JAX's coordination service is killed, and JAX ends the others."""

import time

from multiprocess import die

import namedshard as ns
from mp import deaths

ALONE = True
deaths.VICTIM = 0


def case_during_a_move() -> None:
    tree, (where, mapping, _) = deaths.big(), deaths.PLACES["interleaved"]
    ns.shard(tree, mapping, where)
    deaths.in_small_steps()
    deaths.at_step(3, die)
    try:
        deaths.ends(lambda: ns.shard(tree, mapping, where))
    finally:
        time.sleep(200)

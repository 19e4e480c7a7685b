"""What `freeze_startup_heap` leaves for the collector, tried in a process of its own: it cannot be undone."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import gc, weakref
from tandem.runtime.gc_tuning import freeze_startup_heap

class Node:
    pass

node = Node()
node.itself = node
is_gone = weakref.ref(node)
lasting = [[i] for i in range(50_000)]
del node
freeze_startup_heap()
after = [[i] for i in range(100)]
seen = gc.get_objects()
print(is_gone() is None, gc.get_freeze_count() > 50_000, len(seen) < 10_000, any(o is after for o in seen))
"""


def test_garbage_is_collected_and_startup_objects_are_not_visited_again() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"] * 4, done

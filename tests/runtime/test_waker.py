from __future__ import annotations

import os
import select
import threading

from tandem.runtime.waker import Waker


def is_readable(waker: Waker) -> bool:
    return bool(select.select([waker], [], [], 0)[0])


def test_it_is_readable_from_the_first_set_until_it_is_cleared() -> None:
    waker = Waker()
    assert not is_readable(waker)
    for _ in range(3):
        waker.set()
    assert is_readable(waker)
    for _ in range(2):
        waker.clear()
        assert not is_readable(waker)
    waker.close()


def test_a_thread_that_outlives_it_writes_into_no_other_file() -> None:
    waker = Waker()
    number = waker.fileno()
    waker.close()
    other = os.eventfd(0, os.EFD_NONBLOCK)  # gets the same number
    try:
        assert other == number
        thread = threading.Thread(target=waker.set)
        thread.start()
        thread.join()
        waker.clear()
        waker.close()
        assert not select.select([other], [], [], 0)[0]
    finally:
        os.close(other)

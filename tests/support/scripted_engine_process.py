"""A scripted engine in a process of its own: its streams have 200 tokens, one each 20 ms. It prints its URL."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[2])]


def main() -> None:
    from tests.support.fake_openai import fake_openai
    from tests.support.scripted_engine import Script, script_on

    with fake_openai() as fake:
        script_on(fake, Script([f"w{number} ".encode() for number in range(200)]), delay_s=0.02)
        print(fake.url, flush=True)
        signal.sigwait([signal.SIGTERM])


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    main()

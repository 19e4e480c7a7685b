"""A child of a `ProcessGroup` that does what its setup says: serve, hang (before it is ready), refuse, die.

"leave": it serves until it is told to be ready no more.
"""

from __future__ import annotations

import asyncio
import os
import signal

from tandem.runtime.process_group import ParentPipe


async def main() -> None:
    pipe = ParentPipe()
    word = pipe.setup.decode().strip()
    if word == "refuse":
        pipe.say("error: it does not want to")
        return
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    async with pipe.obeying() as orders:
        if word in ("serve", "leave"):
            pipe.say("ready")
        await (orders.leave if word == "leave" else orders.stop).wait()


if __name__ == "__main__":
    asyncio.run(main())

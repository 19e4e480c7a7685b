"""A child of a `ProcessGroup` that does what its setup says: serve, hang (before it is ready), refuse."""

from __future__ import annotations

import asyncio

from cluster.processes import ParentPipe


async def main() -> None:
    pipe = ParentPipe()
    word = pipe.setup.decode().strip()
    if word == "refuse":
        pipe.say("error: it does not want to")
        return
    stop = asyncio.Event()
    obeying = asyncio.create_task(pipe.obey(lambda _: stop.set()))
    if word == "serve":
        pipe.say("ready")
    await stop.wait()
    obeying.cancel()


if __name__ == "__main__":
    asyncio.run(main())

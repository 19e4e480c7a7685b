"""Workers that outlive their server on a joined Ray cluster: held while it lives, and claimed by the next one."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from tandem.cluster.member import Member, end_actor, first_line
from tandem.cluster.owned_actor import OrphanedWorker, WorkerClaim, names_in
from tandem.cluster.ownership import LEASE_S, RENEW_S, Owner
from tandem.cluster.process_end import ProcessIdentity, until_gone
from tandem.protocol.errors import ConfigError, ServingError, WorkerError
from tandem.protocol.messages import WIRE_VERSION

logger = logging.getLogger(__name__)

_CLAIM_TIMEOUT_S = 10.0
_GONE_TIMEOUT_S = 10.0
_WAIT_FOR_LEASE_S = LEASE_S + 4.0
_ASK_AGAIN_S = 0.5
_ITS_NAME = "a worker of an earlier server"
_NAMESPACE = b"tandem"  # in Ray's key-value store


async def adopt_orphans(owner: Owner, router_key: str, orphans: list[OrphanedWorker]) -> None:
    """Claim every worker of this service, adding each to `orphans` at once. Ends those that cannot be taken over.

    Raises ConfigError if another server holds them and still lives.
    """
    sign = await asyncio.to_thread(_sign_of_life, owner)
    names = sorted(await asyncio.to_thread(names_in, owner.namespace))
    # Two servers meet at the first one, and only one of them goes on.
    for some in (names[:1], names[1:]):
        takings = (_take(name, owner, router_key, sign, orphans) for name in some)
        for end in await asyncio.gather(*takings, return_exceptions=True):
            if end is not None:
                raise end


async def _take(name: str, owner: Owner, router_key: str, sign: bytes | None, orphans: list[OrphanedWorker]) -> None:
    """Claim one worker, or end it if it cannot be taken over. Raises ConfigError."""
    actor = await asyncio.to_thread(_actor_named, name, owner.namespace)
    claim = await _claimed(actor, name, owner, router_key, sign) if actor is not None else None
    if claim is None:
        return
    if claim.started is None:
        await _discard(OrphanedWorker(actor, claim), "it had not loaded its model")
    elif claim.wire_version != WIRE_VERSION:
        await _discard(OrphanedWorker(actor, claim), "it is of another version of Tandem")
    else:
        orphans.append(OrphanedWorker(actor, claim))


async def give_to_members(orphans: Sequence[OrphanedWorker], members: Mapping[str, Member]) -> list[OrphanedWorker]:
    """Let each member take over the worker of its name. Returns those that had been added beside them.

    Ends workers that this server would not have, or would start in another way.
    """
    added = []
    for orphan in orphans:
        claim = orphan.claim
        member = members.get(claim.config.worker_id)
        if member is not None and member.orphan is None and member.is_like(claim):
            member.adopt(orphan)
        elif member is None and claim.is_added and any(one.is_like(claim) for one in members.values()):
            added.append(orphan)
        else:
            await _discard(orphan, _why_of_no_use(claim, member, members.values()))
    return added


async def renew_leases(owner: Owner, members: Mapping[str, Member], let_go: Callable[[WorkerError], None]) -> None:
    """Show the workers, forever, that this server lives. If another one has claimed them, call `let_go` and return."""
    telling: asyncio.Future[None] | None = None
    for number in itertools.count():
        if telling is None or telling.done():
            telling = asyncio.ensure_future(asyncio.to_thread(_show_life, owner, number))
            telling.add_done_callback(lambda told: told.cancelled() or told.exception())  # the next one is soon
        actors = [member.actor for member in members.values() if member.process is not None]
        renewals = (asyncio.wait_for(actor.renew.remote(owner.name), RENEW_S) for actor in actors)
        answers = await asyncio.gather(*renewals, asyncio.sleep(RENEW_S), return_exceptions=True)
        if any(answer is False for answer in answers):
            let_go(
                WorkerError(
                    f"another server has claimed the workers of service_name={owner.service!r}: this one stood still "
                    f"for more than {LEASE_S:g} s"
                )
            )
            return


def _why_of_no_use(claim: WorkerClaim, member: Member | None, members: Collection[Member]) -> str:
    if not any(one.is_like(claim) for one in members):
        return "it was started with other settings"
    return "this server has fewer workers" if member is None else "another one has its name"


async def _discard(orphan: OrphanedWorker, why: str) -> None:
    """End a worker that is not needed here, and wait until its resources are free."""
    logger.warning("worker %s of an earlier server is ended: %s", orphan.claim.config.worker_id, why)
    end_actor(orphan.actor, _ITS_NAME)
    await _until_gone(orphan.claim.process)


async def _claimed(actor: Any, name: str, owner: Owner, router_key: str, sign: bytes | None) -> WorkerClaim | None:
    """Claim a worker; None for one that does not answer, which is ended. Waits until an old lease has run out.

    `sign` is the latest sign of life of a server of this name. If others follow, it lives, and its worker waits for
    room or hangs.
    """
    deadline_s = time.monotonic() + _WAIT_FOR_LEASE_S
    while True:
        try:
            claim: WorkerClaim | str = await asyncio.wait_for(
                actor.claim.remote(owner.name, router_key), _CLAIM_TIMEOUT_S
            )
        except (RayError, ServingError, TimeoutError) as exc:
            if isinstance(exc, TimeoutError) and (other := await _living_server(owner, sign)):
                raise _taken(owner, other) from None
            late = f"it did not answer in {_CLAIM_TIMEOUT_S:g} s, like one that waits for room"
            why = late if isinstance(exc, TimeoutError) else first_line(exc)
            logger.warning("worker %s of an earlier server cannot be taken over and is ended: %s", name, why)
            end_actor(actor, _ITS_NAME)
            return None
        if isinstance(claim, WorkerClaim):
            return claim
        if time.monotonic() > deadline_s:
            raise _taken(owner, claim)
        await asyncio.sleep(_ASK_AGAIN_S)


def _taken(owner: Owner, by: str) -> ConfigError:
    return ConfigError(
        f"service_name={owner.service!r}: another tandem serve on this Ray cluster has this name: {by}. "
        "Stop that one, or give this one another --service-name"
    )


async def _living_server(owner: Owner, sign: bytes | None) -> str:
    """A server of this name with a later sign of life than `sign`; "" = none, or it has died just now."""
    if (latest := await asyncio.to_thread(_sign_of_life, owner)) == sign:
        return ""
    await asyncio.sleep(2 * RENEW_S)
    last = await asyncio.to_thread(_sign_of_life, owner)
    return "" if last is None or last == latest else last.decode().rpartition(" ")[0]


def _show_life(owner: Owner, number: int) -> None:
    """Leave a new sign of life in Ray's key-value store: a server's workers may be unable to answer for it."""
    _internal_kv_put(f"server/{owner.service}", f"{owner.name} {number}", namespace=_NAMESPACE)


def _sign_of_life(owner: Owner) -> bytes | None:
    """The latest one of a server of this name."""
    sign: bytes | None = _internal_kv_get(f"server/{owner.service}", namespace=_NAMESPACE)
    return sign


async def _until_gone(process: ProcessIdentity) -> None:
    try:
        await asyncio.wait_for(until_gone(process), _GONE_TIMEOUT_S)
    except TimeoutError:
        logger.warning("process %d of an earlier server is not known to be gone", process.process.pid)


def _actor_named(name: str, namespace: str) -> Any:
    """The handle of an actor; None if it has ended just now."""
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def kill_all(orphans: Sequence[OrphanedWorker]) -> None:
    """End workers that were claimed. Those that have already ended are not an error."""
    for orphan in orphans:
        end_actor(orphan.actor, _ITS_NAME)

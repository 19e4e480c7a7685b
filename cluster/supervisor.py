"""Keeps the workers of a cluster alive: starts them, notices deaths, tells the others, replaces the dead.

The registry of the router stays the one place that says what a worker's state is; the supervisor reports to it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ray.exceptions import RayError
from typing_extensions import override

from tandem.cluster.adoption import adopt_orphans, give_to_members, kill_all, renew_leases
from tandem.cluster.autoscale import Autoscale
from tandem.cluster.bundles import Bundle, WorkerBundles
from tandem.cluster.draining import Drains, Timing
from tandem.cluster.joining import Joins
from tandem.cluster.member import Death, Member, MemberState, first_line
from tandem.cluster.node_requests import NodeRequests, has_left_request
from tandem.cluster.owned_actor import OrphanedWorker
from tandem.cluster.ownership import owner_of
from tandem.cluster.process_end import ProcessIdentity, until_gone
from tandem.cluster.quarantine_watch import watch_quarantines
from tandem.cluster.role_flips import RoleFlips
from tandem.cluster.worker_layout import needs_of
from tandem.protocol.config import ClusterConfig
from tandem.protocol.errors import AddRefused, ConfigError, DrainRefused, ServingError, WorkerError
from tandem.protocol.messages import PeerAddress, Role, WorkerState
from tandem.router.operator_api import WorkerManager
from tandem.runtime.background import BackgroundTasks, task_error
from tandem.runtime.daemon_threads import in_daemon_thread
from tandem.runtime.signals import wait_for_any
from tandem.scheduling.cost_model import CostModel
from tandem.scheduling.workers.registry import Registry
from tandem.scheduling.workers.workers import WorkerChange

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 15.0
_SIGTERM_GRACE_S = 30.0  # as of `tandem drain`
_ASK_AGAIN_S = 0.2
_LEFT = "it has left"
_LOST = "it died"  # told to the clients of a dead worker, if their requests do not go on with others


class Supervisor(WorkerManager):
    """All workers of one `tandem serve`. Lives in the router's event loop; `on_progress(line)` tells the user."""

    def __init__(
        self,
        config: ClusterConfig,
        registry: Registry,
        costs: CostModel,
        members: Sequence[Member],
        *,
        router_key: str = "",
        on_progress: Callable[[str], None],
        timing: Timing = Timing(),
    ) -> None:
        """`router_key`: the public key of the router that workers of our own engine obey."""
        self._config = config
        self._owner = owner_of(config)
        self._router_key = router_key
        self._registry = registry
        self._timing = timing
        self._on_progress = on_progress
        self.members = {member.worker_id: member for member in members}  # those that it looks after
        self._claimed: list[OrphanedWorker] = []
        self.bundles: WorkerBundles | None = None  # set by `start`
        self._background = BackgroundTasks()
        self.flips = RoleFlips(self.members, self._background)
        self.drains = Drains(self.members, self._background, timing, cover=self._cover)
        self.joins = Joins(self.members, self._supervise_another)
        self.autoscale = Autoscale(
            config,
            registry,
            costs,
            self.members,
            self.flips,
            self.drains,
            self._background,
            add=self._add,
        )
        self._requests = NodeRequests(config.service_name) if config.ray_address else None
        self._is_stopping = False
        self._is_hands_off = False  # Ray is dead, or the workers now belong to another server
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure.add_done_callback(lambda failure: failure.cancelled() or failure.exception())  # marks it as seen
        registry.listen(self._on_change)

    async def start(self, mean_output_tokens: Callable[[], float]) -> None:
        """Start all workers at once and return when each is connected. Raises ConfigError if one cannot be built.

        `mean_output_tokens` is what the autoscaler expects of an answer. On a joined Ray cluster, workers that an
        earlier server of this name left are taken over.
        """
        added = await self._adopt_orphans()
        taken = [*(member.orphan for member in self.members.values() if member.orphan is not None), *added]
        needs = dict(zip(self.members.values(), needs_of(self._config), strict=True))
        without = [member for member in needs if member.orphan is None]
        places = [orphan.claim.place for orphan in taken]
        self.bundles = WorkerBundles([needs[member] for member in without], self._owner, places)
        for number, member in enumerate(without):
            self._supervise(member, self.bundles.bundle(number, *needs[member]))
        for member, sizes in needs.items():
            if member.orphan is not None:
                self._supervise(member, self.bundles.at(member.orphan.claim.place, *sizes))
        for orphan in added:
            self._supervise_orphan(orphan)
        if self._owner is not None:
            renew = partial(renew_leases, self._owner, self.members, self.let_go)
            self._background.keep("the renewal of leases", renew)
        ups = asyncio.create_task(self._all_up())
        await wait_for_any(ups, self._failure)
        if self._failure.done():
            ups.cancel()
            self._failure.result()
        watch = partial(watch_quarantines, self.members.values(), self._registry, self.drains)
        self._background.keep("the watch of quarantines", watch)
        if self._requests is not None:
            if self._config.max_workers or await asyncio.to_thread(has_left_request, self._config.service_name):
                self._requests.forget()  # that of a server that was killed
            self._background.keep("the requests for nodes", self._requests.run)
        if self._config.autoscale:
            self._background.keep("the autoscaler", partial(self.autoscale.run, mean_output_tokens))

    @property
    def failure(self) -> asyncio.Future[None]:
        """Fails, with an error that says why, once nothing can be served: no worker lives or comes back."""
        return self._failure

    @property
    @override
    def autoscaler_status(self) -> dict[str, object]:
        """The autoscaler's latest decision, and the latest flips, drains and joins."""
        latest = {"flips": self.flips.latest, "departures": self.drains.latest, "arrivals": self.joins.latest}
        return self.autoscale.decision | {kind: list(records) for kind, records in latest.items()}

    @override
    async def set_role(self, worker: str, role: Role) -> dict[str, object]:
        return await self.flips.set_role(worker, role)

    @override
    async def drain(self, worker: str, grace_s: float, *, restart: bool) -> dict[str, object]:
        return self.drains.begin(worker, grace_s, restart=restart, reason="an operator asked for it")

    @override
    async def add_worker(self, role: Role) -> dict[str, object]:
        return await self._add(role, "an operator asked for it")

    def let_go(self, error: WorkerError) -> None:
        """Give up, and leave Ray and the workers as they are: they cannot be reached. Call it in the event loop."""
        self._is_stopping = self._is_hands_off = True
        self._fail(error)

    async def close(self) -> None:
        """Stop every worker this supervisor started; those that do not stop in time are killed.

        If Ray is dead, the cleanup of the whole server ends them. Those of another server are left alone.
        """
        self._is_stopping = True
        up = [] if self._is_hands_off else [member for member in self.members.values() if member.is_up]
        stops = [asyncio.ensure_future(member.stop()) for member in up]  # one that still loads is only killed
        if stops:
            await asyncio.wait(stops, timeout=_STOP_TIMEOUT_S)
        for stop in stops:
            stop.cancel()
        await asyncio.gather(self._background.close(), *stops, return_exceptions=True)
        if self._requests is not None and not self._is_hands_off:
            await self._requests.close()
        if not self._is_hands_off:
            await self._end_workers()

    @override
    async def check_integrity(self) -> dict[str, str]:
        up = {worker_id: member for worker_id, member in self.members.items() if member.is_up}
        calls = (member.check_integrity() for member in up.values())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            worker_id: f"no answer: {first_line(answer)}" if isinstance(answer, BaseException) else answer
            for worker_id, answer in zip(up, answers, strict=True)
        }

    async def _add(self, role: Role, reason: str) -> dict[str, object]:
        """Begin to start one more worker. The machine of a private Ray does not grow; a cluster may."""
        needed, bundles = self.joins.like(role).bundle, self.bundles
        assert needed is not None, "workers are supervised"
        assert bundles is not None, "they have been started"
        sizes = needed.num_cpus, needed.num_gpus
        if not self._config.ray_address and not bundles.has_room_for(*sizes, await asyncio.to_thread(bundles.room)):
            raise AddRefused(
                f"This machine has no room for another worker of {needed}: drain one first, or start the server with a "
                "smaller num_cpus_per_worker."
            )
        return self.joins.begin(role, reason=reason)

    async def _end_workers(self) -> None:
        """Let Ray end those that are left and take their bundles back, as long as it lives and answers."""
        ending = asyncio.wrap_future(in_daemon_thread(self._end_workers_now))
        ends = [ending] if self._failure.done() else [ending, self._failure]
        await wait_for_any(*ends, timeout_s=self._timing.ray_s)
        if not ending.done():
            logger.warning("Ray has not ended the workers within %g s", self._timing.ray_s)
        elif (error := ending.exception()) is not None:
            logger.error("the workers could not be ended", exc_info=error)

    def _end_workers_now(self) -> None:
        """May block for a minute if Ray does not answer."""
        for member in list(self.members.values()):
            self._kill(member)
        kill_all(self._claimed)  # including those whose members have not begun yet
        if self.bundles is not None:
            self.bundles.remove()

    async def _all_up(self) -> None:
        for member in list(self.members.values()):
            await member.until(MemberState.UP, MemberState.DRAINING)

    async def _adopt_orphans(self) -> list[OrphanedWorker]:
        """Claim what an earlier server left and give it to its members; the rest are workers that had been added."""
        if self._owner is None:
            return []
        await adopt_orphans(self._owner, self._router_key, self._claimed)
        added = await give_to_members(self._claimed, self.members)
        if num_taken := len(added) + sum(member.orphan is not None for member in self.members.values()):
            self._on_progress(f"taking over {num_taken} worker(s) that an earlier server left")
        return added

    def _supervise_orphan(self, orphan: OrphanedWorker) -> None:
        """Look after a worker that had been added to an earlier server."""
        like = self.joins.like(orphan.claim.role)
        assert self.bundles is not None, "workers are being started"
        assert like.bundle is not None, "it is supervised"
        member = like.another(orphan.claim.config.worker_id, orphan.claim.role)
        member.adopt(orphan)
        self.members[member.worker_id] = member
        self._supervise(member, self.bundles.at(orphan.claim.place, *like.bundle.sizes))

    def _supervise(self, member: Member, bundle: Bundle) -> None:
        member.supervise(bundle, self._owner)
        name = f"the supervision of {member.worker_id}"
        self._background.start(name, partial(self._keep_alive, member), self._crashed)

    def _supervise_another(self, member: Member, like: Member) -> None:
        """Look after one more worker, which needs the same as `like`."""
        assert self.bundles is not None, "workers have been started"
        assert like.bundle is not None, "it is supervised"
        bundle = self.bundles.another(like.bundle.num_cpus, like.bundle.num_gpus)
        self.members[member.worker_id] = member
        self._supervise(member, bundle)
        self._request_nodes()

    def _forget(self, member: Member) -> None:
        """A worker is gone for good."""
        if member.has_served:
            self._on_progress(f"{member.role} worker {member.worker_id} has left")
        else:
            self.joins.withdraw(member, member.given_up)
            self._on_progress(f"{member.role} worker {member.worker_id} was not added: {member.given_up}")
        del self.members[member.worker_id]
        member.forget()
        if self.bundles is not None and member.bundle is not None and not self._is_hands_off:
            self.bundles.give_back(member.bundle)
        self._request_nodes()

    def _request_nodes(self) -> None:
        """Ask a Ray cluster for room for all workers while an added one has none; otherwise for nothing."""
        if self._requests is None:
            return
        waits = any(one.is_added and one.process is None and not one.has_served for one in self.members.values())
        bundles = [one.bundle for one in self.members.values() if one.bundle is not None]
        self._requests.want([bundle.resources for bundle in bundles] if waits else [])

    async def _keep_alive(self, member: Member) -> None:
        """Start the worker; when it dies, tell everyone and start it again, until it is to leave."""
        while not (self._is_stopping or self._failure.done()):
            if member.state is MemberState.LEAVING:
                self._forget(member)
                return
            death = await self._live(member)
            if self._is_stopping:
                return
            gone = await self._handle_death(member, _LEFT if death.before is MemberState.DRAINING else _LOST)
            pause = member.pause(self._delay_after(member, death))
            await asyncio.gather(pause, asyncio.wait({gone}, timeout=self._timing.gone_s))

    async def _live(self, member: Member) -> Death:
        """Run one process of the worker. Returns when its death is reported or it is given up."""
        death = member.begin()
        running = asyncio.create_task(self._run(member))
        try:
            await wait_for_any(death, running)
            if running.done():
                if (error := task_error(running)) is not None:  # a bug; a new process may do better
                    logger.error("worker %s is given up", member.worker_id, exc_info=error)
                member.die(running.result() if error is None else first_line(error))
        finally:
            running.cancel()
            await asyncio.wait({running})
        return death.result()

    async def _run(self, member: Member) -> str:
        """Start the worker and wait for what Ray says of its end; returns that."""
        try:
            await self._bring_up(member)
            return await member.ended(partial(self._asked_to_leave, member))
        except (RayError, ServingError, TimeoutError) as exc:
            return first_line(exc)

    async def _bring_up(self, member: Member) -> None:
        await member.start(on_no_room=self._no_room, on_placed=self._request_nodes)
        self.drains.note_up(member)
        self.joins.note_up(member)
        self._cover()
        self._on_progress(f"{member.role} worker {member.worker_id} is ready")

    async def _handle_death(self, member: Member, reason: str) -> asyncio.Task[None]:
        """Fail a dead worker's requests now, and free the blocks it could still write to once its process has exited.

        The task ends when the process is known to be gone.
        """
        self._kill(member)
        process, address = member.release()
        await member.leave(reason)
        name = f"the end of {member.worker_id}"
        gone = self._background.keep(name, partial(_prove_gone, process))
        if address is not None:
            self._background.keep(f"telling of {name}", partial(self._tell_of_death, address, gone))
        return gone

    def _delay_after(self, member: Member, death: Death) -> float:
        """Decide what follows a death: another start after these seconds, or the end of the worker or the service."""
        if death.before is MemberState.DRAINING:
            if member.state is MemberState.DOWN:
                self._on_progress(f"{member.role} worker {member.worker_id} has left")
            self._cover()
        elif not member.has_served:  # its first start failed, or it was given up
            if not member.is_added:
                self._fail(ConfigError(f"worker {member.worker_id} did not start: {death.reason}"))
            elif member.state is MemberState.DOWN:
                member.give_up(death.reason)
        elif member.state is MemberState.DOWN:
            return self._delay_after_failure(member, death)
        return 0.0

    def _delay_after_failure(self, member: Member, death: Death) -> float:
        """Count the death of a worker that has served, and let others cover for it until it starts again."""
        budget = member.restarts
        budget.died(death.served_s)
        logger.log(logging.ERROR if budget.is_used_up else logging.WARNING, "%s", _death_report(member, death))
        if all(other.restarts.is_used_up and not other.is_up for other in self.members.values()):
            died = f"{member.worker_id} died {budget.num_deaths} times, at last: {death.reason}"
            self._fail(WorkerError(f"no worker is left that could serve: {died}"))
            return 0.0
        self._cover()
        return budget.delay_s

    def _asked_to_leave(self, member: Member) -> None:
        """A worker's process got SIGTERM: it leaves as if it had been drained, and a new one takes its place."""
        self._background.start(f"the end of {member.worker_id}", partial(self._let_leave, member, member.actor))

    async def _let_leave(self, member: Member, actor: Any) -> None:
        """Let a worker leave at once, or after the flip that it is in."""
        while member.actor is actor and member.state is MemberState.UP:
            try:
                self.drains.begin(member.worker_id, _SIGTERM_GRACE_S, restart=True, reason="it got SIGTERM")
            except DrainRefused:
                await asyncio.sleep(_ASK_AGAIN_S)

    def _no_room(self, line: str) -> None:
        """A worker waits for a node: tell the user, and let others do its work."""
        self._on_progress(line)
        self._cover()

    def _cover(self) -> None:
        """Let a prefill worker do both once the last decode worker is gone, or where none will come.

        It goes back once another one can decode. If its pool has a worker meanwhile, the autoscaler decides.
        """
        up = [member for member in self.members.values() if member.state is MemberState.UP]
        down = [member for member in self.members.values() if member not in up]
        decoders = [member for member in up if member.role_to_be is not Role.PREFILL]
        coming = [member for member in down if not (member.restarts.is_used_up or member.waits_for_room)]
        is_one_coming = any(member.role is not Role.PREFILL for member in coming)
        is_missed = any(member.role is not Role.PREFILL and member.has_been_up for member in down)
        if up and not decoders and up[0].can_cover and (is_missed or not is_one_coming):
            up[0].cover()
            why = "no decode worker is left: it serves alone until one is back"
            self.flips.flip(up[0].worker_id, Role.DECODE, why)
        is_home_new = any(member.role is Role.PREFILL and not member.has_been_up for member in coming)
        for covering in [] if is_home_new else [member for member in decoders if member.home_role is not None]:
            if len(decoders) == 1:
                break
            home = covering.end_cover()
            if len(decoders) == len(up) or not self._config.autoscale:
                decoders.remove(covering)
                self.flips.flip(covering.worker_id, home, f"a decode worker is back: it is a {home} worker again")

    async def _tell_of_death(self, address: PeerAddress, gone: asyncio.Task[None]) -> None:
        # Workers that start later never had anything to do with it.
        others = [(other, other.address) for other in self.members.values() if other.is_up]
        await asyncio.gather(*(other.tell(epoch, "peer_given_up", address) for other, epoch in others))
        await asyncio.shield(gone)
        await asyncio.gather(*(other.tell(epoch, "peer_died", address) for other, epoch in others))

    def _kill(self, member: Member) -> None:
        if not self._is_hands_off:
            member.kill()

    def _on_change(self, change: WorkerChange) -> None:
        """Report the death of a process that the router has given up, because it is silent or stuck."""
        worker, member = change.worker, self.members.get(change.worker.worker_id)
        if worker.state is not WorkerState.DEAD or self._is_stopping or member is None or member.address is None:
            return
        if member.address.process == worker.card.address.process:
            member.die(change.reason)

    def _crashed(self, exc: Exception) -> None:
        """End the service: workers are no longer supervised."""
        self._fail(WorkerError(f"the supervision of a worker failed, see the log: {first_line(exc)}"))

    def _fail(self, error: ServingError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)


async def _prove_gone(process: ProcessIdentity | None) -> None:
    if process is not None:
        await until_gone(process)


def _death_report(member: Member, death: Death) -> str:
    died = f"(pid {member.pid}) died" if death.before is not MemberState.STARTING else "did not start"
    budget = member.restarts
    count = f"{budget.num_deaths} of {budget.max_restarts}"
    if budget.is_used_up:
        count = f"more often than max_restarts={budget.max_restarts} allows, so later each time"
    then = f"starting it again in {budget.delay_s:g} s ({count})"
    return f"worker {member.worker_id} {died}: {death.reason}; {then}"

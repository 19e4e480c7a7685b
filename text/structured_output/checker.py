"""Checks the constraints that requests put on their output, before any worker sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from tandem.protocol.digest import EVERYONE, CacheScope
from tandem.protocol.errors import InternalError, Overloaded
from tandem.protocol.frames import framed, next_frame
from tandem.protocol.grammar import GrammarError
from tandem.protocol.python_module import module_command, module_environment
from tandem.protocol.sampling import MAX_GRAMMAR_CHARS
from tandem.text.structured_output.compile_process import MAX_CPU_S, Compiled, Question
from tandem.text.structured_output.constraint import Constraint

MAX_WAITING = 32  # new constraints of one tenant
MAX_ALL_WAITING = 256  # new constraints of all tenants
MAX_KEPT_CHARS = 1 << 24  # characters of kept constraints and their grammars
START_S, ANSWER_S = 60.0, 20.0  # deadlines; an answer takes `MAX_CPU_S` of CPU time at most
_MODULE = "tandem.text.structured_output.compile_process"


@dataclass(eq=False, slots=True)
class _Tenant:
    """A tenant whose constraints wait."""

    num_waiting: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the one constraint that waits for the process


class _Key(NamedTuple):
    """A constraint within a scope."""

    scope: CacheScope
    kind: str
    text: str


class GrammarChecker:
    """Compiles each new constraint in a process of its own, tenants in turn. Results are kept, for requests of the same
    scope: how long a constraint takes would tell whether somebody else has used it.
    """

    def __init__(self, tokenizer_json: Callable[[], str]) -> None:
        self._tokenizer_json = tokenizer_json
        self._known: OrderedDict[_Key, Compiled] = OrderedDict()
        self._num_kept_chars = 0
        self._tenants: dict[str, _Tenant] = {}
        self._lock = asyncio.Lock()  # the process is asked one question at a time
        self.process: asyncio.subprocess.Process | None = None  # compiles; started for the first constraint
        self._task: asyncio.Task[Compiled] | None = None  # asks the process, and holds the lock

    async def grammar(
        self,
        constraint: Constraint,
        tenant: str,
        note_cpu: Callable[[float], None] | None = None,
        scope: CacheScope = EVERYONE,
    ) -> str:
        """The constraint's grammar, for `SamplingParams.grammar`. Raises `GrammarError`, `Overloaded`.

        `note_cpu` gets the seconds of CPU time that compiling it takes, if it is not known yet.
        """
        kind, text, param = constraint
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                f"'{param}' has {len(text)} characters; at most {MAX_GRAMMAR_CHARS} are allowed.", param=param
            )
        key = _Key(scope, kind, text)
        compiled = self._known.get(key)
        if compiled is None:
            compiled = await self._compile_in_turn(key, tenant)
            if note_cpu is not None:
                note_cpu(compiled.cpu_s)
        self._known.move_to_end(key)
        if compiled.error:
            raise GrammarError(f"Invalid value for '{param}': {compiled.error}", param=param)
        return compiled.grammar

    @property
    def num_waiting(self) -> int:
        """Constraints that are being compiled, or wait for that."""
        return sum(one.num_waiting for one in self._tenants.values())

    @property
    def num_kept_chars(self) -> int:
        """Characters of the kept results."""
        return self._num_kept_chars

    def keeps(self, kind: str, text: str) -> bool:
        """Whether the result for a constraint is kept for everyone."""
        return _Key(EVERYONE, kind, text) in self._known

    def check_integrity(self) -> None:
        """Assert that the account of characters is right, and that no tenant is kept that waits for nothing."""
        kept = sum(len(text) + len(one.grammar) for (_, _, text), one in self._known.items())
        assert self._num_kept_chars == kept, f"{self._num_kept_chars} characters are counted, {kept} are kept"
        assert all(one.num_waiting for one in self._tenants.values()), f"{self._tenants}"

    async def close(self) -> None:
        """End the process. Requests must have ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._end_process()

    async def _end_process(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _compile_in_turn(self, key: _Key, tenant: str) -> Compiled:
        async with self._turn_of(tenant):
            await self._lock.acquire()
            # A request may leave while its constraint is compiled. The process goes on: starting another one takes
            # longer than any constraint. So the task holds the lock until the answer comes.
            self._task = asyncio.create_task(self._compile_and_release(key))
            return await asyncio.shield(self._task)

    async def _compile_and_release(self, key: _Key) -> Compiled:
        try:
            known = self._known.get(key)  # another request may have asked for the same
            return known or self._keep(key, await self._compile(key.kind, key.text))
        finally:
            self._lock.release()

    @contextlib.asynccontextmanager
    async def _turn_of(self, name: str) -> AsyncIterator[None]:
        """One of a tenant's constraints at a time. Locks are fair: a tenant waits for at most one of each other."""
        tenant = self._tenants.get(name) or _Tenant()
        if tenant.num_waiting >= MAX_WAITING or self.num_waiting >= MAX_ALL_WAITING:
            message = (
                f"New grammars are being checked already: {tenant.num_waiting} of this tenant (at most {MAX_WAITING}), "
            )
            raise Overloaded(
                f"{message}{self.num_waiting} of all (at most {MAX_ALL_WAITING}).", retry_after_s=MAX_CPU_S
            )
        self._tenants[name] = tenant
        tenant.num_waiting += 1
        try:
            async with tenant.lock:
                yield
        finally:
            tenant.num_waiting -= 1
            if not tenant.num_waiting:
                del self._tenants[name]

    def _keep(self, key: _Key, compiled: Compiled) -> Compiled:
        self._known[key] = compiled
        self._num_kept_chars += len(key.text) + len(compiled.grammar)
        while self._num_kept_chars > MAX_KEPT_CHARS:
            old_key, old = self._known.popitem(last=False)
            self._num_kept_chars -= len(old_key.text) + len(old.grammar)
        return compiled

    async def _compile(self, kind: str, text: str) -> Compiled:
        """Compile a constraint. Raises `Overloaded` if it is not known whether the constraint can be used."""
        try:
            process = self.process
            if process is None or process.returncode is not None:
                process = await self._start_process()
            async with asyncio.timeout(ANSWER_S):
                frame = await _ask(process, msgspec.msgpack.encode(Question(kind, text)))
            compiled = msgspec.msgpack.decode(frame, type=Compiled)
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError, TimeoutError):
            await self._end_process()
            compiled = Compiled()
        if not (compiled.grammar or compiled.error):  # this machine's fault: another time it may be compiled
            raise Overloaded("The grammar could not be checked now; try again.", retry_after_s=MAX_CPU_S)
        if len(compiled.grammar) > MAX_GRAMMAR_CHARS:
            error = f"Its grammar has {len(compiled.grammar)} characters, over {MAX_GRAMMAR_CHARS}."
            return Compiled(error=error, cpu_s=compiled.cpu_s)
        return compiled

    async def _start_process(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        self.process = process = await asyncio.create_subprocess_exec(
            *module_command(_MODULE), env=module_environment(), stdin=pipe, stdout=pipe
        )
        try:
            async with asyncio.timeout(START_S):
                await _ask(process, msgspec.msgpack.encode(self._tokenizer_json()))
        except (asyncio.IncompleteReadError, BrokenPipeError, ConnectionResetError, TimeoutError) as exc:
            await self._end_process()
            raise InternalError("The process that checks grammars did not start; see the router's log.") from exc
        return process


async def _ask(process: asyncio.subprocess.Process, frame: bytes) -> bytes:
    """Send a frame and read the answer's."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(framed(frame))
    await process.stdin.drain()
    return await next_frame(process.stdout)

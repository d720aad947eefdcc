"""Slots: who gets one, who waits, and what happens to those that wait when the server ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_histories import FakeEngine

from kvmem_llama.server.errors import ApiError
from kvmem_llama.server.flags import ServerOptions
from kvmem_llama.server.slots import SlotPool
from kvmem_llama.settings import Settings


class Request:
    """A request in a slot, until it is told to end."""

    def __init__(self, pool: SlotPool | None = None) -> None:
        self.pool = pool
        self.slot: Any = None
        self.is_ended = False

    def end(self) -> None:
        self.is_ended = True
        if self.pool is not None:
            self.pool.release(self.slot)

    def describe(self) -> dict[str, Any]:
        return {"id_task": 7}


@pytest.fixture
def pool(tmp_path: Path) -> SlotPool:
    return made(tmp_path)


def made(folder: Path, **options: Any) -> SlotPool:
    settings = Settings(data_dir=str(folder), n_parallel=2)
    state = SimpleNamespace(
        engine=FakeEngine(settings),
        metrics=SimpleNamespace(),
        options=ServerOptions(**options),
        facts=SimpleNamespace(n_ctx=512),
    )
    return SlotPool(cast(Any, state))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_first_come_first_served(pool: SlotPool) -> None:
    async def work() -> None:
        one, two = await pool.acquire(), await pool.acquire()
        assert {one.id, two.id} == {0, 1}
        order: list[int] = []

        async def later(number: int) -> None:
            slot = await pool.acquire()
            order.append(number)
            pool.release(slot)

        tasks = [asyncio.create_task(later(i)) for i in range(5)]
        await settle()
        assert pool.load() == (2, 5)
        pool.release(one)
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2, 3, 4]
        pool.release(two)
        assert (pool.load(), pool.n_idle) == ((0, 0), 2)

    run(work())


def test_who_wants_one_slot_waits_for_that_one(pool: SlotPool) -> None:
    async def work() -> None:
        zero, one = await pool.acquire(0), await pool.acquire(1)
        waiting = asyncio.create_task(pool.acquire(1))
        anybody = asyncio.create_task(pool.acquire())
        await settle()
        pool.release(zero)
        assert (await anybody).id == 0
        assert not waiting.done()
        pool.release(one)
        assert (await waiting).id == 1

    run(work())


def test_a_slot_that_is_not_there_means_any(pool: SlotPool) -> None:
    async def work() -> None:
        assert (await pool.acquire(99)).id in (0, 1)

    run(work())


def test_who_gives_up_waiting_takes_nothing_with_him(pool: SlotPool) -> None:
    async def work() -> None:
        slots = [await pool.acquire() for _ in range(2)]
        waiting = asyncio.create_task(pool.acquire())
        await settle()
        waiting.cancel()
        await settle()
        assert pool.load() == (2, 0)
        late = asyncio.create_task(pool.acquire())
        await settle()
        pool.release(slots[0])  # given to `late` in the loop's next round,
        late.cancel()  # who does not want it any more by then
        await settle()
        assert pool.n_idle == 1

    run(work())


def test_too_many_are_sent_away_and_so_are_those_that_wait_too_long(tmp_path: Path) -> None:
    pool = made(tmp_path, max_queue=1, timeout=1)

    async def work() -> None:
        for _ in range(2):
            await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await settle()
        with pytest.raises(ApiError, match="too many") as caught:
            await pool.acquire()
        assert caught.value.code == 503
        with pytest.raises(ApiError, match="no slot was free in time"):
            await waiting

    run(work())


def test_the_parts_of_one_request_count_as_one(tmp_path: Path) -> None:
    pool = made(tmp_path, max_queue=1)

    async def work() -> None:
        first = [await pool.acquire() for _ in range(2)]
        request = object()
        parts = [asyncio.create_task(pool.acquire(request=request)) for _ in range(20)]
        await settle()
        with pytest.raises(ApiError, match="too many"):
            await pool.acquire()
        for slot in first:
            pool.release(slot)
        for part in parts:
            pool.release(await part)

    run(work())


def test_the_end_of_the_server_is_told_to_all(pool: SlotPool) -> None:
    async def work() -> None:
        request = Request(pool)
        request.slot = await pool.acquire()
        request.slot.running = request
        other = await pool.acquire()
        waiting = asyncio.create_task(pool.acquire())
        await settle()
        pool.release(other)
        assert (await waiting).id == other.id
        more = [asyncio.create_task(pool.acquire()) for _ in range(2)]
        await settle()
        pool.release(await waiting)
        await settle()
        ending = asyncio.create_task(asyncio.to_thread(pool.stop, 5.0))
        done = await asyncio.gather(*more, return_exceptions=True)
        assert sum(isinstance(one, ApiError) for one in done) == 1
        for one in done:
            if not isinstance(one, BaseException):
                pool.release(one)
        await ending
        assert request.is_ended
        with pytest.raises(ApiError, match="stopping"):
            await pool.acquire()

    run(work())


def test_what_a_slot_has_done_last_is_shown(pool: SlotPool) -> None:
    async def work() -> None:
        slot = await pool.acquire(0)
        slot.running = Request()
        shown: list[dict[str, Any]] = pool.describe()
        assert (shown[0]["is_processing"], shown[0]["id_task"], shown[0]["n_ctx"]) == (True, 7, 512)
        assert "id_task" not in shown[1]
        pool.release(slot)
        assert (pool.describe()[0]["is_processing"], pool.describe()[0]["id_task"]) == (False, 7)
        assert pool.describe()[0]["next_token"][0]["n_remain"] == -1

    run(work())

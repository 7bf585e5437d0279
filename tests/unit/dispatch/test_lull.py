from __future__ import annotations

import asyncio

from streams.dispatch.lull import AT_ONCE, MOST_S, Lull


async def test_a_single_answer_hardly_waits() -> None:
    lull = Lull()
    waiting = asyncio.ensure_future(lull.wait())
    for _ in range(6):
        await asyncio.sleep(0)
    assert waiting.done()


async def test_answers_of_a_burst_are_read_when_all_have_come() -> None:
    lull, order = Lull(), list[str]()

    async def answer(name: str) -> None:
        order.append(f"{name} came")
        await lull.wait()
        order.append(f"{name} read")

    answers = []
    for name in "abcd":
        answers.append(asyncio.ensure_future(answer(name)))
        await asyncio.sleep(0)  # each a turn of the loop after the one before
    await asyncio.gather(*answers)
    assert order == [*(f"{name} came" for name in "abcd"), *(f"{name} read" for name in "abcd")]


async def test_answers_that_never_stop_coming_are_read_all_the_same() -> None:
    lull, loop = Lull(), asyncio.get_running_loop()
    first = asyncio.ensure_future(lull.wait())
    until = loop.time() + MOST_S
    others = []
    while not first.done():
        others.append(asyncio.ensure_future(lull.wait()))
        await asyncio.sleep(0)
    assert loop.time() >= until
    await asyncio.gather(*others)


async def test_many_are_read_in_parts_and_one_that_is_given_up_holds_nobody_up() -> None:
    lull = Lull()
    answers = [asyncio.ensure_future(lull.wait()) for _ in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    answers[0].cancel()
    seen = set()
    while not all(answer.done() for answer in answers):
        await asyncio.sleep(0)
        seen.add(sum(answer.done() for answer in answers) // AT_ONCE)
    assert {1, 2} <= seen

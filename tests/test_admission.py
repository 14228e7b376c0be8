"""Admission: bounded, whole requests only, and fair between keys and between requests."""

import asyncio
from collections.abc import Sequence

import pytest

from adapter.admission import Door, Party, Turns
from adapter.errors import UnavailableError


def test_prompts_are_let_in_up_to_the_seats_and_the_queue() -> None:
    door = Door(max_num_seqs=2, max_queued=3)
    with door.admit(5), pytest.raises(UnavailableError, match="queue of 3 prompts"), door.admit(1):
        pass


def test_a_request_whose_prompts_do_not_all_fit_is_refused_whole() -> None:
    door = Door(max_num_seqs=2, max_queued=3)
    with door.admit(3):
        with pytest.raises(UnavailableError), door.admit(3):
            pass
        assert door.num_inside == 3
        with door.admit(2):
            assert door.num_inside == 5


def test_a_place_is_free_again_when_its_request_ends_however_it_ends() -> None:
    door = Door(max_num_seqs=1, max_queued=0)
    with pytest.raises(ZeroDivisionError), door.admit(1):
        raise ZeroDivisionError
    assert door.num_inside == 0


async def served(turns: Turns, asked: Sequence[tuple[str, Party]]) -> list[str]:
    """The order in which prompts, who all wait from the start, get their turns."""
    order: list[str] = []

    async def prompt(name: str, party: Party) -> None:
        async with turns.turn(party):
            order.append(name)
            await asyncio.sleep(0)

    async with turns.turn(Party()):
        tasks = [asyncio.create_task(prompt(name, party)) for name, party in asked]
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    return order


async def test_a_single_prompt_does_not_wait_for_the_whole_of_a_batch() -> None:
    big, single = Party(), Party()
    asked = [(f"big{i}", big) for i in range(5)] + [("single", single)]
    assert await served(Turns(1), asked) == ["big0", "single", "big1", "big2", "big3", "big4"]


async def test_the_prompts_of_one_request_keep_their_order() -> None:
    party = Party()
    assert await served(Turns(1), [(str(i), party) for i in range(6)]) == list("012345")


async def test_keys_take_turns_whatever_the_number_of_their_requests() -> None:
    asked = [(f"a{i}", Party("a")) for i in range(4)] + [("b0", Party("b")), ("b1", Party("b"))]
    assert await served(Turns(1), asked) == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_no_more_turns_are_held_than_there_are() -> None:
    turns, held, most = Turns(3), 0, 0

    async def prompt() -> None:
        nonlocal held, most
        async with turns.turn(Party()):
            held += 1
            most = max(most, held)
            await asyncio.sleep(0)
            held -= 1

    await asyncio.gather(*(prompt() for _ in range(20)))
    assert most == 3


async def test_one_who_leaves_the_line_costs_nobody_a_turn() -> None:
    turns, party = Turns(1), Party()

    async def prompt() -> None:
        async with turns.turn(party):
            pass

    async with turns.turn(party):
        tasks = [asyncio.create_task(prompt()) for _ in range(3)]
        await asyncio.sleep(0)
        assert turns.num_waiting == 3
        tasks[0].cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks[1:])
    async with asyncio.timeout(1), turns.turn(party):
        assert turns.num_waiting == 0


async def test_one_who_leaves_as_its_turn_comes_passes_it_on() -> None:
    turns = Turns(1)
    reached = asyncio.Event()

    async def prompt() -> None:
        async with turns.turn(Party()):
            reached.set()

    async with turns.turn(Party()):
        first = asyncio.create_task(prompt())
        second = asyncio.create_task(prompt())
        await asyncio.sleep(0)
    first.cancel()  # its turn was given to it a moment ago
    await asyncio.wait_for(reached.wait(), 1)
    await asyncio.gather(first, second, return_exceptions=True)

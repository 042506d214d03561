"""A crowd against the real thing: gateways, storytellers and Redis as processes, with a tiny model."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from loadbots.campaign import fine
from tests.checkpoints import make_checkpoint
from tests.loadbots.crowds import Ended, command, row
from tests.processes import Gateway, Stack, Storyteller, metric, stack, wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways and a storyteller."""
    folder = tmp_path_factory.mktemp("stack")
    with stack(folder, make_checkpoint(folder / "model")) as here:
        here.gateway()
        here.gateway()
        here.storyteller(STORYTELLER_THREADS="1")
        yield here


def addresses(running: Stack) -> list[str]:
    return [process.url for process in running.processes if isinstance(process, Gateway)]


def pages(running: Stack) -> list[str]:
    services = [process for process in running.processes if isinstance(process, Gateway | Storyteller)]
    return [f"http://127.0.0.1:{service.metrics_port}" for service in services]


async def send(running: Stack, *flags: str) -> Ended:
    return await command("--url", *addresses(running), "--reconcile", *pages(running), "--max-tokens", "30", *flags)


async def test_the_bots_counts_are_the_services_counts(running: Stack) -> None:
    ended = await send(running, "--players", "1", "4", "16", "--stories", "2")
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert [found["stories"] for found in ended.rows] == [2, 8, 32]
    assert all(found["verified"] == found["stories"] and found["differences"] == [] for found in ended.rows)


async def test_chaos_leaves_every_story_whole(running: Stack) -> None:
    ended = await send(running, "--players", "16", "--stories", "2", "--chaos", "drop=0.4,cancel=0.2,storm")
    assert ended.code == 0, ended.out
    (found,) = ended.rows
    assert (found["stories"], found["broken_stories"], found["lost_frames"], found["repeated_frames"]) == (32, 0, 0, 0)
    assert found["resumed"] >= 5
    assert found["differences"] == []


async def test_several_processes_and_an_open_loop_reconcile_too(running: Stack) -> None:
    ended = await send(running, "--arrival", "gamma", "--rate", "20", "--duration", "2s", "--processes", "2",
                       "--slo", "first_text=20s")  # fmt: skip
    assert (ended.code, ended.err) == (0, ""), ended.out
    assert ended.rows[0]["slo_kept"] == 1


async def test_our_own_openai_door_is_measured_with_the_same_ruler(running: Stack) -> None:
    gateway = next(process for process in running.processes if isinstance(process, Gateway))
    for flags in (("--ignore-end",), ("--endpoint", "completions", "--chaos", "cancel=0.3")):
        ended = await command("--openai", f"{gateway.http}/v1", "--players", "4", "--stories", "2", "--max-tokens",
                              "20", "--reconcile", *pages(running), *flags)  # fmt: skip
        assert (ended.code, ended.err) == (0, ""), ended.out
        (found,) = ended.rows
        assert (found["stories"], found["broken_stories"], found["differences"]) == (8, 0, [])
        assert found["tokens"] == 160 or found["cancelled"]


async def test_players_are_let_in_by_keys_that_only_variables_carry(running: Stack) -> None:
    key, other = "a key of more than thirty-two bytes, for tests", "another key of more than thirty-two bytes"
    gateway = running.gateway(GATEWAY_AUTH_KEY=key, GATEWAY_API_KEYS="bots,others")
    crowd = ("--stories", "1", "--max-tokens", "5")
    game, door = ("--url", gateway.url, *crowd), ("--openai", f"{gateway.http}/v1", *crowd)
    let_in = {**os.environ, "LOADBOTS_AUTH_KEY": key, "LOADBOTS_API_KEY": "bots"}
    kept_out = {**os.environ, "LOADBOTS_AUTH_KEY": other, "LOADBOTS_API_KEY": "nobody"}
    for flags, said in ((game, "hello was answered with unauthorized"), (door, "expected 200, got 401")):
        inside, outside = await command(*flags, env=let_in), await command(*flags, env=kept_out)
        assert (inside.code, inside.err) == (0, "")
        assert (outside.code, outside.out) == (1, "")
        assert said in outside.err
        assert outside.err.count("\n") == 1


async def test_a_killed_gateway_costs_no_word(running: Stack) -> None:
    other, doomed = addresses(running)[0], running.gateway()
    playing = asyncio.create_task(
        row(other, "--url", doomed.url, other, "--players", "8", "--stories", "6", "--max-tokens", "60")
    )
    await asyncio.to_thread(heard_something, doomed)
    doomed.kill()
    running.processes.remove(doomed)
    found = await playing
    assert fine([found], None), found["faults"]
    assert found["stories"] == 48
    assert found["resumed"] >= 1


def heard_something(gateway: Gateway) -> None:
    wait_until(
        lambda: (
            metric(gateway.metrics(), "gateway_stories_total") > 0
            and metric(gateway.metrics(), "gateway_listeners") > 0
        ),
        "stories at the gateway",
    )

"""What the bots believe: nothing. A peer that breaks one promise at a time is seen through, and only then."""

from __future__ import annotations

import pytest

from loadbots.campaign import fine
from tests.loadbots.crowds import play, row
from tests.loadbots.peer import peer

CROWD = ("--players", "4", "--stories", "2")


async def test_a_faithful_peer_is_found_faithful() -> None:
    async with peer() as here:
        campaign = await play(here.url, "--players", "1", "4", "--stories", "2")
    assert fine(campaign.rows, None)
    assert [found["players"] for found in campaign.rows] == [1, 4]
    for found in campaign.rows:
        assert found["stories"] == found["verified"] == 2 * found["players"]
        assert found["tokens"] == 8 * found["stories"]
        assert found["errors"] == found["faults"] == {}
        assert found["broken_stories"] == found["lost_frames"] == found["repeated_frames"] == 0
        assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"], rel=1e-3)
        assert found["story_s"]["p50"] * 1000 > found["first_text_ms"]["p50"] > 0
        assert found["text_gap_ms"]["p99"] > 0


@pytest.mark.parametrize(
    ("fault", "said", "lost", "repeated"),
    [
        ("lost", "the text differs from the replay's", 8, 0),
        ("repeated", "a text frame came twice", 0, 8),
        ("two dones", "done came after the ending", 0, 8),
        ("wrong usage", "usage: expected 100 tokens at most, got 9999", 0, 0),
        ("no usage", "usage: 8 text frames came, but 0 tokens were counted", 0, 0),
        ("other seed", "done tells another seed than was asked for", 0, 0),
        ("cut character", "a character was cut in two between frames", 0, 0),
        ("no replay", "its replay was refused: not_found", 0, 0),
    ],
)
async def test_a_broken_promise_is_told(fault: str, said: str, lost: int, repeated: int) -> None:
    async with peer(fault) as here:
        found = await row(here.url, *CROWD)
    assert found["broken_stories"] == 8
    assert said in found["faults"]
    assert (found["lost_frames"], found["repeated_frames"]) == (lost, repeated)
    assert not fine([found], None)


async def test_another_text_for_the_same_ask_is_told() -> None:
    async with peer("unrepeatable") as here:
        found = await row(here.url, *CROWD)
    assert found["broken_stories"] == 1
    assert list(found["faults"]) == ["the same ask gave another text at the end"]


async def test_another_text_in_another_crowd_is_told() -> None:
    async with peer("unrepeatable") as here:
        campaign = await play(here.url, "--players", "1", "2", "--stories", "1")
    assert "the text differs from the same ask's in the crowd of 1" in campaign.rows[1]["faults"]


@pytest.mark.parametrize("fault", ["nonsense", "not utf-8"])
async def test_nonsense_costs_the_story_and_is_quoted(fault: str) -> None:
    async with peer(fault) as here:
        found = await row(here.url, *CROWD)
    assert found["errors"] == {"nonsense": 8}
    assert found["stories"] == 0
    assert found["broken_stories"] == 8
    assert any(said.startswith("expected a frame of the protocol, got b'") for said in found["faults"])
    assert "an accepted ask got no ending" in found["faults"]


async def test_a_peer_that_stops_half_way_is_not_waited_for_for_ever() -> None:
    async with peer("silent") as here:
        found = await row(here.url, *CROWD, "--silence", "200ms")
    assert found["errors"] == {"silence": 8}
    assert found["broken_stories"] == 8


async def test_a_refusal_for_good_is_an_error_and_breaks_nothing() -> None:
    async with peer("forbidden") as here:
        found = await row(here.url, *CROWD)
    assert found["errors"] == {"forbidden": 8}
    assert (found["stories"], found["rejected"], found["broken_stories"]) == (0, 8, 0)
    assert not fine([found], None)


async def test_a_busy_peer_is_asked_again_after_the_pause_it_named() -> None:
    async with peer("busy") as here:
        found = await row(here.url, *CROWD)
    assert found["errors"] == {"busy": 3}
    assert found["stories"] == 8
    assert found["first_text_ms"]["p99"] > 20  # the peer's pause belongs to the player's wait
    assert fine([found], None)


async def test_the_warm_up_is_left_out_and_asked_for_with_seeds_of_its_own() -> None:
    async with peer() as here:
        found = await row(here.url, *CROWD, "--warmup", "2")
        seeds = [ask.seed for ask in here.asks]
    assert found["stories"] == 8
    assert len(seeds) == 4 * (2 + 2) + 1  # and the first story once more
    assert len(set(seeds)) == 16


async def test_two_runs_with_one_seed_ask_the_same_and_another_seed_asks_otherwise() -> None:
    async with peer() as here:
        asked = []
        for seed in ("7", "7", "8"):
            here.asks.clear()
            await play(here.url, *CROWD, "--seed", seed)
            asked.append(sorted((ask.seed or 0, ask.words or ()) for ask in here.asks))
    assert asked[0] == asked[1] != asked[2]

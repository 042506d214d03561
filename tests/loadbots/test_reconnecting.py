"""Drops, drains, storms and other misfortunes: the player comes back and the story is whole."""

from __future__ import annotations

import pytest

from loadbots import deeds
from loadbots.campaign import fine
from loadbots.chaos import parse_chaos
from tests.loadbots.crowds import play, row
from tests.loadbots.peer import peer


async def test_a_story_whose_socket_was_cut_goes_on_behind_the_last_cursor() -> None:
    async with peer("cut") as here:
        found = await row(here.url, "--players", "1", "--stories", "1", "--verify", "0")
        (resumed,) = here.listens
    assert resumed.after == "3"
    assert (found["resumed"], found["stories"], found["broken_stories"]) == (1, 1, 0)


async def test_a_dropped_crowd_hears_every_story_whole() -> None:
    async with peer(pieces=12) as here:
        found = await row(here.url, "--players", "8", "--stories", "2", "--chaos", "drop=1")
    assert found["resumed"] >= 12  # a story that ended before its drop just ended
    assert (found["stories"], found["verified"], found["broken_stories"]) == (16, 16, 0)
    assert fine([found], None)


async def test_cancelled_stories_are_counted_apart() -> None:
    async with peer(pieces=40) as here:
        found = await row(here.url, "--players", "8", "--stories", "2", "--chaos", "cancel=0.5")
    assert 5 <= found["cancelled"] <= 11
    assert found["stories"] == 16
    assert found["broken_stories"] == 0


async def test_a_storm_cuts_all_sockets_at_once_and_all_come_back() -> None:
    async with peer(pieces=60, pause=0.01) as here:
        found = await row(here.url, "--players", "8", "--stories", "1", "--chaos", "storm")
        connections = len(here.players)
    assert found["resumed"] == 8
    assert connections == 1 + 8 + 8  # the knock, the crowd, the storm
    assert found["broken_stories"] == 0


async def test_a_draining_gateway_is_left_within_the_time_it_named() -> None:
    async with peer("drain", pieces=60, pause=0.01) as old, peer() as _:
        found = await row(old.url, "--players", "1", "--stories", "1")
    assert (found["resumed"], found["broken_stories"]) == (1, 0)


async def test_a_gateway_that_is_gone_is_replaced_by_the_next_address() -> None:
    async with peer(pieces=30, pause=0.01) as here:
        campaign = await play(here.url, "--url", here.url, here.url, "--players", "2", "--stories", "2",
                              "--chaos", "drop=0.5")  # fmt: skip
    assert fine(campaign.rows, None)


async def test_a_gateway_that_never_comes_back_costs_its_players_and_no_more_than_their_patience() -> None:
    async with peer("mortal", pieces=20, pause=0.01) as here:
        found = await row(here.url, "--players", "3", "--stories", "5", "--patience", "300ms")
    assert found["errors"] == {"connection": 3}
    assert found["broken_stories"] == 3
    assert found["seconds"] < 5


async def test_a_player_that_reads_nothing_for_a_while_hears_the_story_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deeds, "STALL_S", 0.3)
    async with peer(pieces=30) as here:
        found = await row(here.url, "--players", "2", "--stories", "1", "--chaos", "stall=1")
    assert (found["stories"], found["broken_stories"]) == (2, 0)
    assert found["seconds"] > 0.3
    assert found["story_s"]["p50"] is None  # its length is the player's doing
    assert (found["text_gap_ms"]["p99"] or 0) < 250  # and so is this pause


async def test_a_player_that_was_cut_off_for_reading_nothing_resumes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deeds, "STALL_S", 0.3)
    async with peer("cut", pieces=30) as here:
        found = await row(here.url, "--players", "1", "--stories", "1", "--chaos", "stall=1")
    assert (found["stories"], found["resumed"], found["broken_stories"]) == (1, 1, 0)


def test_small_crowds_get_their_share_of_chaos() -> None:
    chaos = parse_chaos("drop=0.25,cancel=0.125")
    for seed in range(5):
        deeds = [chaos.fate(seed, player, number).deed for player in range(16) for number in range(4)]
        assert 12 <= deeds.count("drop") <= 20
        assert 5 <= deeds.count("cancel") <= 11
    assert chaos.fate(0, 0, -1).deed is None  # warm-up is left alone

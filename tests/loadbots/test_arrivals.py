"""Who comes when: rates, burstiness, ramps and spikes, without a socket."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from loadbots.arrivals import schedule
from loadbots.campaign import fine
from loadbots.knee import KneeSearch
from tests.loadbots.crowds import play, row
from tests.loadbots.peer import peer


def gaps(moments: list[tuple[int, float]]) -> list[float]:
    return [later - earlier for (_, earlier), (_, later) in pairwise(moments)]


def test_poisson_comes_at_its_rate_and_as_bursty_as_chance() -> None:
    found = gaps(schedule("poisson", 50, 100, seed=1))
    assert len(found) == pytest.approx(5000, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(("shape", "spread"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gamma_distribution(shape: float, spread: float) -> None:
    found = gaps(schedule("gamma", 50, 100, seed=1, burstiness=shape))
    assert len(found) == pytest.approx(5000, rel=0.1)
    assert pstdev(found) / fmean(found) == pytest.approx(spread, rel=0.1)


def test_a_ramp_ends_at_its_rate() -> None:
    found = [moment for _, moment in schedule("constant", 10, 10, seed=0, ramp_to=30)]
    assert len(found) == pytest.approx(200, abs=2)
    assert sum(moment < 1 for moment in found) == pytest.approx(11, abs=1.5)
    assert sum(moment > 9 for moment in found) == pytest.approx(29, abs=1.5)


def test_a_ramp_may_go_down_to_almost_nothing() -> None:
    found = schedule("constant", 20, 10, seed=0, ramp_to=0.001)
    assert len(found) == pytest.approx(100, abs=2)


def test_a_spike_comes_at_once_half_way() -> None:
    found = [moment for _, moment in schedule("spike", 1, 60, seed=3, spike=300)]
    assert found.count(30.0) == 300
    assert found == sorted(found)


def test_the_same_seed_draws_the_same_moments() -> None:
    assert schedule("gamma", 5, 20, seed=4) == schedule("gamma", 5, 20, seed=4) != schedule("gamma", 5, 20, seed=5)


async def test_an_open_loop_counts_from_the_intended_moment_and_tells_its_own_lag() -> None:
    async with peer() as here:
        found = await row(here.url, "--arrival", "constant", "--rate", "100", "--duration", "500ms")
    assert found["stories"] == found["asked"] == 50
    assert found["rate"] == 100
    assert found["lag_ms"]["p50"] >= 0
    assert found["first_text_ms"]["p50"] > found["lag_ms"]["p50"]


async def test_an_open_loop_gets_more_players_when_all_are_busy_up_to_a_bound() -> None:
    async with peer(pieces=20, pause=0.01) as here:
        found = await row(here.url, "--arrival", "spike", "--spike", "12", "--rate", "1", "--duration", "200ms",
                          "--players", "2", "--max-players", "8")  # fmt: skip
    assert found["stories"] == 8
    assert found["errors"] == {"no_player": 4}


@pytest.mark.parametrize("truth", [0.05, 1.0, 3.3, 40.0])
def test_the_knee_is_found_between_two_close_rates(truth: float) -> None:
    search = KneeSearch(0.5)
    while (rate := search.rate) is not None:
        search.judge(rate <= truth)
    assert search.holds is not None
    assert search.breaks is not None
    assert search.holds <= truth < search.breaks
    assert search.breaks / search.holds < 1.2


def test_a_knee_that_is_never_reached_is_said_so() -> None:
    search = KneeSearch(1)
    while search.rate is not None:
        search.judge(True)
    assert "not reached" in str(search)
    assert "none" in str(broken_everywhere())


async def test_a_knee_is_not_searched_where_nobody_tells_stories() -> None:
    async with peer("forbidden") as here:
        campaign = await play(here.url, "--find-knee", "--slo", "story=9s", "--rate", "200", "--duration", "100ms")
    assert len(campaign.rows) == 1
    assert not fine(campaign.rows, campaign.knee)


def broken_everywhere() -> KneeSearch:
    search = KneeSearch(1)
    while search.rate is not None:
        search.judge(False)
    return search

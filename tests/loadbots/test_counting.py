"""From records to rows: percentiles, goodput, the timeline, reconciliation, the bots' own metrics."""

from __future__ import annotations

import statistics

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest

from loadbots.metrics import BUCKETS, Board
from loadbots.reconcile import NoMetricsError, Reconciliation, compare, parse
from loadbots.slo import Slo, parse_slo
from loadbots.tally import Ledger, Tally, histogram, percentiles
from loadbots.told import Amendment, Told, cut_character
from tests.loadbots.crowds import play
from tests.loadbots.peer import peer


def told(number: int, first: float, ended: float, ending: str = "length", **more: object) -> Told:
    """One story asked for at 100 s."""
    found = Told(0, number, "measured", 100.0, sent=100.0, first_text=100.0 + first, ended=100.0 + ended, ending=ending)
    found.accepted, found.tokens, found.frames = 1, 10, 2
    for name, value in more.items():
        setattr(found, name, value)
    return found


def test_percentiles_are_exact() -> None:
    samples = [float(number) for number in range(1, 201)]
    cuts = statistics.quantiles(samples, n=100, method="inclusive")
    assert percentiles(samples, 1) == {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}
    assert percentiles([], 1) == {"p50": None, "p95": None, "p99": None}
    assert percentiles([0.25], 1000) == {"p50": 250, "p95": 250, "p99": 250}


def test_goodput_counts_stories_that_kept_every_bound_a_second() -> None:
    tally = Tally(Slo(first_text=1, story=4))
    tally.add(told(0, 0.5, 2.0))
    tally.add(told(1, 1.5, 2.0))  # too late a first text
    tally.add(told(2, 0.5, 5.0))  # too long a story
    tally.add(told(3, 0.5, 2.0, faults=["broken"]))
    tally.add(told(4, 0.5, 1.0, ending="cancelled"))  # the player's own wish: not judged
    row = tally.row(1)
    assert row["seconds"] == 5
    assert row["goodput"] == pytest.approx(1 / 5)
    assert row["slo_kept"] == 0.25
    assert row["stories"] == 5
    assert row["broken_stories"] == 1


def test_without_an_slo_every_story_told_to_its_end_is_good() -> None:
    tally = Tally(None)
    tally.add(told(0, 0.5, 2.0))
    tally.add(told(1, 0.5, 4.0, ending="expired"))
    assert tally.row(1)["goodput"] == pytest.approx(1 / 4)


def test_stories_that_were_cancelled_or_stalled_do_not_tell_how_long_a_story_takes() -> None:
    tally = Tally(None)
    tally.add(told(0, 0.5, 2.0))
    tally.add(told(1, 0.5, 1.0, ending="cancelled"))
    tally.add(told(2, 0.5, 20.0, stalled=True))
    assert tally.row(1)["story_s"] == {"p50": 2, "p95": 2, "p99": 2}
    assert tally.row(1)["cancelled"] == 1


def test_a_story_with_several_faults_is_broken_once() -> None:
    tally = Tally(None)
    tally.add(told(0, 0.5, 2.0, faults=["one", "another"]))
    tally.amend(Amendment(0, 0, lost=2, faults=["a third"]))
    row = tally.row(1)
    assert (row["broken_stories"], row["lost_frames"]) == (1, 2)


def test_the_timeline_keeps_all_tokens_and_ends_with_nobody_in_flight() -> None:
    tally = Tally(None)
    for number in range(50):
        tally.add(told(number, 0.5, 40.0 + number, gaps=[0.5] * 20))
    line = tally.row(1)["timeline"]
    step = line["s"][1]
    assert len(line["s"]) <= 121
    assert sum(line["tokens_per_second"]) * step == pytest.approx(500, rel=0.01)
    assert sum(line["stories_per_second"]) * step == pytest.approx(50, rel=0.01)
    assert line["in_flight"][0] == 50
    assert line["in_flight"][-1] == 0


def test_a_histogram_keeps_every_sample_at_or_below_its_edge() -> None:
    bars = histogram([0.001, 0.010, 0.010, 2.0], 1000)
    assert sum(count for _, count in bars) == 4
    assert bars[0][0] == pytest.approx(1)
    assert 10 <= bars[1][0] < 10.8


def test_only_a_character_cut_between_frames_is_a_cut_character() -> None:
    assert cut_character(["a dr\ufffd", "\ufffdgon"])
    assert cut_character(["\ufffd", "\ufffd\ufffd\ufffd smiled"])
    assert not cut_character(["a dr\ufffd", "gon"])  # the model's own broken byte
    assert not cut_character(["a\ufffd", "\ufffdb", "c\ufffdd"])  # a model that writes bytes at random
    assert not cut_character(["plain", "text", ""])


def test_an_slo_reads_as_it_was_written() -> None:
    assert str(parse_slo("first_text=250ms, story=10s")) == "first_text=0.25s,story=10s"


PAGE = """# TYPE gateway_asks_total counter
gateway_asks_total{{outcome="accepted"}} {accepted}
gateway_asks_total{{outcome="busy"}} {busy}
# TYPE gateway_stories_total counter
gateway_stories_total{{finish_reason="length"}} {length}
# TYPE storyteller_tokens_total counter
storyteller_tokens_total{{phase="decode"}} {decode}
storyteller_tokens_total{{phase="prefill"}} 9000
# TYPE storyteller_redeliveries_total counter
storyteller_redeliveries_total {redeliveries}
"""


def page(accepted: int = 0, busy: int = 0, length: int = 0, decode: int = 0, redeliveries: int = 0) -> str:
    return PAGE.format(accepted=accepted, busy=busy, length=length, decode=decode, redeliveries=redeliveries)


def ledger(*records: Told) -> Ledger:
    book = Ledger()
    for record in records:
        book.add(record)
    return book


def test_equal_counts_reconcile_and_each_difference_is_named() -> None:
    before, seen = parse(page(5, 1, 5, 50)), ledger(told(0, 0.5, 1), told(1, 0.5, 1))
    assert compare(before, parse(page(7, 1, 7, 70)), seen) == []
    assert compare(before, parse(page(8, 3, 7, 71)), seen) == [
        'gateway_asks_total{outcome="accepted"} grew by 3, the players saw 2',
        'gateway_asks_total{outcome="busy"} grew by 2, the players saw 0',
        'storyteller_tokens_total{phase="decode"} grew by 21, the players saw 20',
    ]
    assert "a service was restarted" in compare(before, parse(page(2, 0, 2, 20)), seen)[0]


def test_what_the_players_cannot_know_may_be_counted_higher_but_never_lower() -> None:
    lost = told(0, 0.5, 1, unanswered=1)
    assert compare(parse(page()), parse(page(2, 0, 2, 25)), ledger(lost)) == []
    assert compare(parse(page()), parse(page(0, 0, 0, 0)), ledger(lost)) != []
    assert compare(parse(page()), parse(page(1, 0, 1, 14, redeliveries=1)), ledger(told(0, 0.5, 1))) == []


async def test_reconciliation_reads_the_pages_before_and_after_a_crowd() -> None:
    pages = [page(), page(5, 0, 5, 40), page(5, 0, 5, 40)]

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=pages[0] if len(pages) == 1 else pages.pop(0))

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with peer() as here:
            address = f"http://127.0.0.1:{runner.addresses[0][1]}"
            campaign = await play(here.url, "--players", "2", "--stories", "2", "--reconcile", address)
    finally:
        await runner.cleanup()
    assert campaign.rows[0]["differences"] == []  # four stories and the first once more


async def test_a_page_without_the_counters_is_refused() -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text="# TYPE other_total counter\nother_total 3\n")

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        with pytest.raises(NoMetricsError, match="expected counters of a gateway or a storyteller, got none"):
            await Reconciliation((f"http://127.0.0.1:{runner.addresses[0][1]}",)).begin()
    finally:
        await runner.cleanup()
    with pytest.raises(NoMetricsError, match="does not answer"):
        await Reconciliation(("http://127.0.0.1:1",)).begin()


def exposition(board: Board) -> str:
    registry = CollectorRegistry()
    registry.register(board)
    return generate_latest(registry).decode()


def test_every_series_of_the_bots_is_there_from_the_start() -> None:
    shown = exposition(Board())
    for series in (
        "loadbots_players 0.0",
        "loadbots_asks_in_flight 0.0",
        "loadbots_asks_total 0.0",
        "loadbots_tokens_total 0.0",
        'loadbots_stories_total{finish_reason="expired"} 0.0',
        'loadbots_errors_total{code="busy"} 0.0',
        'loadbots_first_text_seconds_bucket{le="0.001"} 0.0',
        'loadbots_text_gap_seconds_bucket{le="+Inf"} 0.0',
        "loadbots_story_seconds_count 0.0",
    ):
        assert series in shown
    assert {0.25, 0.5, 1, 2, 5, 10} <= set(BUCKETS)
    assert BUCKETS[0] == 0.001


def test_the_bots_metrics_count_what_players_saw() -> None:
    board = Board()
    board.take(told(0, 0.5, 2.0, gaps=[0.05, 0.3]))
    board.take(told(1, 0.7, 1.0, ending="cancelled", resumes=2))
    board.take(Amendment(0, 0, lost=1, faults=["lost"]))
    shown = exposition(board)
    for series in (
        "loadbots_asks_total 2.0",
        "loadbots_tokens_total 20.0",
        "loadbots_resumes_total 2.0",
        "loadbots_lost_frames_total 1.0",
        "loadbots_broken_stories_total 1.0",
        'loadbots_stories_total{finish_reason="cancelled"} 1.0',
        'loadbots_first_text_seconds_bucket{le="0.5"} 1.0',
        'loadbots_first_text_seconds_bucket{le="1.0"} 2.0',
        'loadbots_text_gap_seconds_bucket{le="0.05"} 1.0',
        "loadbots_story_seconds_count 1.0",
        "loadbots_story_seconds_sum 2.0",
    ):
        assert series in shown

"""Reconciliation: what the services counted against what the players saw. A difference is an error.

The counters of all pages are summed before and after a crowd; nobody else may ask meanwhile. Where the bots cannot
know (an ask whose connection broke before the answer, a hang-up without usage, a story written anew after a crash)
the services' count may be higher, and is not required to be equal.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from gateway.wire import ERROR_CODES
from loadbots.tally import Ledger

FETCH_S = 5.0
SETTLE_S = 8.0
"""How long the services may take to count what is over."""
LOOK_S = 0.25

Counts = Counter[tuple[str, str]]
"""By series name and its one label's value."""
WANTED = {
    "gateway_asks_total": "outcome",
    "gateway_stories_total": "finish_reason",
    "storyteller_tokens_total": "phase",
    "storyteller_stories_total": "finish_reason",
    "storyteller_redeliveries_total": "",
}


class NoMetricsError(Exception):
    """A page that cannot be read; one line for a person."""


class Reconciliation:
    """Begin before a crowd, ask for the differences after it."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._before: Counts = Counter()

    async def begin(self) -> None:
        self._before = await fetch(self._urls)
        if not any(name.startswith(("gateway_asks", "storyteller_tokens")) for name, _ in self._before):
            raise NoMetricsError(f"{', '.join(self._urls)}: expected counters of a gateway or a storyteller, got none")

    async def differences(self, ledger: Ledger) -> list[str]:
        """Empty where all counts agree within `SETTLE_S`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SETTLE_S
        while True:
            after = await fetch(self._urls)
            found = compare(self._before, after, ledger)
            if not found or loop.time() > deadline:
                return found
            await asyncio.sleep(LOOK_S)


async def fetch(urls: Sequence[str]) -> Counts:
    """The wanted counters, summed over all pages. An address without a path means /metrics."""
    counts: Counts = Counter()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=FETCH_S)) as session:
        for url in urls:
            page = url if url.count("/") > 2 else f"{url}/metrics"
            try:
                async with session.get(page) as answer:
                    text = await answer.text()
                    if answer.status != 200:
                        raise NoMetricsError(f"{page}: expected 200, got {answer.status}")
                counts.update(parse(text))
            except (aiohttp.ClientError, TimeoutError, OSError) as failed:
                raise NoMetricsError(f"{page} does not answer: {failed or 'too late'}") from None
            except ValueError:
                raise NoMetricsError(f"{page}: expected a metrics page, got {text[:60]!r}") from None
    return counts


def parse(text: str) -> Counts:
    counts: Counts = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in WANTED:
                counts[sample.name, sample.labels.get(WANTED[sample.name], "")] += int(sample.value)
    return counts


def compare(before: Counts, after: Counts, ledger: Ledger) -> list[str]:
    """One line for each count that cannot be true."""
    if any(after[series] < count for series, count in before.items()):
        return ["a service was restarted meanwhile: its counters began anew"]
    grown = {series: after[series] - before[series] for series in after}
    loose = ledger.unanswered
    rewritten = grown.get(("storyteller_redeliveries_total", ""), 0)
    found = _check(grown, "gateway_asks_total", "accepted", ledger.accepted, loose)
    for code in ERROR_CODES:
        found += _check(grown, "gateway_asks_total", code, ledger.refusals[code], loose)
    for reason in ("stop", "length", "cancelled", "expired", "failed"):
        open_end = loose + ledger.unfinished + ledger.hung_up
        found += _check(grown, "gateway_stories_total", reason, ledger.endings[reason], open_end)
        if reason in ("stop", "length"):
            told = ledger.endings[reason]
            found += _check(grown, "storyteller_stories_total", reason, told, open_end + rewritten)
    unknown = loose or rewritten or ledger.unfinished or ledger.hung_up
    return found + _check(grown, "storyteller_tokens_total", "decode", ledger.tokens, None if unknown else 0)


def _check(grown: dict[tuple[str, str], int], name: str, label: str, seen: int, slack: int | None) -> list[str]:
    """`slack`: how much higher the services' count may be; None: any."""
    counted = grown.get((name, label))
    if counted is None and not any(series == name for series, _ in grown):
        return []  # no page of that service was given
    counted = counted or 0
    if seen <= counted and (slack is None or counted <= seen + slack):
        return []
    return [f'{name}{{{WANTED[name]}="{label}"}} grew by {counted}, the players saw {seen}']

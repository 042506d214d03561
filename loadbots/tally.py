"""All records of one crowd, counted: the row of `rows.json`.

Samples are kept, not binned, so percentiles are exact and records of several processes merge to the same row. Who is
counted where: `stories` are asks that got their ending, whichever it was; waits for the first text come from every
story that had one; `story_s` from those told to their natural end by a player that read all the time.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from loadbots.slo import Slo
from loadbots.told import Amendment, Told, Word

BIN_S = 0.25
"""Resolution of the timeline."""
MAX_BINS = 120


class Tally:
    def __init__(self, slo: Slo | None) -> None:
        self._slo = slo
        self.everything = Ledger()  # warm-up and checks too: what the services have counted
        self.errors: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.asked = self.told = self.tokens = self.prompt_tokens = self.frames = 0
        self.rejected = self.resumed = self.resumes = self.lost = self.repeated = self.verified = 0
        self.judged = self.kept = 0
        self.first_text = array("d")
        self.gaps = array("d")
        self.story = array("d")
        self.lag = array("d")
        self.late = array("d")  # of the bots' own event loops
        self.cpu_s = 0.0
        self.began: float | None = None
        self.ended: float | None = None
        self._broken: set[tuple[int, int]] = set()
        self._ended_per_bin: Counter[int] = Counter()
        self._tokens_per_bin: defaultdict[int, float] = defaultdict(float)
        self._flights: Counter[int] = Counter()  # asks begun minus asks ended, per bin
        self._digests: dict[tuple[int, int], str] = {}

    @property
    def broken(self) -> int:
        return len(self._broken)

    @property
    def seconds(self) -> float:
        return self.ended - self.began if self.began is not None and self.ended is not None else 0.0

    def take(self, word: Word) -> None:
        """Anything that a squad hands in."""
        if isinstance(word, Told):
            self.add(word)
        elif isinstance(word, Amendment):
            self.amend(word)
        else:
            self.late.extend(word.late)
            self.cpu_s += word.cpu_s

    def add(self, told: Told) -> None:
        self.everything.add(told)
        if told.faults:
            self._blame(told.player, told.number, told.faults)
        if told.phase != "measured":
            return
        self.asked += 1
        self.errors += told.errors
        self.frames += told.frames
        self.repeated += told.repeated
        self.resumed += told.resumes > 0
        self.resumes += told.resumes
        self._time(told)
        if told.ending is None:
            self.rejected += bool(told.refusals) and told.given_up in told.refusals
        else:
            self._count(told)
        if self._slo and told.ending != "cancelled":
            self.judged += 1
            self.kept += told.good and not told.faults and self._keeps(told, self._slo)

    def _count(self, told: Told) -> None:
        assert told.ending is not None
        self.told += 1
        self.endings[told.ending] += 1
        self.tokens += told.tokens
        self.prompt_tokens += told.prompt_tokens
        if told.good:
            self._digests[told.player, told.number] = told.digest

    def _time(self, told: Told) -> None:
        began, ended = told.intended, told.ended or told.intended
        self.began = began if self.began is None else min(began, self.began)
        self.ended = ended if self.ended is None else max(ended, self.ended)
        if told.begun is not None:
            self.lag.append(told.begun - told.intended)
        self._flights[int(began / BIN_S)] += 1
        self._flights[int(ended / BIN_S)] -= 1
        self._ended_per_bin[int(ended / BIN_S)] += told.ending is not None
        self.gaps.extend(told.gaps)
        if told.first_text is None:
            return
        self.first_text.append(told.first_text - began)
        if told.good and not told.stalled:
            self.story.append(ended - began)
        share = told.tokens / (len(told.gaps) + 1)
        moment = told.first_text
        self._tokens_per_bin[int(moment / BIN_S)] += share
        for gap in told.gaps:
            moment += gap
            self._tokens_per_bin[int(moment / BIN_S)] += share

    def _keeps(self, told: Told, slo: Slo) -> bool:
        first = None if told.first_text is None else told.first_text - told.intended
        whole = None if told.ended is None else told.ended - told.intended
        return slo.keeps(first, max(told.gaps, default=0.0), whole)

    def amend(self, amendment: Amendment) -> None:
        self.lost += amendment.lost
        self.repeated += amendment.repeated
        self.verified += amendment.verified
        if amendment.faults:
            self._blame(amendment.player, amendment.number, amendment.faults)

    def compare(self, earlier: Tally, name: str) -> None:
        """The same ask in another crowd gave the same text, or else the later story is broken."""
        for key in self._digests.keys() & earlier._digests.keys():
            if self._digests[key] != earlier._digests[key]:
                self._blame(*key, [f"the text differs from the same ask's in {name}"])

    def _blame(self, player: int, number: int, faults: Sequence[str]) -> None:
        self._broken.add((player, number))
        self.faults.update(faults)

    def row(self, players: int) -> dict[str, Any]:
        seconds = self.seconds
        good = self.kept if self._slo else sum(self.endings[ending] for ending in ("stop", "length"))
        return {
            "players": players,
            "stories": self.told,
            "errors": dict(self.errors),
            "seconds": round(seconds, 6),
            "tokens": self.tokens,
            "tokens_per_second": round(self.tokens / seconds, 2) if seconds else 0.0,
            "first_text_ms": percentiles(self.first_text, 1000),
            "text_gap_ms": percentiles(self.gaps, 1000),
            "story_s": percentiles(self.story, 1),
            "goodput": round(good / seconds, 4) if seconds else 0.0,
            "lost_frames": self.lost,
            "repeated_frames": self.repeated,
            "broken_stories": self.broken,
            "resumed": self.resumed,
            "cancelled": self.endings["cancelled"],
            **self._details(),
        }

    def _details(self) -> dict[str, Any]:
        """What the contract does not ask for: for people who want to know why, and for the report."""
        return {
            "expired": self.endings["expired"],
            "failed": self.endings["failed"],
            "rejected": self.rejected,
            "asked": self.asked,
            "endings": dict(self.endings),
            "resumes": self.resumes,
            "verified": self.verified,
            "frames": self.frames,
            "prompt_tokens": self.prompt_tokens,
            "faults": dict(self.faults.most_common(10)),
            "lag_ms": percentiles(self.lag, 1000),
            "bots": {
                "late_ms": percentiles(self.late, 1000),
                "cpu_s": round(self.cpu_s, 3),
                "cpu_ms_per_1000_frames": round(1e6 * self.cpu_s / self.frames, 2) if self.frames else None,
            },
            "slo": str(self._slo) if self._slo else None,
            "slo_kept": round(self.kept / self.judged, 4) if self.judged else None,
            "histograms": {
                "first_text_ms": histogram(self.first_text, 1000),
                "text_gap_ms": histogram(self.gaps, 1000),
                "story_s": histogram(self.story, 1),
            },
            "timeline": self._timeline(),
        }

    def _timeline(self) -> dict[str, list[float]]:
        """Per step: tokens a second, stories ended a second, asks in flight."""
        if self.began is None or self.ended is None:
            return {"s": [], "tokens_per_second": [], "stories_per_second": [], "in_flight": []}
        first, last = int(self.began / BIN_S), int(self.ended / BIN_S)
        step = -(-(last - first + 1) // MAX_BINS)
        starts = range(first, last + 1, step)
        tokens = [sum(self._tokens_per_bin[b] for b in range(s, s + step)) for s in starts]
        ended = [sum(self._ended_per_bin[b] for b in range(s, s + step)) for s in starts]
        flights, flying = [], 0
        for start in starts:
            flying += sum(self._flights[b] for b in range(start, start + step))
            flights.append(float(flying))
        width = step * BIN_S
        return {
            "s": [round((start - first) * BIN_S, 3) for start in starts],
            "tokens_per_second": [round(count / width, 2) for count in tokens],
            "stories_per_second": [round(count / width, 3) for count in ended],
            "in_flight": flights,
        }


class Ledger:
    """Counts as the services make them: every ask, whether measured or not."""

    def __init__(self) -> None:
        self.accepted = self.unanswered = self.tokens = self.unfinished = self.hung_up = 0
        self.refusals: Counter[str] = Counter()
        self.endings: Counter[str] = Counter()

    def add(self, told: Told) -> None:
        self.accepted += told.accepted
        self.unanswered += told.unanswered
        self.tokens += told.tokens
        self.refusals += told.refusals
        if told.hung_up:
            self.hung_up += 1
        elif told.ending is not None:
            self.endings[told.ending] += 1
        else:
            self.unfinished += told.accepted


def percentiles(samples: Sequence[float], scale: float) -> dict[str, float | None]:
    """p50, p95 and p99, exact, between neighbours by the line that joins them; None where there are no samples."""
    ordered = sorted(samples)
    return {f"p{share}": _percentile(ordered, share / 100, scale) for share in (50, 95, 99)}


def _percentile(ordered: Sequence[float], share: float, scale: float) -> float | None:
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return round(scale * (ordered[below] + (ordered[above] - ordered[below]) * (place - below)), 4)


def histogram(samples: Sequence[float], scale: float) -> list[tuple[float, int]]:
    """Counts by upper edge; edges stand ten to a doubling, so a bar is 7 % wide. Empty bars are left out."""
    counts: Counter[int] = Counter(math.ceil(10 * math.log2(max(sample, 1e-6) * scale)) for sample in samples)
    return [(round(2 ** (bar / 10), 6), count) for bar, count in sorted(counts.items())]

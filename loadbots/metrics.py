"""The bots' own metrics, as the players saw it: every one named here once, served on 9103 by a thread of its own.

`Board` is fed with records by the event loop and read when somebody scrapes; nothing is counted per frame. Every
series is there from the start, at zero; no label holds a player or a story.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.wire import ERROR_CODES
from loadbots.crowd import Progress
from loadbots.told import Amendment, Strain, Told, Word

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)
ENDINGS = ("stop", "length", "cancelled", "expired", "failed")
CODES = (*ERROR_CODES, "expired", "connection", "silence", "nonsense", "no_player", "stray_frame")


class Buckets:
    """A histogram that is filled story by story."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def add(self, samples: Iterable[float]) -> None:
        for sample in samples:
            self._counts[bisect_left(BUCKETS, sample)] += 1
            self._sum += sample

    def family(self, name: str, what: str) -> HistogramMetricFamily:
        total, buckets = 0, []
        for edge, count in zip((*BUCKETS, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if edge == float("inf") else str(edge), float(total)))
        return HistogramMetricFamily(name, what, buckets=buckets, sum_value=self._sum)


class Board(Collector):
    def __init__(self) -> None:
        self.progress: Callable[[], Progress] = Progress  # of the crowd that is there now
        self._first_text, self._gap, self._story = Buckets(), Buckets(), Buckets()
        self._endings: Counter[str] = Counter(dict.fromkeys(ENDINGS, 0))
        self._errors: Counter[str] = Counter(dict.fromkeys(CODES, 0))
        self._asks = self._tokens = self._resumes = self._lost = self._repeated = self._broken = 0

    def take(self, word: Word) -> None:
        if isinstance(word, Told):
            self._told(word)
        elif isinstance(word, Amendment):
            self._lost += word.lost
            self._repeated += word.repeated
            self._broken += bool(word.faults)
        else:
            assert isinstance(word, Strain)

    def _told(self, told: Told) -> None:
        self._asks += 1
        self._errors.update(told.errors)
        self._tokens += told.tokens
        self._resumes += told.resumes
        self._repeated += told.repeated
        self._broken += bool(told.faults)
        self._gap.add(told.gaps)
        if told.ending is not None:
            self._endings[told.ending] += 1
        if told.first_text is not None:
            self._first_text.add((told.first_text - told.intended,))
        if told.good and not told.stalled and told.ended is not None:
            self._story.add((told.ended - told.intended,))

    def collect(self) -> Iterable[Metric]:
        now = self.progress()
        yield GaugeMetricFamily("loadbots_players", "Players that are there.", value=now.players)
        yield GaugeMetricFamily("loadbots_asks_in_flight", "Asks without an ending yet.", value=now.asking)
        yield CounterMetricFamily("loadbots_asks", "Asks that came to an end.", value=self._asks)
        yield CounterMetricFamily("loadbots_tokens", "Tokens by the endings' usage.", value=self._tokens)
        yield CounterMetricFamily("loadbots_resumes", "Stories taken up again.", value=self._resumes)
        yield CounterMetricFamily("loadbots_lost_frames", "Frames that only the replay had.", value=self._lost)
        yield CounterMetricFamily("loadbots_repeated_frames", "Frames that came twice.", value=self._repeated)
        yield CounterMetricFamily("loadbots_broken_stories", "Stories with a broken promise.", value=self._broken)
        yield _labelled("loadbots_stories", "Endings heard.", "finish_reason", self._endings)
        yield _labelled("loadbots_errors", "What went wrong, refusals too.", "code", self._errors)
        yield self._first_text.family("loadbots_first_text_seconds", "From the intended moment to the first text.")
        yield self._gap.family("loadbots_text_gap_seconds", "Between two text frames.")
        yield self._story.family("loadbots_story_seconds", "From the intended moment to the ending.")


def _labelled(name: str, what: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, what, labels=[label])
    for value, count in sorted(counts.items()):
        family.add_metric([value], count)
    return family


def serve(board: Board, host: str, port: int) -> Callable[[], None]:
    """Serve the board until the returned function is called; `OSError` where the port is taken."""
    registry = CollectorRegistry()
    registry.register(board)
    server, thread = start_http_server(port, host, registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1)

    return stop

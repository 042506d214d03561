"""Every metric of the gateway, named once. No label ever holds a player, a story or a prompt.

Asks and stories count once each, at the gateway that accepted them, however many listen and through whichever door.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from gateway.wire import ERROR_CODES, Close
from storyteller.wire import FINISH_REASONS

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)

connections = Gauge("gateway_connections", "Open game connections.")
listeners = Gauge("gateway_listeners", "Listenings to stories, through all doors.")
asks = Counter("gateway_asks", "Asks by what became of them at the door.", ["outcome"])
stories = Counter("gateway_stories", "Accepted asks by how their story ended.", ["finish_reason"])
first_text = Histogram("gateway_time_to_first_text_seconds", "From accepted to the first text.", buckets=LATENCY)
text_gap = Histogram("gateway_text_gap_seconds", "Between two texts of a story.", buckets=LATENCY)
story_seconds = Histogram("gateway_story_seconds", "From accepted to the ending.", buckets=LATENCY)
eta_error = Histogram("gateway_eta_error_seconds", "How far the promised beginning was off.", buckets=LATENCY)
resumes = Counter("gateway_resumes", "Listenings that went on behind a cursor.")
closes = Counter("gateway_closes", "Game connections closed, by code.", ["code"])
slow_clients = Counter("gateway_slow_clients", "Clients cut off because they took nothing for too long.")
event_loop_lag = Gauge("gateway_event_loop_lag_seconds", "How late the event loop ran its last timer.")
redis_errors = Counter("gateway_redis_errors", "Calls to Redis that failed and were tried again.")

CLOSE_CODES = frozenset(str(int(code)) for code in Close) | {"1000", "1006", "other"}

for outcome in ("accepted", *ERROR_CODES):
    asks.labels(outcome)
for reason in FINISH_REASONS:
    stories.labels(reason)
for code in CLOSE_CODES:
    closes.labels(code)

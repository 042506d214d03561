"""Every metric of the storyteller, named once. No label ever holds a player, a story or a prompt."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from storyteller.wire import FINISH_REASONS

LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256)
TOKENS = (1, 10, 25, 50, 100, 150, 200, 300, 500, 1000, 2000)

queue_depth = Gauge("storyteller_queue_depth", "Asks that wait, over all storytellers.")
queue_oldest = Gauge("storyteller_queue_oldest_seconds", "Age of the oldest ask that waits.")
batch_size = Gauge("storyteller_batch_size", "Stories in the batch.")
batch_fill = Gauge("storyteller_batch_fill_ratio", "Stories in the batch, as a share of its places.")
kv_tokens = Gauge("storyteller_kv_tokens", "KV memory in tokens; shared prefixes count once.", ["state"])
queue_wait = Histogram("storyteller_queue_wait_seconds", "From accepted to begun.", buckets=LATENCY)
step_seconds = Histogram("storyteller_step_seconds", "One step of the batch.", buckets=LATENCY)
step_batch_size = Histogram("storyteller_step_batch_size", "Stories in a step.", buckets=SIZES)
story_tokens = Histogram("storyteller_story_tokens", "Tokens of an ended story.", buckets=TOKENS)
tokens = Counter("storyteller_tokens", "Tokens computed, or found in the cache.", ["phase"])
stories = Counter("storyteller_stories", "Stories that ended here.", ["finish_reason"])
redeliveries = Counter("storyteller_redeliveries", "Stories put back because their storyteller fell silent.")
dead_letters = Counter("storyteller_dead_letters", "Asks given up because they killed their storytellers.")
redis_errors = Counter("storyteller_redis_errors", "Calls to Redis that failed and were tried again.")
info = Gauge(
    "storyteller_info",
    "What this storyteller serves; always 1.",
    ["model", "revision", "batching", "quantize"],
)

for state in ("used", "budget"):
    kv_tokens.labels(state)
for phase in ("prefill", "decode", "cached"):
    tokens.labels(phase)
for reason in FINISH_REASONS:
    stories.labels(reason)

"""What an operator asks, from top to bottom: each function is a row of panels.

Every query adds up its replicas or names each. What does not belong here: an alert (prometheus/rules).
"""

from __future__ import annotations

from grafana.panels import Panel, graph, heatmap, number, quantiles, rate, series, table


def are_players_served() -> list[Panel]:
    in_time = rate("gateway_time_to_first_text_seconds_bucket", 'le="1.0"')
    begun = rate("gateway_time_to_first_text_seconds_count")
    not_served = rate("gateway_stories_total", 'finish_reason=~"failed|expired"')
    not_cancelled = rate("gateway_stories_total", 'finish_reason!="cancelled"')
    return [
        number(
            "First text within 1 s",
            "Share of stories whose first text came within a second of the ask. Promised: 95%.",
            "percentunit",
            f"sum({in_time}) / sum({begun})",
            [(None, "red"), (0.9, "orange"), (0.95, "green")],
        ),
        number(
            "Stories failed or expired",
            "Share of stories that did not get to their end; those that players cancelled "
            "themselves are not counted. Promised: 0.5% at most.",
            "percentunit",
            f"sum({not_served}) / sum({not_cancelled})",
            [(None, "green"), (0.005, "orange"), (0.05, "red")],
        ),
        number(
            "Players connected",
            "Open game connections, over all gateways.",
            "short",
            f"sum({series('gateway_connections')})",
            [(None, "blue")],
        ),
        number(
            "Stories a second",
            "Stories that ended, for whatever reason, over all gateways.",
            "ops",
            f"sum({rate('gateway_stories_total')})",
            [(None, "blue")],
        ),
        graph(
            "How long until the first text?",
            "From the accepted ask to the first text that was sent to a listener.",
            "s",
            quantiles("gateway_time_to_first_text_seconds"),
        ),
        graph(
            "How long between two texts?",
            "The wait from one text of a story to its next; long gaps are what players see as stuttering.",
            "s",
            quantiles("gateway_text_gap_seconds"),
        ),
        graph(
            "How long does a story take?",
            "From the accepted ask to the ending.",
            "s",
            quantiles("gateway_story_seconds"),
        ),
        graph(
            "How do stories end?",
            "Endings a second. Expired: not begun in time. Failed: given up, or Redis lost it.",
            "ops",
            {"{{finish_reason}}": f"sum by (finish_reason) ({rate('gateway_stories_total')})"},
            stacked=True,
        ),
        graph(
            "What becomes of asks?",
            "Asks a second: accepted, or refused with which code.",
            "ops",
            {"{{outcome}}": f"sum by (outcome) ({rate('gateway_asks_total')})"},
            stacked=True,
        ),
        graph(
            "Do connections hold?",
            "Open connections and listeners over all gateways. Listeners can be more than "
            "connections: one connection may listen to several stories.",
            "short",
            {
                "connections": f"sum({series('gateway_connections')})",
                "listeners": f"sum({series('gateway_listeners')})",
            },
        ),
        graph(
            "Why do connections end?",
            "Closes a second by code (1000: the player left; 4000: draining; 4001: too slow; "
            "4002: no heartbeat; from 4500: refused), and listeners that came back behind a cursor.",
            "ops",
            {
                "{{code}}": f"sum by (code) ({rate('gateway_closes_total')})",
                "resumed": f"sum({rate('gateway_resumes_total')})",
                "slow clients": f"sum({rate('gateway_slow_clients_total')})",
            },
        ),
    ]


def as_players_saw_it() -> list[Panel]:
    return [
        graph(
            "First text, as players saw it",
            "Measured by the bots at their end of the socket; there while a crowd plays.",
            "s",
            quantiles("loadbots_first_text_seconds"),
        ),
        graph(
            "Gap between texts, as players saw it",
            "Measured by the bots at their end of the socket.",
            "s",
            quantiles("loadbots_text_gap_seconds"),
        ),
        graph(
            "Whole story, as players saw it",
            "Measured by the bots at their end of the socket.",
            "s",
            quantiles("loadbots_story_seconds"),
        ),
        graph(
            "What went wrong, as players saw it",
            "What bots counted a second: stories with a broken promise and frames lost or repeated must stay 0; "
            "resumes are players who came back.",
            "ops",
            {
                "broken stories": f"sum({rate('loadbots_broken_stories_total')})",
                "lost frames": f"sum({rate('loadbots_lost_frames_total')})",
                "repeated frames": f"sum({rate('loadbots_repeated_frames_total')})",
                "resumes": f"sum({rate('loadbots_resumes_total')})",
            },
        ),
    ]


def is_a_queue_building() -> list[Panel]:
    return [
        graph(
            "How many asks wait?",
            "Asks that no storyteller has begun, and stories being written, over all storytellers.",
            "short",
            {
                "waiting": f"max({series('storyteller_queue_depth')})",
                "being written": f"sum({series('storyteller_batch_size')})",
            },
        ),
        graph(
            "How old is the oldest?",
            "Age of the ask that has waited longest. An alert fires above 10 s; at STORYTELLER_DEADLINE_S asks expire.",
            "s",
            {"oldest ask": f"max({series('storyteller_queue_oldest_seconds')})"},
        ),
        graph(
            "How long did those wait that were begun?",
            "From the accepted ask until a storyteller began to compute it.",
            "s",
            quantiles("storyteller_queue_wait_seconds"),
        ),
        graph(
            "How wrong was the promised wait?",
            "Difference between the ETA that a player was told and what came.",
            "s",
            quantiles("gateway_eta_error_seconds"),
        ),
    ]


def is_the_batch_full() -> list[Panel]:
    return [
        heatmap(
            "How full are the steps?",
            "How many steps were made with how many stories in them, over all storytellers.",
            "short",
            "storyteller_step_batch_size",
        ),
        graph(
            "How full is each storyteller?",
            "Stories in the batch as a share of its places. All at 100%: another storyteller would help.",
            "percentunit",
            {"{{instance}}": f"max by (instance) ({series('storyteller_batch_fill_ratio')})"},
        ),
        graph(
            "How long does a step take?",
            "Every story in the batch gets one token from a step.",
            "s",
            quantiles("storyteller_step_seconds"),
        ),
        graph(
            "Is there KV memory left?",
            "Tokens that the stories in the batch hold, and how many there is memory for.",
            "short",
            {"{{state}}": f"sum by (state) ({series('storyteller_kv_tokens')})"},
        ),
        graph(
            "How many tokens a second?",
            "Prefill: prompts read. Decode: story text written. Cached: prompt tokens that were already there.",
            "short",
            {"{{phase}}": f"sum by (phase) ({rate('storyteller_tokens_total')})"},
        ),
        graph(
            "How long are stories?",
            "Tokens of the stories that ended.",
            "short",
            quantiles("storyteller_story_tokens"),
        ),
    ]


def what_is_the_machine_doing() -> list[Panel]:
    return [
        graph(
            "Who computes?",
            "Processor cores that each process keeps busy.",
            "short",
            {"{{job}} {{instance}}": f"sum by (job, instance) ({rate('process_cpu_seconds_total')})"},
        ),
        graph(
            "Who has the memory?",
            "Resident memory of each process.",
            "bytes",
            {"{{job}} {{instance}}": f"sum by (job, instance) ({series('process_resident_memory_bytes')})"},
        ),
        graph(
            "Is a gateway's event loop late?",
            "How late the loop comes to what it should do now. Above 100 ms players feel it.",
            "s",
            {"{{instance}}": f"max by (instance) ({series('gateway_event_loop_lag_seconds')})"},
        ),
        graph(
            "Are file descriptors running out?",
            "Share of the process's limit; every connection takes one.",
            "percentunit",
            {
                "{{job}} {{instance}}": f"max by (job, instance) ({series('process_open_fds')} "
                f"/ {series('process_max_fds')})",
            },
        ),
        graph(
            "Who answers?",
            "Replicas that Prometheus finds and that answer.",
            "short",
            {"{{job}}": f"sum by (job) ({series('up')})"},
        ),
        graph(
            "Does Redis answer?",
            "Calls to Redis that failed and were tried again, in the time that one point stands for.",
            "short",
            {
                "gateways": f"sum(increase({series('gateway_redis_errors_total')}[$__rate_interval]))",
                "storytellers": f"sum(increase({series('storyteller_redis_errors_total')}[$__rate_interval]))",
            },
        ),
        graph(
            "Do storytellers die?",
            "Stories taken over from storytellers that went silent, and stories given up because "
            "their storytellers died of them, in the time that one point stands for.",
            "short",
            {
                "taken over": f"sum(increase({series('storyteller_redeliveries_total')}[$__rate_interval]))",
                "given up": f"sum(increase({series('storyteller_dead_letters_total')}[$__rate_interval]))",
            },
        ),
        table(
            "What do storytellers serve?",
            "Model, revision, batching and quantization of each storyteller.",
            "short",
            series("storyteller_info"),
            hidden=("Time", "Value", "__name__", "job"),
        ),
    ]


ROWS = {
    "Are players served?": are_players_served,
    "Are players served, as they saw it? (while bots play)": as_players_saw_it,
    "Is a queue building?": is_a_queue_building,
    "Is the batch full?": is_the_batch_full,
    "What is the machine doing?": what_is_the_machine_doing,
}

"""The scheduler, without a model: budget, turns, starvation, endings, under random crowds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storyteller.cache import Blocks, num_blocks_for
from storyteller.scheduler import MAX_PASSES, Batching, Scheduler, Step
from storyteller.story import BLOCK, Phase, Sampling, Story

END = 1


def a_story(name: str, num_prompt: int = 8, max_tokens: int = 4, **more: object) -> Story:
    start = sum(map(ord, name)) * 1000
    return Story(name, list(range(start, start + num_prompt)), Sampling(), max_tokens, **more)  # type: ignore[arg-type]


def a_scheduler(
    num_blocks: int = 100, batch_size: int = 8, batching: Batching = "continuous", **more: int
) -> Scheduler:
    return Scheduler(batching, batch_size, Blocks(num_blocks), more.get("step_tokens", 64))


def run_step(scheduler: Scheduler, token: int = 7) -> Step:
    step = scheduler.schedule()
    scheduler.complete(step, [None if chunk.sampling is None else token for chunk in step.chunks])
    return step


def run_to_the_end(scheduler: Scheduler, limit: int = 10_000) -> None:
    for _ in range(limit):
        if not scheduler.num_held:
            return
        run_step(scheduler)
    raise AssertionError("some stories never end")


def test_a_story_reads_its_prompt_then_gets_one_token_a_step() -> None:
    scheduler, story = a_scheduler(), a_story("a", num_prompt=5, max_tokens=3)
    scheduler.add(story)
    first = run_step(scheduler)
    assert [list(chunk.tokens) for chunk in first.chunks] == [list(story.prompt)]
    assert first.num_prefill == 5
    second = run_step(scheduler)
    assert [(list(chunk.tokens), chunk.start) for chunk in second.chunks] == [([7], 5)]
    run_step(scheduler)
    assert (story.phase, story.finish_reason, story.num_told) == (Phase.ENDED, "length", 3)
    assert scheduler.num_held == 0
    assert scheduler.blocks.num_held == 0


def test_an_end_token_stops_a_story_and_counts_as_told() -> None:
    scheduler, story = a_scheduler(), a_story("a", stop_ids=frozenset({END}), max_tokens=9)
    scheduler.add(story)
    run_step(scheduler)
    run_step(scheduler, token=END)
    assert (story.finish_reason, story.num_told) == ("stop", 2)


def test_a_newcomer_joins_between_two_steps_of_another() -> None:
    scheduler = a_scheduler()
    scheduler.add(a_story("a", max_tokens=10))
    run_step(scheduler)
    scheduler.add(a_story("b", num_prompt=20, max_tokens=10))
    step = run_step(scheduler)
    assert [len(chunk.tokens) for chunk in step.chunks] == [1, 20]


def test_a_long_prompt_is_read_in_pieces_and_never_stalls_a_running_story() -> None:
    scheduler = a_scheduler(step_tokens=16)
    scheduler.add(a_story("a", max_tokens=30))
    run_step(scheduler)
    scheduler.add(a_story("b", num_prompt=40, max_tokens=2))
    sizes = [[len(chunk.tokens) for chunk in run_step(scheduler).chunks] for _ in range(3)]
    assert sizes == [[1, 15], [1, 15], [1, 10]]


def test_a_static_batch_runs_to_its_longest_story_and_admits_nobody_before() -> None:
    scheduler = a_scheduler(batching="static")
    scheduler.add(a_story("short", max_tokens=2))
    scheduler.add(a_story("long", max_tokens=5))
    run_step(scheduler)
    scheduler.add(a_story("late", max_tokens=1))
    steps = [run_step(scheduler) for _ in range(4)]
    assert [step.num_idle for step in steps] == [0, 1, 1, 1]
    assert [story.id for story in scheduler.waiting] == ["late"]
    run_to_the_end(scheduler)


def test_single_writes_one_story_after_the_other() -> None:
    scheduler = a_scheduler(batching="single")
    for name in "abc":
        scheduler.add(a_story(name))
    while scheduler.num_held:
        assert len(run_step(scheduler).chunks) == 1


def test_a_cancelled_story_frees_its_place_and_memory_for_the_next_step() -> None:
    scheduler = a_scheduler(batch_size=1)
    first, second = a_story("a", max_tokens=50), a_story("b", num_prompt=9)
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    scheduler.end(first, "cancelled")
    assert scheduler.blocks.num_held == 0
    step = run_step(scheduler)
    assert [len(chunk.tokens) for chunk in step.chunks] == [9]


def test_a_story_cancelled_while_its_step_is_computed_gets_no_token_more() -> None:
    scheduler, story = a_scheduler(), a_story("a", max_tokens=50)
    scheduler.add(story)
    step = scheduler.schedule()
    scheduler.end(story, "cancelled")
    assert scheduler.complete(step, [7]) == []
    assert story.num_told == 0


def test_a_resumed_story_goes_on_behind_what_was_told() -> None:
    scheduler, story = a_scheduler(), a_story("a", num_prompt=4, max_tokens=6, told=[11, 12, 13])
    scheduler.add(story)
    step = run_step(scheduler)
    assert list(step.chunks[0].tokens) == [*story.prompt, 11, 12, 13]
    run_to_the_end(scheduler)
    assert list(story.tokens[4:]) == [11, 12, 13, 7, 7, 7]


def test_the_beginning_that_two_stories_share_is_computed_once() -> None:
    scheduler = a_scheduler()
    prompt = list(range(3 * BLOCK + 5))
    scheduler.add(Story("a", prompt, Sampling(), 4))
    run_step(scheduler)
    scheduler.add(Story("b", [*prompt, 99], Sampling(), 4))
    step = run_step(scheduler)
    assert [len(chunk.tokens) for chunk in step.chunks] == [1, 1]
    assert scheduler.running[1].blocks[:3] == scheduler.running[0].blocks[:3]
    assert scheduler.blocks.num_held == num_blocks_for(len(prompt)) + 1
    run_to_the_end(scheduler)
    assert scheduler.blocks.num_held == 0


def test_a_beginning_that_ends_within_a_block_is_copied() -> None:
    scheduler = a_scheduler()
    voice = list(range(BLOCK + 9))
    scheduler.add(Story("a", [*voice, 501, 502], Sampling(), 4))
    run_step(scheduler)
    scheduler.add(Story("b", [*voice, 601], Sampling(), 4))
    scheduler.add(Story("c", [*voice[: BLOCK + 3], 701, 702], Sampling(), 4))
    step = run_step(scheduler)
    first, *newcomers = scheduler.running
    assert [(list(chunk.tokens), chunk.start) for chunk in step.chunks[1:]] == [
        ([601], BLOCK + 9),
        ([701, 702], BLOCK + 3),
    ]
    assert [chunk.source for chunk in step.chunks] == [None, first.blocks[1], first.blocks[1]]
    assert [story.num_cached for story in newcomers] == [BLOCK + 9, BLOCK + 3]
    assert all(story.blocks[0] == first.blocks[0] and story.blocks[1] != first.blocks[1] for story in newcomers)
    assert [chunk.source for chunk in run_step(scheduler).chunks] == [None, None, None], "once is enough"
    run_to_the_end(scheduler)
    scheduler.add(Story("d", [*voice, 801], Sampling(), 4))
    assert [len(chunk.tokens) for chunk in run_step(scheduler).chunks] == [1], "nobody holds it, but it is still there"


def test_a_small_story_passes_a_large_one_that_waits_but_not_for_ever() -> None:
    scheduler = a_scheduler(num_blocks=10, batch_size=8)
    scheduler.add(a_story("running", num_prompt=BLOCK, max_tokens=4 * BLOCK))
    run_step(scheduler)
    large = a_story("large", num_prompt=9 * BLOCK, max_tokens=1)
    scheduler.add(large)
    passed = 0
    while large.phase is Phase.WAITING:
        scheduler.add(a_story(f"small {passed}", num_prompt=2, max_tokens=2))
        passed += 1
        run_step(scheduler)
        assert passed < 200
    assert passed > 1, "nobody passed it"


def test_two_suspects_never_run_together() -> None:
    scheduler = a_scheduler()
    for name in "abc":
        scheduler.add(a_story(name, is_suspect=True))
    scheduler.add(a_story("d"))
    while scheduler.num_held:
        step = run_step(scheduler)
        assert sum(story.is_suspect for story in step.stories) <= 1


def test_what_can_never_fit_is_known_before() -> None:
    scheduler = a_scheduler(num_blocks=2)
    assert scheduler.fits(a_story("a", num_prompt=BLOCK, max_tokens=BLOCK + 1))
    assert not scheduler.fits(a_story("b", num_prompt=BLOCK, max_tokens=BLOCK + 2))


stories = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt
        st.integers(1, 60),  # max tokens
        st.integers(0, 30),  # arrives so many steps later than the one before
        st.integers(0, 3),  # prompt of which family: some share their beginnings
        st.one_of(st.none(), st.integers(0, 40)),  # cancelled at that step
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(
    stories=stories,
    num_blocks=st.integers(8, 40),
    batch_size=st.integers(1, 12),
    step_tokens=st.integers(2, 64),
    batching=st.sampled_from(["continuous", "static", "single"]),
)
def test_under_any_crowd_the_budget_holds_nobody_starves_and_every_story_ends(
    stories: list[tuple[int, int, int, int, int | None]],
    num_blocks: int,
    batch_size: int,
    step_tokens: int,
    batching: Batching,
) -> None:
    scheduler = a_scheduler(num_blocks, batch_size, batching, step_tokens=step_tokens)
    arrivals: list[tuple[int, Story, int | None]] = []
    at = 0
    for number, (num_prompt, max_tokens, later, family, cancelled) in enumerate(stories):
        at += later
        prompt = [family * 1000 + position for position in range(num_prompt)]
        arrivals.append((at, Story(str(number), prompt, Sampling(), max_tokens), cancelled))
    arrived: list[Story] = []
    for now in range(5000):
        while arrivals and arrivals[0][0] <= now:
            arrived.append(arrivals.pop(0)[1])
            assert scheduler.fits(arrived[-1])  # the largest has 8 blocks
            scheduler.add(arrived[-1])
        if not arrivals and not scheduler.num_held:
            break
        step = scheduler.schedule()
        assert len(step.chunks) <= scheduler.batch_size
        assert sum(len(chunk.tokens) for chunk in step.chunks) <= max(step_tokens, scheduler.batch_size + 1)
        if now % 5 == 3 and scheduler.running:
            scheduler.end(scheduler.running[now % len(scheduler.running)], "cancelled")
        scheduler.complete(step, [None if chunk.sampling is None else 7 for chunk in step.chunks])
        assert scheduler.blocks.num_held <= num_blocks
        for story in scheduler.running:
            if story.phase is Phase.RUNNING:
                assert len(story.blocks) * BLOCK >= len(story.tokens)
        assert all(count <= MAX_PASSES for count in scheduler._passes.values())
    assert all(story.phase is Phase.ENDED for story in arrived)
    assert len(arrived) == len(stories)
    assert scheduler.blocks.num_held == 0


def test_blocks_that_nobody_holds_are_found_until_their_memory_is_wanted() -> None:
    blocks = Blocks(4)
    prompt = list(range(2 * BLOCK))
    held = blocks.hold((), 2)
    blocks.publish(prompt, held)
    blocks.release(held)
    assert blocks.num_held == 0
    assert blocks.find([*prompt, 5]) == (held, 2 * BLOCK, None)
    assert blocks.find(prompt) == (held[:1], 2 * BLOCK - 1, held[1]), "the last token must be computed"
    others = blocks.hold((), 3)
    assert blocks.find([*prompt, 5]) == (held[:1], BLOCK, None), "a chain is forgotten from its end"
    with pytest.raises(MemoryError, match="expected 2 blocks, 1 are left"):
        blocks.hold((), 2)
    blocks.release(others)

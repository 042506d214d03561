"""The queue's Lua scripts against real servers: every race that two processes could run into, as one order of calls."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from redis.exceptions import ResponseError

from storyteller.wire import Ending, Key, Told
from tests.reliability.servers import SERVERS, Queue, start


@pytest.fixture(scope="module", params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = start(request.param, tmp_path_factory.mktemp("server"))
    yield server.url
    server.stop()


@pytest.fixture
def queue(url: str) -> Iterator[Queue]:
    queue = Queue(url)
    queue.redis.flushall()
    yield queue
    queue.redis.close()


def text(words: str, offset: int = 0, count: int = 1) -> Told:
    return Told(offset, words, tuple(range(count)), count)


STOP = Ending("stop", 3, 1)


def die(queue: Queue, teller: str) -> None:
    """A storyteller is killed and found dead."""
    queue.pass_lease(teller)
    queue.sweep()


def test_an_ask_whose_answer_was_lost_counts_once(queue: Queue) -> None:
    assert queue.ask("s", "ann", limit=1) == queue.ask("s", "ann", limit=1) == "accepted"
    assert queue.num_asks() == 1
    assert queue.waiting() == ["s"]
    assert queue.ask("t", "ann", limit=1) == "rate_limited"


def test_an_ask_that_is_repeated_after_it_was_begun_or_has_ended_is_not_told_again(queue: Queue) -> None:
    queue.ask("s")
    [[_, _, attempt, *_]] = queue.take("a")
    assert queue.ask("s") == "accepted"
    queue.tell("s", attempt, 1, STOP)
    assert queue.ask("s") == "accepted"
    assert queue.take("a") == []
    assert queue.num_asks() == 0


def test_a_take_whose_answer_was_lost_gives_the_same_stories_again_and_blames_nobody(queue: Queue) -> None:
    queue.ask("s")
    queue.ask("t")
    queue.take("a", 1)
    assert queue.beat("a") == []
    again = queue.take("a", 2)
    assert [(story, attempt, crashes) for story, _, attempt, _, crashes, *_ in again] == [
        (b"s", 2, b"0"),
        (b"t", 1, b"0"),
    ]
    assert queue.tell("s", 1, 1, text("a")) == "refused"
    assert queue.tell("s", 2, 1, text("a")) == "told"
    assert queue.take("a", 2, ["s", "t"]) == []


def test_a_storyteller_that_leaves_gives_back_even_what_it_never_knew_of(queue: Queue) -> None:
    for story in ("s", "t"):
        queue.ask(story)
    queue.take("a", 2)
    queue.beat("a", ("s", 1))
    queue.call("handback", "a")
    assert queue.waiting() == ["s", "t"]
    assert queue.redis.xinfo_consumers(Key.ASKS, Key.GROUP) == []
    assert queue.redis.zcard(Key.LIVE) == queue.redis.hlen(Key.HOUSES) == 0


def test_a_sleeper_cannot_write_a_word_of_what_another_holds(queue: Queue) -> None:
    queue.ask("s")
    queue.take("a")
    assert queue.tell("s", 1, 1, text("one ")) == "told"
    die(queue, "a")
    assert queue.tell("s", 1, 2, text("two", 4)) == "refused", "while nobody holds it"
    [[_, _, attempt, _, _, _, told]] = queue.take("b")
    assert len(told) == 3  # begun, text, waiting
    assert queue.tell("s", 1, 2, text("two", 4)) == "refused"
    assert queue.tell("s", 1, 2, STOP) == "refused"
    assert queue.beat("a", ("s", 1)) == ["lost"]
    assert queue.pending("b") == ["s"]
    assert queue.tell("s", attempt, 1, text("two", 4)) == "told"
    assert queue.text("s") == "one two"


def test_a_telling_that_is_repeated_changes_nothing_and_one_behind_a_hole_is_refused(queue: Queue) -> None:
    queue.ask("s")
    queue.take("a")
    assert [queue.tell("s", 1, 1, text("one ")) for _ in range(2)] == ["told", "told"]
    before = queue.redis.dump(Key.TOLD + "s")
    queue.tell("s", 1, 2, text("two ", 4))
    queue.redis.restore(Key.TOLD + "s", 0, before, replace=True)  # Redis came back without its last second
    assert queue.tell("s", 1, 3, text("three", 8)) == "refused"
    [[_, _, attempt, *_]] = queue.take("a")
    assert queue.text("s") == "one "
    assert queue.tell("s", attempt, 1, text("two three", 4)) == "told"
    assert queue.tell("s", attempt, 2, STOP) == queue.tell("s", attempt, 2, STOP) == "told"
    assert len(queue.endings("s")) == 1


def test_while_redis_was_away_nobody_died_and_nobody_left(queue: Queue) -> None:
    queue.ask("s")
    queue.take("a")
    queue.pass_lease("a")
    queue.redis.hset(Key.STORY + "s", "heard", queue.now() - 1)
    long_ago = queue.now() - 60_000
    queue.redis.hset(Key.PULSE, mapping={"last": long_ago, "since": long_ago - 60_000})
    assert queue.sweep()[:2] == [0, 0]
    assert queue.beat("a", ("s", 1)) == ["held"]
    queue.settle()
    assert queue.beat("a", ("s", 1)) == ["unheard"]
    assert queue.sweep()[:2] == [0, 0]
    queue.pass_lease("a")
    assert queue.sweep()[0] == 1


def test_an_ask_that_kills_three_times_ends_and_those_beside_it_live(queue: Queue) -> None:
    innocents = ["i", "j", "k"]
    for story in ("i", "poison", "j", "k"):
        queue.ask(story)
    finished: list[str] = []
    for death in range(20):
        teller = f"t{death}"
        for story, _, attempt, _, crashes, *_ in queue.take(teller):
            if story == b"poison":
                die(queue, teller)
                break
            if crashes == b"2":  # nobody beside it who could be blamed for its death, so it gets to its ending
                assert queue.tell(story.decode(), attempt, 1, STOP) == "told"
                finished.append(story.decode())
    assert [ending.finish_reason for ending in queue.endings("poison")] == ["failed"]
    assert sorted(finished) == innocents
    [(_, letter)] = queue.redis.xrange(Key.DEAD)
    assert letter == {b"story": b"poison", b"ask": b"ask poison"}


def test_two_suspects_are_never_in_the_same_hands(queue: Queue) -> None:
    for story in ("s", "t"):
        queue.ask(story)
    for teller in ("a", "b"):
        assert len(queue.take(teller)) == 2
        die(queue, teller)
    queue.ask("fresh")
    assert [taken[0] for taken in queue.take("c")] == [b"s", b"fresh"]
    assert queue.take("c", held=["s", "fresh"]) == []
    assert queue.take("c") != [], "given again after a lost answer"
    assert sorted(queue.pending("c")) == ["fresh", "s"]
    assert [taken[0] for taken in queue.take("d")] == [b"t"]


def test_a_cancelled_story_whose_storyteller_is_dead_ends_without_another_one(queue: Queue) -> None:
    queue.ask("s", "ann")
    queue.take("a")
    queue.tell("s", 1, 1, text("one", count=5))
    assert queue.call("cancel", "s") == b"asked"
    die(queue, "a")
    [ending] = queue.endings("s")
    assert (ending.finish_reason, ending.completion_tokens) == ("cancelled", 5)
    assert queue.redis.exists(Key.PLAYER + "ann") == 0


def test_a_cancel_at_every_stage_gives_one_ending(queue: Queue) -> None:
    for story in ("waits", "begun", "ending", "ended"):
        queue.ask(story)
    queue.take("a", 0)
    assert queue.call("cancel", "waits") == b"cancelled"
    taken = {story.decode(): attempt for story, _, attempt, *_ in queue.take("a")}
    queue.tell("ended", taken["ended"], 1, STOP)
    assert queue.call("cancel", "ended") == b"ended"
    assert queue.call("cancel", "ending") == b"asked"
    queue.tell("ending", taken["ending"], 1, STOP)
    assert queue.call("cancel", "begun") == b"asked"
    assert queue.beat("a", ("begun", taken["begun"]), ("ending", taken["ending"])) == ["cancelled", "lost"]
    queue.tell("begun", taken["begun"], 1, Ending("cancelled", 3, 1))
    assert queue.call("cancel", "never") == b"gone"
    for story in ("waits", "begun", "ending", "ended"):
        assert len(queue.endings(story)) == 1, story
    assert queue.num_asks() == len(queue.waiting()) == len(queue.pending()) == 0


def test_what_nobody_begins_expires_and_what_nobody_goes_on_with_fails(queue: Queue) -> None:
    queue.ask("never")
    queue.ask("begun")
    queue.redis.zadd(Key.WAITING, {"begun": 0})
    queue.take("a", 1)
    die(queue, "a")
    queue.redis.hset(Key.STORY + "never", "accepted", queue.now() - 61_000)
    queue.redis.hset(Key.STORY + "begun", "put_back", queue.now() - 61_000)
    assert queue.sweep()[2:5] == [1, 0, 1]
    assert [queue.endings(story)[0].finish_reason for story in ("never", "begun")] == ["expired", "failed"]


def test_a_begun_story_waits_on_while_a_storyteller_lives(queue: Queue) -> None:
    queue.ask("s")
    queue.take("a")
    die(queue, "a")
    queue.redis.hset(Key.STORY + "s", "put_back", queue.now() - 61_000)
    queue.beat("b")
    queue.sweep()
    assert queue.endings("s") == []


def test_a_full_memory_leaves_nothing_half_done(queue: Queue) -> None:
    queue.ask("s", "ann")
    queue.redis.config_set("maxmemory-policy", "noeviction")
    queue.redis.config_set("maxmemory", 1)
    try:
        for name, args in (("take", ("a", 1, 60_000)), ("cancel", ("s",)), ("ask", ("t", "", "", 1, 0, 9, 9, "g", 0))):
            with pytest.raises(ResponseError, match=r"OOM|maxmemory"):
                queue.call(name, *args)
            assert queue.waiting() == ["s"]
            assert queue.pending() == []
            assert queue.num_asks() == 1
    finally:
        queue.redis.config_set("maxmemory", 0)
    [[story, _, attempt, *_]] = queue.take("a")
    assert (story, attempt) == (b"s", 1)


@pytest.mark.parametrize(
    "call",
    [
        ("take", "a", 1, 1),
        ("tell", "s", 1, 1, "", 3, 2, "text", "x"),
        ("beat", "a", "house", 0, "s", 1),
        ("sweep", 1),
        ("handback", "a"),
        ("cancel", "s"),
        ("heard", 1, "s"),
        ("ask", "s", "x", "ann", 1, 0, 9, 9, "g", 0),
    ],
    ids=lambda call: str(call[0]),
)
def test_every_script_stands_on_an_empty_server(queue: Queue, call: tuple[str, ...]) -> None:
    queue.redis.flushall()
    queue.call(*call)
    assert queue.redis.exists(Key.STORY + "s") == (call[0] == "ask")


def test_a_story_that_was_deleted_by_hand_does_not_stop_the_sweep(queue: Queue) -> None:
    for story in ("s", "t"):
        queue.ask(story)
    queue.take("a")
    queue.redis.delete(Key.STORY + "s", Key.TOLD + "s")
    queue.pass_lease("a")
    assert queue.sweep()[0] == 1
    assert queue.waiting() == ["t"]
    assert queue.num_asks() == 1

"""Any order of asks, takes, tellings, cancels, deaths, sleeps and losses of answers keeps the queue's promises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from storyteller.wire import Ending, Key, Told
from tests.reliability.servers import SERVERS, Queue, start

PLAYERS = ["", "ann", "ben"]
LIMIT = 2
TELLERS = st.integers(0, 2)
PICK = st.integers(0, 1000)


@dataclass
class Hand:
    """What a storyteller believes about one story."""

    attempt: int
    number: int  # tellings so far
    offset: int
    count: int


@dataclass
class Teller:
    name: str
    hands: dict[str, Hand] = field(default_factory=dict)


class Orders(RuleBasedStateMachine):
    """Three storytellers, three players, one queue."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.queue = Queue(self.url)
        self.queue.redis.flushall()
        self.players: dict[str, str] = {}  # every accepted story
        self.num_names = 0
        self.tellers = [self.new_teller() for _ in range(3)]
        self.queue.settle()

    def teardown(self) -> None:
        """Whatever happened: one healthy storyteller brings every story to its one ending."""
        for teller in self.tellers:
            self.queue.pass_lease(teller.name)
        self.queue.sweep()
        healthy = self.new_teller()
        for _ in range(len(self.players) + 1):
            self.receive(healthy, self.queue.take(healthy.name, 100, list(healthy.hands)))
            for story, hand in tuple(healthy.hands.items()):
                assert self.queue.tell(story, hand.attempt, 1, Ending("stop", 3, hand.count)) == "told"
                del healthy.hands[story]
        self.every_story_stands_in_one_place()
        for story in self.players:
            assert len(self.queue.endings(story)) == 1
        assert self.queue.num_asks() == len(self.queue.waiting()) == len(self.queue.pending()) == 0
        assert self.queue.redis.keys(Key.PLAYER + "*") == []
        self.queue.redis.close()

    def new_teller(self) -> Teller:
        self.num_names += 1
        return Teller(f"t{self.num_names}")

    def receive(self, teller: Teller, taken: list[list[bytes]]) -> None:
        for raw, _, attempt, _, _, _, _ in taken:
            story = raw.decode()
            told = [entry for entry in self.queue.told(story) if isinstance(entry, Told)]
            count = told[-1].count if told else 0
            teller.hands[story] = Hand(int(attempt), 0, sum(len(entry.text) for entry in told), count)

    def story(self, pick: int) -> str:
        return list(self.players)[pick % len(self.players)] if self.players else "none"

    @rule(player=st.sampled_from(PLAYERS), again=st.booleans())
    def ask(self, player: str, again: bool) -> None:
        story = f"s{len(self.players)}"
        unfinished = self.queue.redis.scard(Key.PLAYER + player) if player else 0
        answer = self.queue.ask(story, player, limit=LIMIT)
        assert answer == ("rate_limited" if player and unfinished >= LIMIT else "accepted")
        if answer == "accepted":
            self.players[story] = player
            if again:
                assert self.queue.ask(story, player, limit=LIMIT) == "accepted"

    @rule(who=TELLERS, count=st.integers(1, 4), is_lost=st.booleans())
    def take(self, who: int, count: int, is_lost: bool) -> None:
        teller = self.tellers[who]
        taken = self.queue.take(teller.name, count, list(teller.hands))
        if not is_lost:
            self.receive(teller, taken)

    @rule(who=TELLERS, pick=PICK, ends=st.booleans(), is_lost=st.booleans())
    def tell(self, who: int, pick: int, ends: bool, is_lost: bool) -> None:
        teller = self.tellers[who]
        if not teller.hands:
            return
        story = list(teller.hands)[pick % len(teller.hands)]
        hand = teller.hands[story]
        content = Ending("stop", 3, hand.count) if ends else Told(hand.offset, "ab", (1, 2), hand.count + 2)
        answers = {self.queue.tell(story, hand.attempt, hand.number + 1, content) for _ in range(1 + is_lost)}
        assert len(answers) == 1
        if ends or answers != {"told"}:
            del teller.hands[story]
        else:
            teller.hands[story] = Hand(hand.attempt, hand.number + 1, hand.offset + 2, hand.count + 2)

    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        self.queue.call("cancel", self.story(pick))

    @rule(who=TELLERS)
    def beat(self, who: int) -> None:
        teller = self.tellers[who]
        held = [(story, hand.attempt) for story, hand in teller.hands.items()]
        for (story, _), answer in zip(held, self.queue.beat(teller.name, *held), strict=True):
            if answer == "lost":
                del teller.hands[story]

    @rule(who=TELLERS, is_found=st.booleans(), is_asleep=st.booleans())
    def die_or_sleep(self, who: int, is_found: bool, is_asleep: bool) -> None:
        self.queue.pass_lease(self.tellers[who].name)
        if not is_asleep:
            self.tellers[who] = self.new_teller()
        if is_found:
            self.queue.sweep()

    @rule(who=TELLERS)
    def leave(self, who: int) -> None:
        self.queue.call("handback", self.tellers[who].name)
        self.tellers[who] = self.new_teller()

    @rule(pick=PICK, is_late=st.booleans())
    def neglect(self, pick: int, is_late: bool) -> None:
        """Nobody listens to a story any more, or nobody began it in time."""
        story, long_ago = self.story(pick), self.queue.now() - 100_000
        if story in self.players and not self.queue.redis.hexists(Key.STORY + story, "ended"):
            self.queue.redis.hset(Key.STORY + story, "accepted" if is_late else "heard", long_ago)
        self.queue.settle()
        self.queue.sweep()

    @invariant()
    def every_story_stands_in_one_place(self) -> None:
        waiting, pending = self.queue.waiting(), self.queue.pending()
        unfinished = {story for story in self.players if not self.queue.endings(story)}
        assert sorted(waiting + pending) == sorted(unfinished)
        assert self.queue.num_asks() == len(unfinished)
        for player in PLAYERS[1:]:
            places = {story.decode() for story in self.queue.redis.smembers(Key.PLAYER + player)}
            assert places == {story for story in unfinished if self.players[story] == player}

    @invariant()
    def every_story_is_whole(self) -> None:
        for story in self.players:
            offset = 0
            entries = self.queue.told(story)
            for entry in entries:
                if isinstance(entry, Told):
                    assert entry.offset == offset
                    offset += len(entry.text)
            endings = self.queue.endings(story)
            assert len(endings) <= 1
            assert not endings or entries[-1] == endings[0], "nothing is told behind the ending"
            if endings:
                assert endings[0].completion_tokens == offset


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path: object) -> Iterator[str]:
    server = start(request.param, tmp_path)  # type: ignore[arg-type]
    yield server.url
    server.stop()


def test_any_order_of_events_keeps_the_promises(url: str) -> None:
    Orders.url = url
    run_state_machine_as_test(
        Orders,
        settings=settings(
            max_examples=30,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )

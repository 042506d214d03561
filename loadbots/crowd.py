"""The players of one process: who comes when, and the looking back afterwards.

A squad is handed its share of a crowd and gives every record to `sink` as soon as it is there. Its life is
`gather` (connect, warm up) → `perform` (the measured time) → `look_back` (late frames, replays, the first story once
more) → `disperse`. Each of them may be cancelled; `disperse` may follow at any point.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from websockets.exceptions import ConnectionClosed

from loadbots.arrivals import Arrivals
from loadbots.asks import Wish, wish
from loadbots.bot import Bot
from loadbots.chaos import Fate
from loadbots.config import Config
from loadbots.connection import GoneError, LeavingError, NonsenseError, RefusedError, UnanswerableError
from loadbots.replay import compare
from loadbots.told import Amendment, Phase, Strain, Telling, Told, Word

CONNECTING = 64
"""So many players connect at the same time."""
REPLAYING = 16
"""So many stories are replayed at the same time."""
LINGER_S = 0.25
"""How long after the last ending late frames are waited for."""
READABLE_S = 540.0
"""Stories that ended longer ago are not replayed: the gateway forgets them after ten minutes."""
STORM_LOOK_S = 0.01

LATE_LOOK_S = 0.05

Sink = Callable[[Word], None]


class Player(Protocol):
    """What a squad needs of a player, whichever door it knocks at."""

    left: bool
    heard_frames: int
    late: list[Amendment]

    async def connect(self) -> None: ...
    async def tell(self, wish: Wish, phase: Phase, intended: float, fate: Fate) -> Telling: ...
    async def linger(self, seconds: float) -> None: ...
    async def close(self) -> None: ...


class Progress(msgspec.Struct, tag=True):
    """Where a squad stands, for the live view."""

    players: int = 0
    asking: int = 0
    begun: int = 0
    frames: int = 0


class Squad:
    def __init__(
        self, config: Config, indices: Sequence[int], size: int, arrivals: Arrivals | None, sink: Sink,
        player: Callable[[Config, int], Player], step: int = 1,
    ) -> None:  # fmt: skip
        self._config = config
        self._size = size  # players of the whole crowd
        self._arrivals = arrivals  # this squad's share of an open loop
        self._sink = sink
        self._new_player = player
        self._players = {index: player(config, index) for index in indices}
        self._step = step  # between this squad's indices: the number of squads
        self._door = asyncio.Semaphore(CONNECTING)
        self._kept: list[Telling] = []  # told stories, to be replayed
        self._asking = 0
        self._begun = 0

    @property
    def progress(self) -> Progress:
        here = sum(not player.left for player in self._players.values())
        frames = sum(player.heard_frames for player in self._players.values())
        return Progress(here, self._asking, self._begun, frames)

    async def gather(self) -> None:
        """Connect everyone, then tell the warm-up stories."""
        async with asyncio.TaskGroup() as group:
            for index, player in self._players.items():
                group.create_task(self._connect(player, index, 0))
        async with asyncio.TaskGroup() as group:
            for index, player in self._players.items():
                group.create_task(self._warm_up(index, player))

    async def perform(self, start: float) -> None:
        """The measured time, from the moment `start` on."""
        await asyncio.sleep(max(0.0, start - time.monotonic()))
        strain = Strain([], -time.process_time())
        async with asyncio.TaskGroup() as group:
            beside = [group.create_task(_watch_lateness(strain))]
            if self._config.chaos.storm:
                beside.append(group.create_task(self._storm()))
            if self._arrivals is None:
                async with asyncio.TaskGroup() as players:
                    for index, player in self._players.items():
                        players.create_task(self._ask_in_turn(index, player, start))
            else:
                await self._ask_by_the_clock(self._arrivals, start)
            for task in beside:
                task.cancel()
        strain.cpu_s += time.process_time()
        self._sink(strain)

    async def look_back(self, *, repeat: bool) -> None:
        """Late frames, replays, and with `repeat` the first story once more: the same ask, the same text."""
        here = [player for player in self._players.values() if not player.left]
        async with asyncio.TaskGroup() as group:
            for player in here:
                group.create_task(player.linger(LINGER_S))
        for player in self._players.values():
            for amendment in player.late:
                self._sink(amendment)
        stories = deque(sorted(self._kept, key=lambda telling: (telling.wish.player, telling.wish.number)))
        first = next((telling for telling in stories if telling.told.good), None)
        if repeat and first and here:
            await self._repeat(here[0], first)
        async with asyncio.TaskGroup() as group:
            for player in here[:REPLAYING]:
                if isinstance(player, Bot):
                    group.create_task(self._replay(player, stories))

    async def disperse(self) -> None:
        async with asyncio.TaskGroup() as group:
            for player in self._players.values():
                group.create_task(player.close())

    async def _connect(self, player: Player, index: int, number: int) -> None:
        """Make sure of a connection before an ask: its time is not the story's."""
        async with self._door:
            try:
                await player.connect()
            except (RefusedError, GoneError, NonsenseError) as failed:
                player.left = True
                told = Told(index, number, "measured", time.monotonic())
                told.fail(failed.code if isinstance(failed, RefusedError) else "connection")
                self._sink(told)

    async def _warm_up(self, index: int, player: Player) -> None:
        for number in range(-self._config.warmup, 0):
            if not player.left:
                telling = await player.tell(wish(self._config.seed, index, number), "warmup", time.monotonic(), Fate())
                self._sink(telling.told)

    async def _ask_in_turn(self, index: int, player: Player, start: float) -> None:
        """Closed loop: ask, hear to the end, think, ask again."""
        config = self._config
        await asyncio.sleep(config.ramp_up * index / self._size)
        number = 0
        while not player.left and (
            number < config.stories if config.duration is None else time.monotonic() < start + config.duration
        ):
            if number and config.think:
                await asyncio.sleep(config.think)
            if number:
                await self._connect(player, index, number)
            if player.left:
                break
            await self._tell(player, wish(config.seed, index, number), time.monotonic())
            number += 1

    async def _ask_by_the_clock(self, arrivals: Arrivals, start: float) -> None:
        """Open loop: every ask at its moment, by a player who has none running; there are more when needed."""
        idle = deque(self._players.values())

        async def one(player: Player, number: int, intended: float) -> None:
            await self._tell(player, wish(self._config.seed, number, 0), intended)
            if not player.left:
                idle.append(player)

        async with asyncio.TaskGroup() as group:
            for number, offset in arrivals:
                await asyncio.sleep(max(0.0, start + offset - time.monotonic()))
                player = idle.popleft() if idle else self._one_more()
                if player is None:
                    told = Told(number, 0, "measured", start + offset, ended=start + offset)
                    told.fail("no_player")
                    self._sink(told)
                elif not player.left:
                    group.create_task(one(player, number, start + offset))

    def _one_more(self) -> Player | None:
        if len(self._players) >= self._config.max_players:
            return None
        index = max(self._players, default=-1) + self._step
        self._players[index] = self._new_player(self._config, index)
        return self._players[index]

    async def _tell(self, player: Player, wanted: Wish, intended: float) -> None:
        config = self._config
        self._asking += 1
        self._begun += 1
        try:
            fate = config.chaos.fate(config.seed, wanted.player, wanted.number)
            telling = await player.tell(wanted, "measured", intended, fate)
        finally:
            self._asking -= 1
        self._sink(telling.told)
        wanted_again = telling.story is not None and telling.told.ending is not None
        if wanted_again and len(self._kept) < config.verify:
            self._kept.append(telling)

    async def _storm(self) -> None:
        """Cut every socket at once, as often as asked for, in the middle of stories."""
        storms = self._config.chaos.storm
        total = len(self._arrivals or ()) or len(self._players) * self._config.stories
        for number in range(1, storms + 1):
            due: int | None = None  # the storm comes when so many frames were heard: in the middle of stories
            while due is None or self.progress.frames < due:
                await asyncio.sleep(STORM_LOOK_S)
                if due is None and self._begun >= total * number / (storms + 1):
                    due = self.progress.frames + self._asking
            for player in self._players.values():
                if isinstance(player, Bot):
                    player.drop()

    async def _repeat(self, player: Player, first: Telling) -> None:
        again = await player.tell(first.wish, "check", time.monotonic(), Fate())
        self._sink(again.told)
        if again.told.good and again.told.digest != first.told.digest and isinstance(player, Bot):
            fault = "the same ask gave another text at the end"
            self._sink(Amendment(first.wish.player, first.wish.number, faults=[fault]))

    async def _replay(self, player: Bot, stories: deque[Telling]) -> None:
        while stories and not player.left:
            telling = stories.popleft()
            told, fault = telling.told, None
            if told.ended is None or telling.story is None or time.monotonic() - told.ended > READABLE_S:
                continue
            try:
                self._sink(compare(telling, *await player.hear_again(telling.story)))
            except UnanswerableError as refused:
                fault = None if told.ending == "failed" else f"its replay was refused: {refused.code}"
            except (TimeoutError, ConnectionClosed, LeavingError, RefusedError, GoneError, NonsenseError) as failed:
                fault = f"its replay failed: {failed or 'no answer'}"
                player.left = True
            if fault:
                self._sink(Amendment(told.player, told.number, faults=[fault]))


async def _watch_lateness(strain: Strain) -> None:
    """How much later than asked this process wakes up: what its own work adds to every latency."""
    while True:
        due = time.monotonic() + LATE_LOOK_S
        await asyncio.sleep(LATE_LOOK_S)
        strain.late.append(max(0.0, time.monotonic() - due))

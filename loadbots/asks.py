"""What the players ask for: three words and a seed for story i of player p, from (--seed, p, i) alone.

Two runs with the same `--seed` ask for the same stories, however many players there are, in whatever order they come
and over however many processes they are spread.
"""

from __future__ import annotations

import random

import msgspec

WORDS = (
    "dragon", "castle", "brave", "river", "lantern", "whisper", "forest", "hollow", "crown",
    "shadow", "ember", "wolf", "mountain", "silver", "harbour", "storm", "raven", "bridge",
    "secret", "garden", "winter", "candle", "thief", "sailor", "island", "mirror", "giant", "honey",
    "orchard", "bell", "tower", "feather", "moon", "knight", "witch", "puzzle", "marble", "cavern",
    "spark", "meadow", "pirate", "compass", "thunder", "velvet", "market", "fiddle", "fox", "owl",
    "clockwork", "desert", "oasis", "camel", "spice", "carpet", "lamp", "genie", "scroll", "ink",
    "quill", "library", "dusty", "attic", "trunk", "key", "door", "stair", "cellar", "well", "frog",
    "prince", "princess", "kitchen", "bread", "baker", "oven", "snow", "sledge", "bear", "den",
    "berry", "path", "stone", "troll", "goat", "hill", "shepherd", "flute", "song", "dance",
    "feast", "king", "queen", "sword", "shield", "armour", "horse", "stable", "hay", "barn", "cat",
    "mouse", "cheese", "moonlight", "pond", "duck", "reed", "boat", "net", "fisher", "wave",
    "lighthouse", "fog", "whale", "shell", "pearl", "mermaid", "sand", "wind", "kite",
)  # fmt: skip


class Wish(msgspec.Struct, frozen=True):
    """One story to ask for."""

    player: int
    number: int
    words: tuple[str, ...]
    seed: int


def dice(*what: object) -> random.Random:
    """A random generator that depends on `what` alone, the same in every process and on every machine."""
    return random.Random("/".join(str(part) for part in what))


def wish(seed: int, player: int, number: int) -> Wish:
    """Story `number` of `player`. Warm-up stories have negative numbers."""
    rolled = dice(seed, player, number)
    return Wish(player, number, tuple(rolled.sample(WORDS, 3)), rolled.randrange(2**63))

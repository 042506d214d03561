"""Which door the players knock at, and whether anybody answers there."""

from __future__ import annotations

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from loadbots.bot import Bot
from loadbots.config import Config
from loadbots.connection import NonsenseError, RefusedError, close_code, explain, open_connection
from loadbots.crowd import Player


class NoAnswerError(Exception):
    """There is nobody to send a crowd to; one line for a person."""


def new_player(config: Config, index: int) -> Player:
    if config.openai:
        from loadbots.openai import OpenAIPlayer  # aiohttp is wanted at this door only

        return OpenAIPlayer(config, index)
    return Bot(config, index)


async def knock(config: Config) -> Config:
    """Whether anybody answers, before a crowd is sent; the config, completed with what the answer told."""
    if config.openai:
        from loadbots.openai import NoServerError, learn

        try:
            return await learn(config)
        except NoServerError as silent:
            raise NoAnswerError(str(silent)) from None
    for url in config.url:
        await _knock_at_gateway(config, url)
    return config


async def _knock_at_gateway(config: Config, url: str) -> None:
    try:
        connection = await open_connection(url, f"{config.run}-knock", config.auth_key)
        await connection.close()
    except ConnectionClosed as closed:
        reason = closed.rcvd.reason if closed.rcvd else ""
        raise NoAnswerError(f"{url} closed the hello with {close_code(closed)} {reason}".rstrip()) from None
    except (RefusedError, NonsenseError) as failed:
        raise NoAnswerError(f"{url}: {failed}") from None
    except (OSError, TimeoutError, InvalidHandshake, InvalidURI) as failed:
        raise NoAnswerError(f"{url} does not answer: {explain(failed)}") from None

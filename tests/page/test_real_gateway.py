"""The page as a gateway serves it: its policy, its port, and a story that survives its gateway."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from playwright.async_api import Page, async_playwright, expect

from tests.checkpoints import make_checkpoint
from tests.page.test_page import ARGUMENTS, CHROMIUM, ask, pytestmark  # noqa: F401
from tests.processes import Stack, stack, wait_until


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "llama")
    with stack(tmp_path_factory.mktemp("stack"), model) as running:
        running.storyteller()
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def page() -> AsyncIterator[Page]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        context = await browser.new_context(reduced_motion="reduce")
        yield await context.new_page()
        await browser.close()


async def tell(page: Page) -> str:
    """The whole story, once it is told."""
    await expect(page.get_by_role("button", name=re.compile("New story|Ask for your own"))).to_be_visible(
        timeout=60_000
    )
    return await page.locator("#story").inner_text()


async def test_the_page_tells_a_story_and_the_same_one_again_and_to_a_listener(running: Stack, page: Page) -> None:
    gateway, violations = running.gateway(), list[str]()
    wait_until(gateway.is_ready, "a ready gateway")
    page.on("console", lambda message: violations.append(message.text) if message.type == "error" else None)
    await page.goto(gateway.http)
    await expect(page.get_by_label("The Hearth Keeper")).to_be_checked()
    await ask(page, "fox", "lantern", "storm")
    story = await tell(page)
    assert story
    await page.get_by_role("button", name="Tell it again").click()
    assert await tell(page) == story
    friend = await page.context.new_page()
    await friend.goto(page.url)
    assert await tell(friend) == story
    assert violations == []


async def test_a_story_goes_on_in_the_page_after_its_gateway_was_killed(running: Stack, page: Page) -> None:
    gateway = running.gateway()
    wait_until(gateway.is_ready, "a ready gateway")
    await page.goto(gateway.http)
    await expect(page.get_by_label("The Hearth Keeper")).to_be_checked()
    await ask(page, "fox")
    whole = await tell(page)
    await page.get_by_role("button", name="Tell it again").click()
    await expect(page.locator("#story")).not_to_be_empty()
    gateway.kill()
    running.gateway(gateway.ws_port, GATEWAY_ORIGINS=gateway.http)
    assert await tell(page) == whole

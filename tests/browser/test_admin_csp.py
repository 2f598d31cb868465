"""The admin in a real Chromium, under the project's strict policy: nothing inline, no errors."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from django.contrib.auth.models import User
from playwright.async_api import Browser, ConsoleMessage, Page, expect

from echomq_app.models import Job
from echomq_app.stream import Stream
from project.seismic.quakes import QUEUE
from tests import jobtasks
from tests.browser.conftest import Site
from tests.wait import wait_until, wait_until_async

pytestmark = [pytest.mark.database, pytest.mark.asyncio(loop_scope="module")]

FAVICON = re.compile(r"/favicon\.ico")
FASTER = "Autofocus processing was blocked because a document already has a focused element."
"""Said when the test has filled a field before the page had put its cursor there."""


@pytest.fixture(scope="module")
def jobs(site: Site, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Fill the site's database, and have its worker run one job that ends when it is told."""
    User.objects.create_superuser("admin", password="admin")
    Stream("orders").append_many(
        [
            {"data": {"n": n, "html": "<b onclick=x>"}, "type": f"t{n % 3}", "key": str(n % 5)}
            for n in range(130)
        ]
    )
    Stream("big").append({"text": "long " * 2_000}, headers={"trace": "abc"})
    trace = tmp_path_factory.mktemp("admin") / "trace"
    ids = {
        "failed": jobtasks.fail.using(queue_name=QUEUE).enqueue("<script>no</script>").id,
        "running": jobtasks.until_cancelled.using(queue_name=QUEUE).enqueue(str(trace)).id,
        "waiting": jobtasks.add.using(queue_name="nobody").enqueue(1, 2).id,
    }
    wait_until(trace.exists, 30, "the job has started")
    wait_until(lambda: Job.objects.get(pk=ids["failed"]).is_finished, 30, "the job has failed")
    return ids


@pytest_asyncio.fixture(loop_scope="module", params=["light"])
async def admin(
    chromium: Browser, site: Site, jobs: dict[str, str], request: pytest.FixtureRequest
) -> AsyncIterator[Page]:
    """Give a page that is logged in; whatever its console says fails the test."""
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if not FAVICON.search(str(message.location)) and message.text != FASTER:
            problems.append(f"{message.type}: {message.text} ({message.location})")

    small = request.param == "phone"
    context = await chromium.new_context(
        base_url=site.server.url,
        color_scheme="dark" if small else "light",
        viewport={"width": 390, "height": 844} if small else {"width": 1300, "height": 900},
    )
    page = await context.new_page()
    page.on("console", on_console)
    page.on("pageerror", lambda error: problems.append(f"exception: {error}"))
    await page.goto("/admin/login/?next=/admin/echomq/")
    await page.fill("#id_username", "admin")
    await page.fill("#id_password", "admin")
    await page.click("[type=submit]")
    await expect(page.locator("#content")).to_contain_text("Streams")
    yield page
    await context.close()
    assert problems == []


async def visit(page: Page, path: str) -> None:
    response = await page.goto(path)
    assert response is not None and response.status == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy


@pytest.mark.parametrize("admin", ["light", "phone"], indirect=True)
async def test_no_page_breaks_the_policy(admin: Page, jobs: dict[str, str], tmp_path: Path) -> None:
    for path in (
        *("stream/", "stream/?name=o", "record/", "record/?stream=orders&type=t1&below=100"),
        *("record/?stream=nope", "job/", "job/?state=failed", "worker/", "worker/?alive=on"),
        *("queue/", "queue/?name=q", "schedule/"),
        *(f"job/{id}/change/" for id in jobs.values()),
        *(f"job/cancel/?id={jobs['waiting']}", f"job/retry/?id={jobs['failed']}"),
        f"job/{jobs['failed']}/history/",
    ):
        await visit(admin, f"/admin/echomq/{path}")
        # The style sheet is there: without it the policy would be easy to keep.
        if "history" not in path:
            await expect(admin.locator("link[href*='echomq/admin.css']")).to_have_count(1)
    for model in ("stream", "record", "worker"):
        await visit(admin, f"/admin/echomq/{model}/")
        await admin.locator("#result_list tbody tr th a").first.click()
        await expect(admin.locator("h1")).to_have_text(f"View {model}")
        width = await admin.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert width <= 0, "the page is wider than its window"
        if model == "stream":
            await admin.get_by_role("link", name="Trim…").click()
            await admin.get_by_label("Keep the newest").fill("0")
            await admin.get_by_role("button", name="Show what would go").click()
            await expect(admin.get_by_role("button", name="Remove them")).to_be_visible()


async def test_find_a_record_and_walk_from_it(admin: Page) -> None:
    await visit(admin, "/admin/echomq/record/")
    await admin.get_by_label("Stream").fill("orders")
    await admin.get_by_label("Go to").fill("77")
    await admin.get_by_role("button", name="Show").click()
    first = admin.locator("#result_list tbody tr").first
    await expect(first.locator(".field-position_text")).to_have_text("77")
    await admin.get_by_role("link", name="Older").click()
    await expect(first.locator(".field-position_text")).to_have_text("27")
    await admin.get_by_role("link", name="Newest").click()
    await first.locator(".field-position_text a").click()
    await expect(admin.locator(".echomq-pre").first).to_contain_text('"html": "<b onclick=x>"')
    await admin.get_by_role("link", name="Older").click()
    await expect(admin.locator(".field-position .readonly")).to_have_text("128")
    await visit(admin, "/admin/echomq/record/?stream=big")
    await first.locator(".field-position_text a").click()
    text = admin.locator(".field-pretty_data .echomq-pre")
    await expect(text).not_to_be_visible()
    await admin.locator(".field-pretty_data summary").click()
    await expect(text).to_be_visible()


async def test_cancel_a_running_job_with_a_reason(admin: Page, jobs: dict[str, str]) -> None:
    await visit(admin, f"/admin/echomq/job/?queue={QUEUE}")
    row = admin.locator("#result_list tbody tr", has_text=jobs["running"])
    await expect(row.locator(".field-state_badge")).to_have_text("Running")
    await row.locator("input[type=checkbox]").check()
    await admin.locator("select[name=action]").select_option("cancel_selected")
    await admin.locator("button[name=index]").click()
    await expect(admin.locator("#content")).to_contain_text("Cancel this job?")
    await admin.get_by_label("Reason").fill("seen <enough>")
    await admin.get_by_role("button", name="Cancel job").click()
    await expect(admin.locator(".messagelist")).to_contain_text("its handler was asked to stop")

    async def cancelled() -> bool:
        await admin.reload()
        return await admin.locator(".field-state_badge .readonly").inner_text() == "Cancelled"

    await wait_until_async(cancelled, 30)
    timeline = admin.locator(".echomq-timeline tbody tr")
    await expect(timeline.last).to_contain_text("cancelled")
    await expect(timeline.last).to_contain_text("seen <enough>")
    await expect(admin.locator(".field-reason .readonly")).to_have_text("seen <enough>")
    await admin.get_by_role("link", name="History").click()
    await expect(admin.locator("#change-history")).to_contain_text("cancel: requested")

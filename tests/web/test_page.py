"""The dashboard in a browser: live, by keyboard, narrow, and with hostile texts."""

from __future__ import annotations

import os
import random
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from novarl.dashboard.commands import main as command
from novarl.observe.writer import RunWriter
from tests.web.conftest import Served, serving
from tests.web.data import HOSTILE, add_step, learning_run

SHOTS = os.environ.get("NOVARL_SCREENSHOTS")


def opened(page: Page, served: Served, view: str) -> None:
    page.goto(f"{served.address}/#/{view}")
    page.reload()  # goto with another fragment alone keeps the page


def panel(page: Page, metric: str) -> str:
    return page.locator(f'[data-metric="{metric}"] .said').inner_text()


def test_curves_follow_a_run_that_grows(page: Page, tmp_path: Path) -> None:
    learning_run(tmp_path / "live", steps=40, until=5)
    with serving(tmp_path, page) as served:
        page.goto(served.address)
        expect(page.locator("#runs .num")).to_have_text("5 / 40")
        before = panel(page, "reward_mean")
        run = RunWriter(tmp_path / "live", writer="example", extend=True, steps=40)
        add_step(run, 6, 40, random.Random(5))
        expect(page.locator("#runs .num")).to_have_text("6 / 40")
        expect(page.locator('[data-metric="reward_mean"] .said')).not_to_have_text(before)
        page.keyboard.press("2")
        expect(page.locator(".steps .at")).to_contain_text("step 6 of 6")
        add_step(run, 7, 40, random.Random(6))
        expect(page.locator(".steps .at")).to_contain_text("step 6 of 7")
        learning_run(tmp_path / "second", steps=2).close()
        expect(page.locator("#runs li")).to_have_count(2)
        run.event("alert", alert="odd", message="something odd")
        page.keyboard.press("3")
        page.locator("#runs .run", has_text="live").click()
        expect(page.locator(".alerts")).to_contain_text("something odd")


def test_a_cut_log_is_read_again(page: Page, tmp_path: Path) -> None:
    learning_run(tmp_path / "cut", steps=40, until=8)
    log = tmp_path / "cut/metrics.jsonl"
    with serving(tmp_path, page) as served:
        page.goto(served.address)
        expect(page.locator("#runs .num")).to_have_text("8 / 40")
        lines = log.read_text().splitlines(keepends=True)
        log.write_text("".join(lines[:3]))
        expect(page.locator("#runs .num")).to_have_text("3 / 40")
        expect(page.locator('[data-metric="lr"] .canvas')).to_have_attribute(
            "aria-label", re.compile("lr; last values: cut: 1.00e.5")
        )


def test_keyboard(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=grpo-a&step=30")
    at, current = page.locator(".steps .at"), page.locator(".grouplist .current")
    expect(at).to_contain_text("step 30")
    for key, step in (("ArrowRight", 31), ("ArrowLeft", 30), ("l", 31), ("h", 30)):
        page.keyboard.press(key)
        expect(at).to_contain_text(f"step {step} ")
    for key, group in (("j", "1"), ("ArrowDown", "2"), ("k", "1"), ("ArrowUp", "0")):
        page.keyboard.press(key)
        expect(current).to_have_attribute("data-group", group)
        expect(page.locator(".groupbar")).to_contain_text(f"Group {group}")
    page.keyboard.press("c")
    expect(page.locator("select[title^=Color]")).to_have_value("ratio")
    page.keyboard.press("C")
    expect(page.locator("select[title^=Color]")).to_have_value("advantage")
    page.keyboard.press("/")
    expect(page.get_by_placeholder("Search prompts and answers")).to_be_focused()
    page.keyboard.type("Noor")
    expect(page.locator(".grouplist li")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("n")
    expect(at).to_contain_text("step 31")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("next and previous group")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.keyboard.press("1")
    expect(page.locator(".panels .panel").first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("grad_norm")
    expect(page.locator(".panel")).to_have_count(1)


def test_a_token_shows_all_its_values_and_its_loss_term(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=grpo-a&step=30")
    page.locator(".answer .t").first.click()
    sheet = page.locator(".inspector")
    for title in (
        "Advantage",
        "Loss term",
        "Ratio",
        "KL to the reference",
        "Entropy",
        "Value",
        "Process reward",
        "Sampler",
    ):
        expect(sheet).to_contain_text(title)
    expect(sheet).not_to_contain_text("not recorded")
    expect(sheet).to_contain_text('Token "First" 1 of')
    page.locator(".answer .t").first.focus()
    page.keyboard.press("ArrowRight")
    expect(sheet).to_contain_text("2 of")
    page.keyboard.press("Escape")
    expect(sheet).to_have_count(0)


def test_the_sign_of_a_token_has_two_cues(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=grpo-a&step=30&color=process")
    expect(page.locator(".answer .t[class*=p4]").first).to_be_visible()
    styles = "node => { const s = getComputedStyle(node); return [s.textDecorationStyle, s.backgroundColor] }"
    plus = page.locator(".answer .t[class*=p4]").first.evaluate(styles)
    minus = page.locator(".answer .t[class*=n4]").first.evaluate(styles)
    assert (plus[0], minus[0]) == ("solid", "dashed") and plus[1] != minus[1]


def test_filters_and_failures(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=hostile&step=1")
    page.get_by_label("any status").select_option("failed")
    page.get_by_label("matching answers only").check()
    expect(page.locator(".answer")).to_have_count(1)
    expect(page.locator(".answer .error")).to_contain_text("ValueError")
    opened(page, served, "samples?run=grpo-a&step=30")
    expect(page.locator(".prompt")).to_contain_text("Ada has 13 coins")
    page.get_by_label("reward ≥").fill("1")
    page.get_by_label("reward ≤").fill("0.5")
    expect(page.locator(".samplemain")).to_contain_text("No group of this step matches")


def test_a_prompt_across_steps(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=grpo-a&step=30")
    page.get_by_role("button", name="This prompt across steps").click()
    expect(page.locator(".across")).to_contain_text("in 60 of 60 logged steps")
    expect(page.locator(".across .strip button")).to_have_count(60)
    expect(page.get_by_label("Before: answer").locator("option:checked")).to_contain_text("step 1, #0")
    expect(page.get_by_label("After: answer").locator("option:checked")).to_contain_text("step 60, #0")
    pairs = page.locator(".across .diff")
    assert "First 13 + 28." in pairs.first.inner_text()
    page.locator(".across .strip button").nth(10).click()
    expect(page.get_by_label("After: answer").locator("option:checked")).to_contain_text("step 11, #0")
    page.keyboard.press("Escape")
    expect(page.locator(".across")).to_have_count(0)


def test_a_difference_is_marked_word_by_word(page: Page, served: Served) -> None:
    page.goto(served.address)
    parts = page.evaluate(
        """async () => (await import('/static/across.js')).difference('it is 41 now', 'it is not 42 now')
        .map(part => [part.kind, part.text])"""
    )
    assert "".join(text for kind, text in parts if kind != "added") == "it is 41 now"
    assert "".join(text for kind, text in parts if kind != "removed") == "it is not 42 now"
    assert [text for kind, text in parts if kind == "removed"] == ["41"]


def test_a_run_without_rollouts_says_so(page: Page, tmp_path: Path) -> None:
    RunWriter(tmp_path / "bare", writer="example").step(1, {"loss": 1.0})
    with serving(tmp_path, page) as served:
        page.goto(f"{served.address}/#/samples?run=bare")
        expect(page.locator(".samplemain")).to_contain_text("This run has no rollouts")


def test_a_conversation_with_tools(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=hostile&step=1")
    first = page.locator(".answer").first
    expect(first.locator(".role")).to_have_text(["assistant", f"tool {HOSTILE[0]}", "assistant"])
    expect(first.locator(".calls")).to_contain_text("1 tool call")
    expect(first.locator(".turn .tokens")).to_have_count(2)


@pytest.mark.parametrize("view", ["curves", "samples", "alerts", "config"])
def test_hostile_text_is_text(page: Page, served: Served, view: str) -> None:
    opened(page, served, f"{view}?run=hostile&step=1")
    expect(page.locator("#main")).to_contain_text("<" if view != "samples" else HOSTILE[0])
    if view == "samples":
        for group in range(len(HOSTILE)):
            expect(page.locator(".groupbar")).to_contain_text(f"Group {group}")
            page.locator(".answer .t").nth(1).click()
            expect(page.locator(".inspector")).to_be_visible()
            page.keyboard.press("p")
            expect(page.locator(".across")).to_contain_text("logged steps")
            page.keyboard.press("Escape")
            page.keyboard.press("Escape")
            page.keyboard.press("j")
    assert page.evaluate("window.hacked") is None
    assert page.locator("#main img, #main script, #main svg, #main b:has(script)").count() == 0
    raw = page.locator("#main").evaluate("node => node.textContent")
    assert not any(mark in raw for mark in "\u202e\u202c\x1b\x00"), "shown as codes"


def test_direction_marks_are_shown_as_codes(page: Page, served: Served) -> None:
    opened(page, served, "samples?run=hostile&step=1&group=2")
    expect(page.locator(".prompt .code").first).to_have_text("U+202E")


@pytest.mark.parametrize("view", ["curves", "samples", "alerts", "config"])
def test_nothing_is_wider_than_a_telephone(narrow: Page, served: Served, view: str) -> None:
    opened(narrow, served, f"{view}?run=hostile&runs=hostile&runs=grpo-a&step=1")
    expect(narrow.locator("#main")).to_contain_text("hostile" if view != "config" else "algo")
    if view == "curves":
        expect(narrow.locator("canvas").first).to_be_visible()
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 400
    if view == "samples":
        narrow.locator(".answer .t").first.click()
        expect(narrow.locator(".inspector")).to_be_in_viewport()


def test_several_runs_share_a_chart_and_a_table(page: Page, served: Served) -> None:
    opened(page, served, "curves?run=grpo-a&runs=grpo-a&runs=grpo-b")
    expect(page.locator('[data-metric="kl"] .said .value')).to_have_count(2)
    label = page.locator('[data-metric="kl"] .canvas')
    assert "grpo-a" in (label.get_attribute("aria-label") or "") and "grpo-b" in (
        label.get_attribute("aria-label") or ""
    )
    page.keyboard.press("4")
    expect(page.locator(".config tbody th")).to_have_text(["seed", "optim.lr"])


def test_what_a_metric_means(page: Page, served: Served) -> None:
    opened(page, served, "curves?run=grpo-a")
    kl = page.locator('[data-metric="kl"]')
    kl.locator("summary").click()
    expect(kl.locator(".explanation")).to_contain_text("1e-5 to 1e-2")


def asked(address: str, path: str, **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(address + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_foreign_host_gets_nothing(served: Served) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1", ""):
        code, text = asked(served.address, "/api/runs", Host=host)
        assert code in (400, 421) and "grpo-a" not in text
    assert asked(served.address, "/api/runs", Host="localhost:1234")[0] == 200


def test_paths_do_not_escape(served: Served) -> None:
    paths = ("/static/../server.py", "/static/%2e%2e/server.py", "/static//etc/passwd", "/../../etc/passwd")
    for path in paths:
        with socket.create_connection(("127.0.0.1", int(served.address.rsplit(":", 1)[1])), 20) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 404"), path
    for name in ("../grpo-a", "/etc", "grpo-a/../hostile", "%2e%2e"):
        assert asked(served.address, f"/api/run?run={name}")[0] == 400


def test_links_that_leave_the_folder_are_refused(page: Page, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    learning_run(secret / "outside", steps=2).close()
    (secret / "password").write_text('{"step": 1, "password": 1}\n')
    runs = tmp_path / "runs"
    learning_run(runs / "inside", steps=2).close()
    (runs / "linked").symlink_to(secret / "outside")
    (runs / "latest").symlink_to("inside")
    (runs / "inside/rollouts/step-000002.jsonl").unlink()
    (runs / "inside/rollouts/step-000002.jsonl").symlink_to(secret / "password")
    with serving(runs, page) as served:
        page.goto(served.address)
        expect(page.locator("#runs li")).to_have_count(1)
        expect(page.locator("#runs")).to_contain_text("a link that leaves")
        code, text = asked(served.address, "/api/groups?run=inside&step=2")
        assert code == 400 and "a link that leaves" in text and "password" not in text


def test_theme(page: Page, served: Served) -> None:
    opened(page, served, "curves?run=grpo-a")
    expect(page.locator("canvas").first).to_be_visible()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light, "it is remembered"


def test_the_report_is_whole_and_alone(page: Page, served: Served, tmp_path: Path) -> None:
    for name in ("grpo-a", "hostile"):
        file = tmp_path / f"{name}.html"
        assert command("report", [str(served.folder / name), "--out", str(file)]) == 0
        page.goto(file.as_uri())
        expect(page.locator("h1")).to_have_text(f"Report of {name}")
        expect(page.locator("canvas").first).to_be_visible()
        page.locator(".stepbox[open] .answer .t").first.click()
        expect(page.locator(".inspector")).to_contain_text("Loss term")
        page.get_by_label("Color tokens by").select_option("entropy")
        expect(page.locator(".stepbox[open] .answer .t[class*=q]").first).to_be_visible()
        assert page.evaluate("window.hacked") is None
        assert page.locator("main img, main script").count() == 0


def test_an_empty_folder_waits(page: Page, tmp_path: Path) -> None:
    with serving(tmp_path, page) as served:
        page.goto(served.address)
        expect(page.locator("#main")).to_contain_text("No runs yet")
        learning_run(tmp_path / "first", steps=2).close()
        expect(page.locator("#runs li")).to_have_count(1)
        expect(page.locator("canvas").first).to_be_visible()


@pytest.fixture
def two_runs(tmp_path: Path) -> Iterator[Served]:
    for seed, name in enumerate(("grpo-a", "grpo-b")):
        learning_run(tmp_path / "runs" / name, seed=seed, steps=240, groups=6).close()
    with serving(tmp_path / "runs") as started:
        yield started


def test_screenshots(browser: Browser, two_runs: Served, tmp_path: Path) -> None:
    """The pictures of docs/dashboard.md: NOVARL_SCREENSHOTS=docs/images make test-web."""
    folder = Path(SHOTS) if SHOTS else tmp_path
    folder.mkdir(parents=True, exist_ok=True)
    views = {
        "dashboard-curves": ("curves?run=grpo-a&runs=grpo-a&runs=grpo-b", 1200, "light"),
        "dashboard-samples": ("samples?run=grpo-a&step=110&group=1&color=process", 1200, "light"),
        "dashboard-dark": ("samples?run=grpo-a&step=110&group=1&color=entropy", 1200, "dark"),
        "dashboard-narrow": ("samples?run=grpo-a&step=110&group=1&color=process", 400, "light"),
    }
    for name, (view, width, scheme) in views.items():
        context = browser.new_context(viewport={"width": width, "height": 760}, color_scheme=scheme)  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(f"{two_runs.address}/#/{view}")
        if "samples" in view:
            page.locator(".answer .t").nth(3).wait_for()
            if width > 400:
                page.locator(".answer .t").nth(3).click()
                expect(page.locator(".inspector")).to_be_visible()
        else:
            for metric in ("reward_mean", "total_loss", "kl", "kl_mean"):
                expect(page.locator(f'[data-metric="{metric}"] .said .value')).to_have_count(2)
        page.wait_for_load_state("load")
        page.screenshot(path=folder / f"{name}.png")
        assert (folder / f"{name}.png").stat().st_size > 10_000
        context.close()

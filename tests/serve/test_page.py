"""Tests of the page at / in a real browser: it chats, shows the lanes, and loads nothing from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

from kvexport.engine.engine import Engine
from kvexport.serve import page
from tests.support.browser import browser
from tests.support.http_server import Running, running


def test_the_page_runs_nothing_but_itself(server: Running) -> None:
    status, headers, text = server.ask("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert len(re.findall("'sha256-", policy)) == 2
    assert not re.findall(r"https?://|<(?:link rel=.?stylesheet|script src|img)|\son\w+=|style=|innerHTML|eval\(", text)
    assert text == page.text()


def test_the_page_chats_and_shows_the_lanes(engine: Engine, tmp_path: Path) -> None:
    with running(engine, api_keys=("secret",)) as server, browser(tmp_path) as tab:
        tab.call("Page.navigate", url=server.url)
        tab.wait_for("document.readyState === 'complete' && !document.getElementById('keyed').hidden")
        tab.run("ask('refused')")
        tab.wait_for("!running && document.querySelector('.error').textContent.includes('API key')")
        assert tab.run("[messages.length, document.querySelectorAll('.assistant').length]") == [0, 0]
        tab.problems.clear()  # the refusals without a key
        tab.run("document.getElementById('key').value = 'secret'")
        tab.run("document.getElementById('reset').click()")
        tab.wait_for("document.querySelectorAll('#lanes tr').length === 4")
        prompts = "[...document.querySelectorAll('#first button')]"
        assert tab.run(f"{prompts}.length") == 3
        tab.run("document.getElementById('tokens').value = 3")
        tab.run(f"{prompts}[0].click()")
        tab.wait_for("document.getElementById('said').textContent.includes('first piece')")
        tab.wait_for("document.getElementById('slotted').textContent.includes('evicted')")
        assert "full cache takes" in tab.run("document.getElementById('compared').textContent")
        assert tab.run("document.getElementById('first').hidden")
        tab.run("document.getElementById('reset').click()")
        tab.run("document.getElementById('said').textContent = ''")
        tab.run("document.getElementById('tokens').value = 200")
        tab.run("document.getElementById('text').value = 'anna lamp'")
        tab.run("document.getElementById('ask').requestSubmit()")
        tab.wait_for("document.getElementById('said').textContent.includes('first piece')")
        answer_text = tab.run("document.querySelector('.assistant').textContent")
        body = {"messages": [{"role": "user", "content": "anna lamp"}], "max_tokens": 200}
        key = {"Authorization": "Bearer secret"}
        answer = server.ask("/v1/chat/completions", {**body, "temperature": 0}, headers=key)[2]
        assert answer_text == answer["choices"][0]["message"]["content"]
        tab.wait_for("document.querySelector('#lanes tr td:nth-child(2)').textContent > 200")
        # The page reads the numbers from time to time, so the first that it shows may precede the first merge.
        shown = r"Number((/at most ([\d.]+)\./.exec(document.getElementById('slotted').textContent) || [0, 0])[1])"
        tab.wait_for(f"{shown} > 1")
        assert tab.run(shown) <= 204
        assert "kB: a full cache" in tab.run("document.getElementById('full').textContent")
        painted = "[...{}.getContext('2d').getImageData(0, 0, {}.width, {}.height).data].some(x => x)"
        for name in ("rates", "memory", "slots"):
            tab.wait_for(painted.replace("{}", f"document.getElementById('{name}')"))
        tab.run("void ask('anna lamp'); document.getElementById('reset').click()")
        tab.wait_for("!running")
        assert tab.run("messages.length") == 0  # the end of the old answer is no part of the new conversation
        for width in (320, 400, 1280):  # the widths of a phone and of a window
            screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 800}
            tab.call("Emulation.setDeviceMetricsOverride", **screen)
            assert tab.run("document.documentElement.scrollWidth") <= width
            tops = "[...document.querySelectorAll('#ask button')].map(x => x.getBoundingClientRect().top)"
            assert tab.run(f"new Set({tops}).size") == 1  # the buttons stand side by side
        tab.screenshot(tmp_path / "page.png")
        assert tab.problems == []

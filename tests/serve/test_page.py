"""Tests of the page at / in a real browser: it chats, shows the lanes, and loads nothing from elsewhere."""

import json
import re
from pathlib import Path

from kvexport.engine.engine import Engine
from kvexport.serve import page
from tests.support.browser import browser
from tests.support.http_server import Running, running

HOSTILE = (
    """# <b>title</b>
<script>alert(1)</script><img src=x onerror=alert(2)><iframe srcdoc="<script>alert(3)</script>">
[a](javascript:alert(4)) [b](JaVaScRiPt:alert(5)) [c](data:text/html,<script>alert(6)</script>) [d](vbscript:x)
![e](x" onerror="alert(7)) [f](https://example.org/" onclick="alert(8)) **<svg onload=alert(9)>**
[g](\tjavascript:alert(10)) [h](//example.org) <a href="javascript:alert(11)">i</a> ![j](https://example.org/k.png)

```html
<script>alert(12)</script>
</code></pre><img src=x onerror=alert(13)>
```

| <img src=x onerror=alert(14)> | b |
|---|---|
| `<script>alert(15)</script>` | ~~<b>~~ |

> - <object data="javascript:alert(16)">
"""
    + "> " * 500
    + "deep"
    + "`" * 3000
    + "\n"
    + "*[" * 2000
)

MARKDOWN = """# One

**bold** and *soft*, `a*b*c`, 2 * 3 * 4, snake_case_name
second line

1. first
   - inner
2. second

- [x](https://example.org/?a=1&b=2)

```py
a = "**"
```py
```
> quoted

```x``` is code

| a | b |
|---|--:|
| 1 | 2 |"""
RENDERED = (
    "<h3>One</h3><p><strong>bold</strong> and <em>soft</em>, <code>a*b*c</code>, 2 * 3 * 4, snake_case_name<br>second "
    'line</p><ol start="1"><li>first<ul><li>inner</li></ul></li><li>second</li></ol><ul><li><a href="https://example.org'
    '/?a=1&amp;b=2" target="_blank" rel="noopener noreferrer">x</a></li></ul><pre><code>a = "**"\n```py</code></pre>'
    "<blockquote><p>quoted</p></blockquote><p><code>x</code> is code</p>"
    "<table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>"
)


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
        tab.wait_for("document.getElementById('compared').textContent.includes('full cache takes')")
        assert tab.run("document.getElementById('first').hidden")
        tab.run("document.getElementById('reset').click()")
        tab.run("document.getElementById('said').textContent = ''")
        tab.run("document.getElementById('tokens').value = 200")
        tab.run("document.getElementById('text').value = 'anna lamp'")
        tab.run("document.getElementById('ask').requestSubmit()")
        tab.wait_for("document.getElementById('said').textContent.includes('first piece')")
        answer_text = tab.run("messages[1].content")
        body = {"messages": [{"role": "user", "content": "anna lamp"}], "max_tokens": 200}
        key = {"Authorization": "Bearer secret"}
        answer = server.ask("/v1/chat/completions", {**body, "temperature": 0}, headers=key)[2]
        assert answer_text == answer["choices"][0]["message"]["content"]
        tab.wait_for("document.querySelector('#lanes tr td:nth-child(2)').textContent > 200")
        assert float(tab.run("document.querySelector('#lanes tr td:nth-child(4)').textContent")) > 1
        assert "kB: a full cache" in tab.run("document.getElementById('full').textContent")
        painted = "[...{}.getContext('2d').getImageData(0, 0, {}.width, {}.height).data].some(x => x)"
        for name in ("rates", "memory"):
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
            boxes = "['text', 'send', 'stop'].map(x => document.getElementById(x).getBoundingClientRect().bottom)"
            assert tab.run(f"Math.max(...{boxes})") <= 800 >= tab.run("document.documentElement.scrollHeight")
        tab.screenshot(tmp_path / "page.png")
        assert tab.problems == []


def test_markdown_of_an_answer_is_shown_and_nothing_in_it_runs(server: Running, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        tab.call("Page.navigate", url=server.url)
        tab.wait_for("document.readyState === 'complete' && document.querySelectorAll('#lanes tr').length")
        tab.run("window.alert = () => { window.ran = true; }; window.bubble = show('assistant', '')")
        for end in range(0, len(MARKDOWN) + 1, 5):  # as an answer arrives
            tab.run(f"markdown(bubble, {json.dumps(MARKDOWN[:end])})")
        tab.run(f"markdown(bubble, {json.dumps(MARKDOWN)})")
        assert tab.run("bubble.innerHTML") == RENDERED
        seconds = tab.run(
            f"(start => (markdown(bubble, {json.dumps(HOSTILE)}), performance.now() - start))(performance.now())"
        )
        assert seconds < 2000
        tags = {*"H3 P BR A STRONG CODE PRE TABLE TR TH TD S BLOCKQUOTE UL LI EM".split()}  # noqa: SIM905
        assert set(tab.run("[...bubble.querySelectorAll('*')].map(x => x.tagName)")) <= tags
        names = tab.run("[...bubble.querySelectorAll('*')].flatMap(x => x.getAttributeNames())")
        assert set(names) <= {"href", "target", "rel"}
        assert all(
            x.startswith("https://example.org/") for x in tab.run("[...bubble.querySelectorAll('a')].map(x => x.href)")
        )
        assert "<img src=x onerror=alert(13)>" in tab.run("bubble.querySelector('pre').textContent")
        assert tab.run("window.ran") is None and tab.problems == []


def test_conversations_and_settings_outlive_a_reload(engine: Engine, tmp_path: Path) -> None:
    ready = "document.readyState === 'complete' && document.querySelectorAll('#lanes tr').length"
    shown = "[...document.querySelectorAll('.said')].map(x => x.textContent)"
    with running(engine, api_keys=("secret",)) as server, browser(tmp_path) as tab:

        def start() -> None:
            tab.wait_for("document.readyState === 'complete' && !document.getElementById('keyed').hidden")
            tab.run("document.getElementById('key').value = 'secret'")
            tab.wait_for(ready)

        def write(field: str, text: str) -> None:
            tab.run(f"document.getElementById('{field}').focus(); document.getElementById('{field}').select()")
            tab.call("Input.insertText", text=text)

        tab.call("Page.navigate", url=server.url)
        start()
        tab.run("document.querySelector('details').open = true")
        write("system", "lamp")
        write("tokens", "8")
        write("text", "anna")
        for kind in ("keyDown", "keyUp"):
            tab.call(
                "Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r"
            )
        tab.wait_for("!running && messages.length === 2")
        told = [{"role": "system", "content": "lamp"}, {"role": "user", "content": "anna"}]
        body = {"messages": told, "max_tokens": 8, "temperature": 0}
        answer = server.ask("/v1/chat/completions", body, headers={"Authorization": "Bearer secret"})[2]
        assert tab.run("messages[1].content") == answer["choices"][0]["message"]["content"]
        tab.run("document.getElementById('reset').click()")
        tab.run("ask('second')")
        tab.wait_for("!running && messages.length === 2")
        before = tab.run(shown)
        tab.run("ask('third')")
        tab.wait_for("!running")
        tab.run("messages.pop(); store(session, messages)")  # as if the page had gone before the answer came
        tab.problems.clear()
        tab.call("Page.reload")
        start()
        assert tab.run(shown) == before and tab.run("document.getElementById('text').value") == "third"
        assert tab.run("['system', 'tokens'].map(x => document.getElementById(x).value)") == ["lamp", "8"]
        assert "secret" not in tab.run("JSON.stringify(localStorage)")
        assert tab.run("[...document.getElementById('talks').options].map(x => x.text)") == ["second", "anna"]
        tab.run("document.getElementById('forget').click()")
        assert tab.run("[...document.getElementById('talks').options].map(x => x.text)") == ["New conversation", "anna"]
        tab.run("document.getElementById('talks').selectedIndex = 1")
        tab.run("document.getElementById('talks').dispatchEvent(new Event('change'))")
        assert tab.run(shown)[0] == "anna" and tab.run("messages.length") == 2
        lanes = "[{state: 'prefilling', read: 3, prompt: 4, request: 6}, {read: 1536, prompt: 2708, request: 7}]"
        tab.run(f"reads = show('assistant', ''); number = 7; drawReads({{waiting: 0, lanes: {lanes}}})")
        assert tab.run(shown)[-1] == "reading 1,536 of 2,708 tokens"
        tab.run(f"number = 8; drawReads({{waiting: 0, lanes: {lanes}}})")
        assert tab.run(shown)[-1] == "waiting for a lane"
        tab.run("markdown(reads, 'word')")
        assert tab.run(shown)[-1] == "word"
        tab.screenshot(tmp_path / "page.png")


def test_a_model_is_chosen_on_the_page_where_there_are_several(engine: Engine, tmp_path: Path) -> None:
    with running(engine, names=("tiny", "a-model-with-a-longer-name")) as server, browser(tmp_path) as tab:
        screen = {"width": 400, "height": 700, "deviceScaleFactor": 1, "mobile": True}
        tab.call("Emulation.setDeviceMetricsOverride", **screen)
        tab.call("Page.navigate", url=server.url)
        tab.wait_for("document.readyState === 'complete' && !document.getElementById('models').hidden")
        assert tab.run("[...document.getElementById('models').options].map(x => x.text)") == [
            *server.service.settings.names
        ]
        assert tab.run("request('x')[1].model") == "tiny" and tab.run("document.documentElement.scrollWidth") <= 400
        tab.run("document.getElementById('models').selectedIndex = 1")
        assert tab.run("request('x')[1].model") == server.service.settings.names[1]
        tab.run("document.getElementById('tokens').value = 3; void ask('anna')")
        tab.wait_for("!running && messages.length === 2")
        assert tab.problems == []


def test_the_page_chats_where_the_browser_refuses_storage(server: Running, tmp_path: Path) -> None:
    refused = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('', 'SecurityError'); }})"
    with browser(tmp_path) as tab:
        tab.call("Page.addScriptToEvaluateOnNewDocument", source=refused)
        tab.call("Page.navigate", url=server.url)
        tab.wait_for("document.readyState === 'complete' && document.querySelectorAll('#lanes tr').length")
        tab.run("document.getElementById('tokens').value = 3; void ask('anna')")
        tab.wait_for("!running && messages.length === 2")
        tab.run("document.getElementById('reset').click()")
        titles = "[...document.getElementById('talks').options].map(x => x.text)"
        assert tab.run(titles) == ["New conversation", "anna"]
        tab.run("enter(document.getElementById('talks').options[1].value); document.getElementById('forget').click()")
        assert tab.run(titles) == ["New conversation"] and tab.problems == []

"""The page at `/` in a real browser: Chromium of the package PyQt6-WebEngine, with the rules of axe-core-python."""

import json
import os
import threading
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
from serving_kit import ASK, instruct_engine, running, script, text_of

from loading.options import DEMO
from serving import requests

os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
os.environ.setdefault("QTWEBENGINE_DISABLE_SANDBOX", "1")
os.environ.setdefault("QTWEBENGINE_CHROMIUM_FLAGS", "--no-sandbox --disable-gpu")
core = pytest.importorskip("PyQt6.QtWebEngineCore", reason="the browser is not installed (pip install PyQt6-WebEngine)")

from PyQt6 import sip  # noqa: E402
from PyQt6.QtCore import QUrl  # noqa: E402
from PyQt6.QtWebEngineWidgets import QWebEngineView  # noqa: E402
from PyQt6.QtWidgets import QApplication  # noqa: E402

SECONDS = 20  # for anything that the page is expected to do
PHONE, DESK = (375, 720), (1000, 760)
ANSWER = """# Fruit & more

Some **bold text**, `a < b`, [a link](https://example.org/x), [no link](javascript:alert(1)) and <b>no bold</b>.
<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2">

1. one
   - inner ![picture](https://example.org/y.png)
2. two

```python
def f(x):
    return "</script>"  # **not bold**
```

| a | b |
|---|---|
| 1 | &lt;2 |

> quoted [ref]

[ref]: https://example.org/ref
"""


class Page(core.QWebEnginePage):
    """A page that remembers what its scripts complained about."""

    def __init__(self, profile: core.QWebEngineProfile):
        super().__init__(profile)
        self.problems: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source):  # noqa: N802
        self.problems.append(f"{message} ({line})")

    def javaScriptAlert(self, origin, message):  # noqa: N802
        self.problems.append(f"alert: {message}")


class Browser:
    """A window with the page, driven by scripts that run in it."""

    def __init__(self, app: QApplication, address: str, size: tuple[int, int]):
        self.app = app
        self.profile = core.QWebEngineProfile()  # keeps nothing on disk
        self.page = Page(self.profile)
        self.view = QWebEngineView()
        self.view.setPage(self.page)
        self.view.resize(*size)
        self.view.show()
        self.go(address)

    def go(self, address: str | None = None) -> None:
        """Open an address, or load the page again."""
        loaded: list[bool] = []
        self.page.loadFinished.connect(loaded.append)
        self.page.load(QUrl(address)) if address else self.view.reload()
        self._wait(lambda: bool(loaded), "the page does not load")
        self.page.loadFinished.disconnect(loaded.append)
        self.until("part('model').textContent || !part('login').hidden")

    def do(self, code: str) -> Any:
        """What a script's last expression gives."""
        results: list[Any] = []
        self.page.runJavaScript(code, results.append)
        self._wait(lambda: bool(results), code)
        return results[0]

    def until(self, code: str) -> Any:
        """Wait until an expression is true."""
        value: list[Any] = []
        self._wait(lambda: bool(value.append(self.do(f"({code}) || null")) or value[-1]), code)
        return value[-1]

    def _wait(self, condition, what: str) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end, f"nothing happened in {SECONDS} s: {what}; problems: {self.page.problems}"
            self.app.processEvents()
            time.sleep(0.005)

    def put(self, **values: str | bool) -> None:
        """Fill in the settings."""
        for name, value in values.items():
            field = "checked" if isinstance(value, bool) else "value"
            self.do(f"part({name!r}).{field} = {json.dumps(value)}; part({name!r}).dispatchEvent(new Event('change', "
                    "{bubbles: true}))")  # fmt: skip

    def ask(self, text: str, wait: bool = True) -> None:
        """Type a message and press Enter."""
        self.do(f"box.value = {json.dumps(text)}; box.dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter'}}))")
        if wait:
            self.until("!running")

    def click(self, selector: str) -> None:
        """Click the last element of a selector, which must be in sight."""
        assert self.do(f"[...document.querySelectorAll({selector!r})].at(-1)?.checkVisibility() ?? null"), selector
        self.do(f"[...document.querySelectorAll({selector!r})].at(-1).click()")

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector."""
        return self.do(f"[...document.querySelectorAll({selector!r})].map(e => e.textContent)")

    def close(self, *known: str) -> None:
        """Check that no script failed, and close the window. known: parts of the complaints that the test expects."""
        problems = [text for text in self.page.problems if not any(part in text for part in known)]
        self.view.close()
        for each in (self.view, self.page, self.profile):
            sip.delete(each)
        assert not problems


@pytest.fixture(scope="module")
def app() -> QApplication:
    return QApplication.instance() or QApplication(["test"])


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    # always drafts: otherwise the colours depend on how fast this machine is at the moment
    return instruct_engine(tmp_path_factory, eagle=str(DEMO / "eagle3"), eagle_always=True, ctx=512)


@pytest.fixture
def browser(app, server, request) -> Iterator[Browser]:
    browser = Browser(app, server.address, getattr(request, "param", DESK))
    yield browser
    browser.close()


def test_answers_are_stopped_asked_again_and_edited(engine, server, browser, monkeypatch):
    """A second answer that stays beside the first, an edit that leaves what came behind, a Stop that the server never
    hears of, a system prompt or an earlier turn that is not sent, and a chat that a reload loses."""
    browser.put(watch=False, most="12", temperature="1", system="Be brief.")
    made = script(monkeypatch, engine, "First answer.")
    browser.ask("One?")
    made = script(monkeypatch, engine, "Second answer.")
    browser.ask("Two?")
    assert browser.texts(".text") == ["First answer.", "Second answer."] and len(made) == 1
    script(monkeypatch, engine, "Third answer.")
    browser.click(".regenerate")
    browser.until("!running")
    assert browser.texts(".text") == ["First answer.", "Third answer."] and browser.texts(".user") == ["One?", "Two?"]
    sent: list[list[dict]] = []
    encode = engine.tokenizer.encode_chat
    monkeypatch.setattr(engine.tokenizer, "encode_chat", lambda m, **more: sent.append(m) or encode(m, **more))
    script(monkeypatch, engine, "Fourth answer.")
    browser.do("document.querySelectorAll('.edit')[1].click()")
    assert browser.do("box.value") == "Two?" and browser.do("!part('notice').hidden")
    browser.ask("Two, then?")
    assert browser.texts(".text") == ["First answer.", "Fourth answer."]
    assert [m["content"] for m in sent[-1]] == ["Be brief.", "One?", "First answer.", "Two, then?"]
    held = threading.Event()
    made = script(monkeypatch, engine, "Never the whole of this answer.", gate=lambda: held.wait(20))
    browser.ask("Three?", wait=False)
    browser.until("document.querySelectorAll('.text').length == 3 && log.lastChild.querySelector('.text').textContent")
    browser.click("#stop")
    browser.until("!running")
    held.set()
    server.idle()
    assert made[0]._stopped and "stopped" in browser.texts(".figures")[-1] and browser.texts(".user")[-1] == "Three?"
    shown = browser.texts(".user, .text")
    browser.go()
    assert browser.texts(".user, .text") == shown and browser.do("part('system').value") == "Be brief."
    browser.click("#new")
    assert browser.texts(".user") == [] and browser.do("JSON.parse(localStorage.getItem(CHATS)).length") == 1
    browser.click("#list")
    browser.click("#chats .name")
    assert browser.texts(".user, .text") == shown and browser.do("part('chats').hidden")


def test_the_text_of_an_answer_is_markdown_and_never_markup(engine, browser, monkeypatch):
    """`<script>` or an image in an answer that becomes an element, a link that runs a script, code that cannot be copied,
    and a text that looks different while it grows."""
    script(monkeypatch, engine, ANSWER)
    browser.put(watch=False, most="400")
    browser.ask(ANSWER)
    grown = browser.do("log.querySelector('.text').innerHTML")
    assert browser.texts(".user") == [ANSWER]
    for tag in ("script", "img", "b", "iframe"):
        assert browser.do(f"log.querySelectorAll({tag!r}).length") == 0
    assert browser.do("window.hacked === undefined")
    text = browser.texts(".text")[0]
    assert "<script>window.hacked = 1</script>" in text and "<b>no bold</b>" in text and "<2" in text
    assert browser.texts(".text strong") == ["bold text"] and "a < b" in browser.texts(".text code")
    links = browser.do("[...log.querySelectorAll('a')].map(a => [a.href, a.rel])")
    assert [url for url, _ in links] == [f"https://example.org/{end}" for end in ("x", "y.png", "ref")]
    assert all("noopener" in rel for _, rel in links) and browser.texts(".text th, .text td") == ["a", "b", "1", "<2"]
    assert browser.texts(".fence pre") == ['def f(x):\n    return "</script>"  # **not bold**\n']
    browser.do("window.copy = ''; document.execCommand = () => { copy = document.activeElement.value; return true; };"
               "Object.defineProperty(navigator, 'clipboard', {value: undefined})")  # fmt: skip
    browser.click(".fence button")
    assert browser.until("copy") == 'def f(x):\n    return "</script>"  # **not bold**\n'
    browser.go()
    assert browser.do("log.querySelector('.text').innerHTML") == grown
    # every piece of an answer draws its last block only, so that selections and long answers do not suffer
    browser.do("""
        var made = new Answer(), drawn = [], all = "";
        for (let i = 0; i < 30; i++) made.piece(`paragraph *${i}*\\n\\n`, -1, "");
        made.draw();
        drawn = [...made.text.children];
        for (const piece of ["more ", "of **it", "** and", "\\n\\n- a", "\\n- b"]) {
            made.piece(piece, -1, "");
            made.draw();
        }
    """)
    assert browser.do("drawn.every((block, i) => made.text.children[i] === block)")
    whole = "new Answer().whole({content: made.source}).text.innerHTML"
    assert browser.do("made.text.innerHTML") == browser.do(whole)
    assert browser.do("made.text.querySelectorAll('li').length") == 2


def test_tokens_keep_their_colours_and_trees_in_markdown(engine, browser):
    """Markdown that loses the colours, or gives a word the tree of another one."""
    browser.put(seed="5", temperature="1", most="60")
    browser.ask("def f(x):")
    text = text_of(engine, engine.tokenizer.encode_chat(ASK), temperature=1.0, seed=5, max_new_tokens=60)
    assert browser.do("chat.messages[1].content") == text
    assert browser.do("document.querySelectorAll('.token').length") > 20
    # each piece of the shown text belongs to a step that kept a token with this text
    assert browser.do("""[...document.querySelectorAll('.token')].every(span => {
        const [answer, number] = span.at;
        return answer.steps[number].kept.join('').includes(span.textContent); })""")
    browser.click(".token")
    nodes = "part('tree').querySelectorAll('.node').length == chosen.answer.steps[chosen.number].nodes.length"
    assert browser.do(nodes)
    browser.do("""
        var made = new Answer(), steps = [["Some", " **b"], ["old**", " wo"], ["rds &", "amp; 1"], ["\\n\\n1. ", "1 x"]];
        steps.forEach((kept, i) => kept.forEach(text => made.piece(text, i, "token d1")));
        made.draw();
    """)
    spans = browser.do("[...made.text.querySelectorAll('.token')].map(s => s.dataset.step + s.textContent)")
    assert spans == ["0Some", "0 ", "0b", "1old", "1 wo", "2rds &", "2 1", "31 x"]


def test_a_chat_that_is_loaded_again_has_its_colours(engine, browser, monkeypatch):
    """A reload, or another chat in between, that makes everything grey, and colours that are sent to the model."""
    coloured = """JSON.stringify([...log.querySelectorAll('.text span[class]')].map(span =>
        [span.className.replace(/token |on/g, '').trim(), span.textContent]).reduce((all, [tint, text]) => {
            if (all.at(-1)?.[0] == tint) all.at(-1)[1] += text; else all.push([tint, text]);
            return all; }, []))"""
    browser.put(seed="5", temperature="1", most="60")
    browser.ask("def f(x):")
    before = browser.do(coloured)
    assert len({tint for tint, _ in json.loads(before)}) > 2
    browser.go()
    assert browser.do(coloured) == before and browser.do("!part('legend').hidden")
    assert browser.do("document.querySelectorAll('.token').length") == 0
    browser.click("#new")
    assert browser.do("part('legend').hidden")
    browser.click("#list")
    browser.click("#chats .name")
    assert browser.do(coloured) == before
    assert browser.do("request(chat.messages)[1].messages.every(one => Object.keys(one).join() == 'role,content')")


@pytest.mark.parametrize("watch", [False, True])
def test_a_thought_is_folded_away(engine, browser, monkeypatch, watch):
    """A thought in the text, one that is open, colours of the thought on the text, and one that is sent to the model."""
    source = engine.tokenizer.chat_template + "{# <think> #}"
    monkeypatch.setitem(engine.tokenizer.chat_templates, "default", source)
    if watch:  # the model's own tokens, of which the first four are the thought
        monkeypatch.setitem(engine.tokenizer.chat_templates, "default", f"{source}<think>")
        own = requests.set_thinking
        monkeypatch.setattr(requests, "set_thinking", lambda ask, given, think, most: own(ask, given, think, 4))
    else:
        script(monkeypatch, engine, "<think>\n<b>I</b> think.\n</think>\n\nHello.")
    browser.put(watch=watch, most="40")
    browser.ask("One?")
    thought = browser.do("document.querySelector('.thought').textContent")
    content = browser.do("chat.messages.at(-1).content")
    assert thought and browser.do("!document.querySelector('details').open")
    if watch:
        shown = browser.do("[...document.querySelectorAll('.text .token')].map(one => one.textContent).join('')")
        plain = str.maketrans("", "", " \n_")  # Markdown shows neither
        assert shown and shown.translate(plain) == content.translate(plain) and thought not in shown
    else:
        assert content == "Hello." and thought == "<b>I</b> think." and browser.texts(".text") == ["Hello."]
    browser.do("document.querySelector('details').open = true")
    browser.go()
    assert browser.do("document.querySelector('.thought').textContent") == thought
    assert browser.do("request(chat.messages)[1].messages.every(one => Object.keys(one).join() == 'role,content')")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("browser", [PHONE, DESK], indirect=True, ids=["phone", "desk"])
def test_the_page_is_clean(engine, browser, monkeypatch, dark):
    """Colours that cannot be read, parts outside of landmarks, and a tree or a settings panel that hides the field."""
    if dark:  # there is no desktop here that could ask for it
        browser.do("""document.documentElement.style.colorScheme = "dark";
            for (const rule of document.styleSheets[0].cssRules)
                if (rule.media?.mediaText.includes("dark")) rule.media.mediaText = "all"; null""")
    browser.put(seed="5", temperature="1", most="60")
    browser.ask("def f(x):")
    with monkeypatch.context() as patch:
        script(patch, engine, ANSWER)
        browser.put(watch=False, most="400")
        browser.ask("Some Markdown, please.")
    sees(browser)
    browser.do("document.querySelector('.token').click()")
    sees(browser)
    for button in ("#list", "#gear"):
        browser.click(button)
        sees(browser)
        browser.click(button)


def sees(browser: Browser, field: bool = True) -> None:
    """Check what is on the screen: the field is in sight and free, nothing is wider, and axe finds nothing."""
    assert browser.do("document.documentElement.scrollWidth <= innerWidth")
    assert browser.do("document.documentElement.scrollHeight <= innerHeight")
    assert not field or browser.do("""(() => {
        const {left, top, width, height} = box.getBoundingClientRect();
        return top + height <= innerHeight && document.elementFromPoint(left + width / 2, top + height / 2) == box;
    })()""")
    package = pytest.importorskip("axe_core_python", reason="the rules of axe are not installed (axe-core-python)")
    browser.do((resources.files(package) / "axe.min.js").read_text(encoding="utf-8") + "; null")
    browser.do("""window.found = null; axe.run().then(result => {
        const element = node => node.html.slice(0, 120) + (node.any[0]?.message || "");
        found = JSON.stringify(result.violations.map(rule => [rule.id, rule.nodes.map(element)]));
    }); null""")
    assert json.loads(browser.until("found")) == []


def test_a_full_context_offers_a_new_chat(browser, engine, monkeypatch):
    """A chat that only answers with errors from now on, and a text that is lost with it."""
    browser.put(watch=False, most="12")
    script(monkeypatch, engine, "word " * 230)
    browser.ask("Much?")
    long = "xq " * 400
    browser.ask(long)
    assert "the context holds 512" in browser.texts("#notice")[0] and browser.do("box.value") == long
    assert browser.texts(".user") == ["Much?"] and browser.do("chat.messages.length") == 2
    browser.click("#notice button")
    assert browser.texts(".user") == [] and browser.do("box.value") == long and browser.do("part('notice').hidden")
    monkeypatch.undo()
    browser.put(most="")
    browser.ask("x = 1\n")
    assert "the context is full" in browser.texts(".figures")[-1]
    assert browser.texts("#notice button") == ["Start a new chat"]


def test_a_server_that_dies_in_the_middle_of_an_answer(app, engine, monkeypatch):
    """An answer that waits for ever or is lost, an error in the words of the browser, a text that is lost with it,
    one more error for every try, and a page that has to be loaded again before it goes on with the next server."""
    held = threading.Event()
    with monkeypatch.context() as patch, running(engine) as server:
        browser = Browser(app, server.address, PHONE)
        browser.put(watch=False, most="40")
        gate = lambda: len(made[0].result.token_ids) < 5 or held.wait(20)  # noqa: E731
        made = script(patch, engine, "The beginning of an answer.", gate=gate)
        browser.ask("Begin?", wait=False)
        browser.until("log.querySelector('.text')?.textContent.length > 4")
        server.cut()
        browser.until("!running")
        held.set()
    said = "The server went away in the middle of the answer."
    begun = browser.texts(".text")[0]
    assert browser.texts("#notice") == [said] and "The beginning of an answer.".startswith(begun) and begun
    assert browser.texts(".user, .figures") == ["Begin?", "stopped"] and not browser.do("box.value")
    sees(browser)
    for question in ("And now?", "And now?", None):
        if question:
            browser.ask(question)
        else:
            browser.click(".regenerate")
            browser.until("!running")
        said = [text for text in browser.texts("body *") if text.startswith("The server does not answer")]
        assert said == browser.texts("#notice") and browser.do("box.value") == "And now?"
        assert browser.texts(".user, .text") == ["Begin?", begun]
    with running(engine, port=int(server.address.rpartition(":")[2])):
        script(monkeypatch, engine, "The whole answer.")
        browser.click(".regenerate")
        browser.until("!running")
        assert browser.texts(".user, .text") == ["Begin?", "The whole answer."] and browser.do("part('notice').hidden")
        assert browser.do("kept()[0].messages.at(-1).content") == "The whole answer."
    browser.close("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET")


def test_chats_are_few_and_can_be_deleted(browser, engine, monkeypatch):
    """A storage that grows until the browser refuses, and chats that nobody can delete."""
    browser.do(
        "keep(Array.from({length: 60}, (_, i) => ({id: `${i}`, messages: [{role: 'user', content: `chat ${i}`}]})))"
    )
    assert browser.do("kept().length") == 50
    browser.do("keep(Array.from({length: 9}, (_, i) => ({id: `${i}`, messages: [{role: 'user', content: "
               "`chat ${i}` + 'x'.repeat(200000)}]})))")  # fmt: skip
    assert browser.do("kept().map(one => one.id).join()") == "0,1,2,3"
    script(monkeypatch, engine, "Yes.")
    browser.put(watch=False)
    browser.ask("Kept?")
    kept = ["Kept?", *(f"chat {i}" for i in range(4))]
    assert browser.do("kept().map(one => one.messages[0].content.slice(0, 6))") == kept
    browser.click("#list")
    browser.do("document.querySelector('#chats [aria-label=\"delete the chat Kept?\"]').click()")
    assert browser.texts(".user") == [] and browser.do("kept().length") == 4
    browser.click("#chats > button")
    assert browser.do("kept().length") == 0 and browser.texts("#chats .name") == []
    browser.do("localStorage.setItem(CHATS, '{]'); localStorage.setItem(SETTINGS, '3')")
    browser.go()
    assert browser.texts(".user") == []


def test_the_page_asks_for_the_key(app, engine):
    """A page that stays empty behind a key, or that keeps a wrong one."""
    with running(engine, api_keys=("secret",)) as server:
        browser = Browser(app, server.address, PHONE)
        sees(browser, field=False)
        for key in ("wrong", "secret"):
            browser.do(f"part('key').value = {key!r}; part('login').requestSubmit()")
            browser.until(f"part('login').hidden == {json.dumps(key == 'secret')} && part('hello').textContent")
        browser.put(watch=False, most="8")
        browser.ask("x = 1")
        assert browser.texts(".user") == ["x = 1"] and browser.do("localStorage.length") == 2
        assert "secret" not in browser.do("JSON.stringify(localStorage)")
    browser.close("401")

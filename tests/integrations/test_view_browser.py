"""The pages of `streamloader view` in a real browser: images load, nothing leaves the machine, keys and sliders work.

`STREAMLOADER_SCREENSHOTS=folder` keeps a picture of each page, light and dark, wide and narrow.
"""

import json
import os
import shutil
import threading
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from datasets import SMALL, encoded, picture
from videos import encode
from viewing import FIELDS, HOSTILE, serving, value

import streamloader as sl
from streamloader.view.run import RunOptions
from streamloader.view.viewer import ViewOptions, load_tokenizer

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver: tests/install-browser.sh")
PAGES = ["/step", "/samples", "/sample?number=7", "/fields", "/statistics", "/order?step=3", "/losses", "/live"]
SIZES = {"wide": (1280, 900), "narrow": (360, 740)}
LOADED = "return [...document.images].every(image => image.complete)"
BROKEN = "return [...document.images].filter(image => !image.naturalWidth).map(image => image.src)"
IDLE = "return !document.querySelector('[aria-busy]') && document.readyState === 'complete'"


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(60)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def viewed(tmp_path_factory):
    """The address of a viewer of a dataset with every kind of field, a log of losses, and a run."""
    folder = tmp_path_factory.mktemp("viewed")
    url = folder / "d"
    with sl.Writer(url, FIELDS, layout=SMALL, provenance={"classes": {"label": ["ant", "bee", HOSTILE]}}) as writer:
        for i in range(200):
            writer.write(value(i))
    decode = {"image": sl.Decode(size=(64, 96), crop="random", normalize="imagenet", boxes="boxes")}
    loader = sl.NumpyDataset(str(url), batch_size=8, seed=3, decode=decode, with_index=True, num_workers=0)
    with sl.LossLog(loader, folder / "losses.jsonl") as log:
        for step, batch in enumerate(loader):
            log(batch, np.linspace(0, 2, 8) + 9 * (step == 11))
    with sl.metrics.StatsFile(loader, folder / "stats", seconds=0.1) as file:
        file.close()
        run = RunOptions(None)
        options = ViewOptions(run, str(folder / "losses.jsonl"), str(folder / "stats"), load_tokenizer("bytes"))
        with serving(options) as client:
            yield client


def address(client, path="/"):
    mark = "&" if "?" in path else "?"
    return f"http://127.0.0.1:{client.port}{path}{mark}token={client.cookie.partition('=')[2]}"


def opened(browser, client, path):
    """Open a page, and wait until all of it is loaded."""
    browser.get(address(client, path))
    settle(browser)


def settle(browser):
    browser.execute_script("for (const image of document.images) image.loading = 'eager'")
    WebDriverWait(browser, 60).until(lambda driver: driver.execute_script(IDLE) and driver.execute_script(LOADED))


def resize(browser, size, scheme="light"):
    width, height = SIZES[size]
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


def requests(browser):
    """The addresses that the browser has asked for since the last call."""
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_shows_all_its_images_and_asks_nobody_else(page, browser, viewed):
    resize(browser, "wide")
    browser.get("about:blank")
    requests(browser)
    browser.get_log("browser")
    opened(browser, viewed, page)
    assert browser.execute_script(BROKEN) == []
    assert browser.title.endswith("- streamloader")
    asked = requests(browser)
    assert len(asked) > 3
    assert [each for each in asked if not each.startswith((f"http://127.0.0.1:{viewed.port}/", "data:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert browser.execute_script("return document.cookie") == "", "scripts cannot read the cookie"


# the texts whose contrast to their background is below 4.5, the limit of WCAG 2.2 (AA)
CONTRAST = """
const parts = text => text.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255);
const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
const light = text => parts(text).map(linear).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const opaque = text => !text.endsWith(", 0)") && !text.startsWith("color");
const back = element => {
  while (element && !opaque(getComputedStyle(element).backgroundColor)) element = element.parentElement;
  return element ? getComputedStyle(element).backgroundColor : "rgb(255, 255, 255)";
};
const contrast = element => {
  const both = [light(getComputedStyle(element).color), light(back(element))];
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
return [...document.querySelectorAll("p, a, td, th, dt, dd, h1, h2, span, label, button")]
  .filter(element => element.textContent.trim() && contrast(element) < 4.5)
  .map(element => [contrast(element), element.textContent.slice(0, 30)]);
"""


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_and_can_be_read_in_light_and_dark_and_on_narrow_screens(scheme, size, browser, viewed):
    resize(browser, size, scheme)
    for page in PAGES:
        opened(browser, viewed, page)
        width = browser.execute_script("return document.documentElement.scrollWidth")
        assert width <= SIZES[size][0], f"{page} is {width} wide"
        assert browser.execute_script(CONTRAST) == [], page
        back = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, back[4:-1].split(","))) < 60) == (scheme == "dark")
        if folder := os.environ.get("STREAMLOADER_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            browser.save_screenshot(f"{folder}/{page.strip('/').partition('?')[0]}-{size}-{scheme}.png")


def title(browser):
    return browser.find_element(By.TAG_NAME, "h1").text


def test_the_keyboard_alone_reaches_everything(browser, viewed):
    resize(browser, "wide")
    opened(browser, viewed, "/step?epoch=0&step=3")

    def keys(*typed):
        browser.switch_to.active_element.send_keys(*typed)

    keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to content"
    keys(Keys.ARROW_RIGHT)
    settle(browser)
    assert title(browser) == "Epoch 0, step 4, rank 0"
    keys(Keys.ARROW_LEFT)
    settle(browser)
    assert title(browser) == "Epoch 0, step 3, rank 0"
    seen = []
    for _ in range(60):
        keys(Keys.TAB)
        element = browser.switch_to.active_element
        if element.tag_name == "body":  # after the last element
            break
        seen.append(element.text or element.get_attribute("name"))
        outline = browser.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", element.get_attribute("outerHTML")  # where the keyboard is can be seen
    assert {"Samples", "Losses", "epoch", "step", "rank", "Show"} <= set(seen)
    field = browser.find_element(By.NAME, "step")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("7", Keys.ENTER)
    settle(browser)
    assert title(browser) == "Epoch 0, step 7, rank 0"
    opened(browser, viewed, "/samples")
    where = browser.find_element(By.NAME, "where")
    where.send_keys("label == 1", Keys.ARROW_LEFT, Keys.ARROW_RIGHT, Keys.ENTER)  # arrows stay in the field
    settle(browser)
    assert "67 samples with label == 1" in browser.find_element(By.TAG_NAME, "main").text


def test_a_slider_shows_what_other_lanes_cost(browser, viewed):
    resize(browser, "wide")
    opened(browser, viewed, "/order")
    before = browser.find_element(By.ID, "plan").text
    assert "USD" in before
    ranks = browser.find_element(By.NAME, "world_size")
    slider = ranks.find_element(By.XPATH, "preceding-sibling::input")
    slider.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    WebDriverWait(browser, 30).until(lambda driver: "by 4 ranks" in driver.find_element(By.ID, "plan").text)
    assert ranks.get_attribute("value") == "4"


def test_a_spike_of_the_loss_is_two_clicks_from_its_samples(browser, viewed):
    resize(browser, "wide")
    opened(browser, viewed, "/losses")
    first = browser.find_element(By.CSS_SELECTOR, "article a")
    assert first.text == "epoch 0, step 11, rank 0, row 7"
    first.click()
    settle(browser)
    assert title(browser) == "Epoch 0, step 11, rank 0"
    chosen = browser.find_element(By.CSS_SELECTOR, "article.chosen a")
    number = chosen.text.split()[-1]
    chosen.click()
    settle(browser)
    assert title(browser) == f"Sample {number}"
    assert browser.find_elements(By.CSS_SELECTOR, ".picture rect"), "the crop is drawn"


def test_a_sound_plays_and_a_video_shows_its_frames(browser, viewed, tmp_path):
    opened(browser, viewed, "/samples")
    audio = "const a = document.querySelector('audio'); a.preload = 'auto'; a.load(); return true"
    browser.execute_script(audio)
    ready = "return document.querySelector('audio').duration > 0.2"
    WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(ready))
    with sl.Writer(tmp_path / "v", {"video": "video"}) as writer:
        writer.write({"video": encode(frames=24)})
    with serving(ViewOptions(RunOptions(str(tmp_path / "v")))) as client:
        opened(browser, client, "/samples")
        size = "const v = document.querySelector('video'); return v.videoWidth * v.duration > 0"
        WebDriverWait(browser, 30).until(lambda driver: driver.execute_script(size))
    clips = {"video": sl.Clips(4, stride=2)}
    with serving(ViewOptions(RunOptions(str(tmp_path / "v"), given={"batch_size": 2, "clips": clips}))) as client:
        opened(browser, client, "/step")
        assert len(browser.find_elements(By.CSS_SELECTOR, "article:first-child .planes img")) == 4
        assert browser.execute_script(BROKEN) == []


ATTACK = """<!doctype html><title>elsewhere</title><body><script>
const target = "TARGET", results = window.results = [];
const note = (name, value) => results.push([name, value || "refused"]);
const ask = (name, options) => fetch(target, {credentials: "include", ...options})
  .then(response => response.text()).then(text => note(name, text), () => note(name));
ask("fetch", {});
ask("no-cors", {mode: "no-cors"});
const image = new Image();
image.onload = () => note("image", "loaded");
image.onerror = () => note("image");
image.src = "MEDIA";
const frame = document.createElement("iframe");
frame.onload = () => {
  let text = "";
  try { text = frame.contentDocument.body.innerText; } catch (error) {}
  note("frame", text);
};
frame.src = target;
document.body.append(frame);
</script>"""


@contextmanager
def elsewhere(html):
    """A page of another origin on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        log_message = staticmethod(lambda *_: None)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=partial(server.serve_forever, 0.05))
    thread.start()
    try:
        yield f"http://localhost:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_of_another_origin_gets_nothing_though_the_browser_has_the_cookie(browser, viewed):
    opened(browser, viewed, "/samples")
    media = browser.find_element(By.TAG_NAME, "img").get_attribute("src")
    html = ATTACK.replace("TARGET", f"http://127.0.0.1:{viewed.port}/samples").replace("MEDIA", media)
    with elsewhere(html) as page:
        browser.get(page)
        WebDriverWait(browser, 30).until(lambda driver: driver.execute_script("return results.length") == 4)
        results = dict(browser.execute_script("return results"))
    assert results == {"fetch": "refused", "no-cors": "refused", "image": "refused", "frame": "refused"}


def test_a_running_training_is_followed_without_a_reload(browser, tmp_path):
    with sl.Writer(tmp_path / "d", {"x": "int64"}) as writer:
        for i in range(400):
            writer.write({"x": i})
    loader = sl.NumpyDataset(str(tmp_path / "d"), batch_size=4, num_workers=0)
    batches = iter(loader)
    next(batches)
    with (
        sl.metrics.StatsFile(loader, tmp_path / "stats", seconds=0.05),
        sl.metrics.StatsFile(loader, tmp_path / "stats", seconds=0.05) as file,
    ):
        file.close()
        run = RunOptions(str(tmp_path / "d"))
        with serving(ViewOptions(run, live=str(tmp_path / "stats"))) as client:
            opened(browser, client, "/live")
            cell = lambda: browser.find_element(By.CSS_SELECTOR, "tbody td:nth-child(4)").text  # noqa: E731
            begin = cell()
            for _ in range(50):
                next(batches)
            WebDriverWait(browser, 30, ignored_exceptions=[Exception]).until(lambda _: cell() not in (begin, ""))


def test_a_running_training_that_does_not_answer_is_asked_once_at_a_time(browser, viewed, monkeypatch):
    asked, ended = [], threading.Event()

    def wait(*_, **__):
        asked.append(1)
        if len(asked) > 1:  # the first is the page itself
            ended.wait(60)
        return []

    monkeypatch.setattr("streamloader.view.server.read_stats", wait)
    monkeypatch.setattr("streamloader.view.server.LIVE_SECONDS", 0.2)
    browser.get(address(viewed, "/live"))
    try:
        WebDriverWait(browser, 30).until(lambda _: len(asked) > 1)
        browser.execute_script(
            "window.ticks = window.more = 0; setInterval(() => ticks++, 200);"
            "const plain = fetch; window.fetch = (...given) => { more++; return plain(...given); };"
        )
        WebDriverWait(browser, 30).until(lambda driver: driver.execute_script("return ticks") > 5)
        assert browser.execute_script("return more") == 0
    finally:
        ended.set()


def test_60_images_are_shown_within_half_a_second(browser, tmp_path):
    with sl.Writer(tmp_path / "d", {"image": "bytes:jpeg", "label": "int64"}) as writer:
        for i in range(400):
            writer.write({"image": encoded(picture(i, 375, 500), "jpeg"), "label": i})
    resize(browser, "wide")
    with serving(ViewOptions(RunOptions(str(tmp_path / "d")))) as client:
        opened(browser, client, "/samples")
        times = []
        for page in range(1, 6):
            opened(browser, client, f"/samples?page={page}")
            ends = "return Math.max(...performance.getEntriesByType('resource').map(e => e.responseEnd))"
            assert len(browser.find_elements(By.CSS_SELECTOR, "article img")) == 60
            times.append(browser.execute_script(ends) / 1000)
    assert min(times) < 0.5, times


def test_numbers_that_are_no_tokens_are_shown_as_numbers(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    texts = load_tokenizer(str(tmp_path / "tokenizer.json"))([1, 0, 2, -100, 2**40])
    assert texts == ["b", "a", "<2>", "<-100>", f"<{2**40}>"]

"""The page in a real browser, of a real master: daemons, training loops, and a daemon that is killed."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest
from selenium import webdriver
from selenium.common.exceptions import WebDriverException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import wancoll
from tests.page.support import page_of
from wancoll.errors import WancollError
from wancoll.testing import Cluster

SECONDS = 20.0  # for what takes a second or two where the machine is not busy
MEMBERS = 3
STRANGE = "<script>document.title='x'</script>"
T = TypeVar("T")

pytestmark = [
    pytest.mark.check,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="there is no Chromium here; Debian's packages are called chromium and chromium-driver",
    ),
]


def train(socket: str, name: str, group: str = "<i>g", world: int = MEMBERS) -> Iterator[int]:
    """Steps until the end."""
    with wancoll.connect(socket=socket, group=group, name=name, start_world=world, min_world=min(world, 2)) as comm:
        gradient = comm.empty(100_000, np.float32)
        while True:
            gradient[:] = 1
            yield len(comm.all_reduce(gradient).contributors)
            time.sleep(0.05)


OPTIONS = ["--page=127.0.0.1:0", "--handshake-timeout=30"]  # the machine may stand still for a while


@contextlib.contextmanager
def training() -> Iterator[tuple[Cluster, str]]:
    """A cluster whose members train, and where its page is."""
    with Cluster(
        MEMBERS, fork=True, lanes=2, listen="127.0.0.{i}:0", master_args=OPTIONS, heartbeat_timeout=20
    ) as cluster:
        clients = [cluster.client(i, train, STRANGE if i == 0 else f"m{i}") for i in range(MEMBERS)]
        over = threading.Event()

        def work(i: int) -> None:
            try:
                while not over.is_set():
                    clients[i].next()
            except WancollError as ended:
                print(f"member {i}: {ended}, exit code {clients[i].exit_code}")  # its daemon is killed

        threads = [threading.Thread(target=work, args=(i,)) for i in range(MEMBERS)]
        for one in threads:
            one.start()
        try:
            yield cluster, f"http://{page_of(cluster.master_logs(1000))}/"
        except BaseException:
            print(cluster.master_logs(100), *(cluster.logs(i, 50) for i in range(MEMBERS)), sep="\n\n")
            raise
        finally:
            over.set()
            for one in threads:
                one.join()


class Browser:
    """Chromium, as wide as a test wants it."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        for one in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(one)
        options.binary_location = shutil.which("chromium") or ""
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))

    def shape(self, width: int, *, dark: bool) -> None:
        """As on a screen of this width."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})

    def run(self, script: str) -> Any:
        return self.driver.execute_script(f"return {script}")

    def text(self, id: str) -> str:
        return str(self.run(f"document.getElementById({id!r}).textContent"))

    def until(self, look: Callable[[], T], good: Callable[[T], bool]) -> T:
        """The first look that is good."""
        end = time.monotonic() + SECONDS
        while not good(found := look()):
            assert time.monotonic() < end, found
            time.sleep(0.02)
        return found

    def until_text(self, id: str, part: str) -> str:
        return self.until(lambda: self.text(id), lambda text: part in text)

    def errors(self) -> list[Any]:
        """What its console says."""
        return [line for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]


@pytest.fixture
def browser() -> Iterator[Browser]:
    try:
        made = Browser()
    except WebDriverException as bad:
        pytest.skip(f"Chromium does not start here: {bad.msg}")
    try:
        yield made
    finally:
        made.driver.quit()


@pytest.mark.timeout(180)
def test_a_newcomer_sees_who_died_what_it_cost_and_that_all_is_well(browser: Browser) -> None:
    with training() as (cluster, at):
        browser.shape(1280, dark=False)
        browser.driver.get(at)
        browser.until_text("line", "all is well: 1 group, 3 members")
        browser.until(lambda: browser.text("figures"), lambda text: "B/sover links" in text or "B/s" in text)
        browser.until(lambda: browser.run("document.querySelectorAll('#picture .link:not(.unknown)').length"), bool)
        browser.until(lambda: browser.run("document.querySelectorAll('#chart .line').length"), bool)
        assert browser.run("document.querySelectorAll('#rows tr').length") == MEMBERS
        assert STRANGE in browser.text("rows")
        assert browser.run("document.querySelectorAll('#main script, #main i').length") == 0
        assert "epoch 1, 3 members" in browser.text("epochs")
        began = time.monotonic()
        cluster.kill(2)
        browser.until_text("note", "lost m2")
        seen = time.monotonic() - began
        browser.until_text("line", "all is well again: 1 group, 2 members")
        browser.until_text("epochs", "epoch 2, 2 members · went on after")
        browser.until_text("lost", "m2 lost")
        assert browser.run("document.querySelectorAll('#epochs [data-kind=lost]').length") == 1
        assert "daemon died" in browser.text("events")
        assert "lost m2" in browser.until_text("said", "all is well again")  # aloud
        browser.until(lambda: browser.run("document.querySelectorAll('#picture .node').length"), lambda many: many == 2)
        print(f"seen after {seen:.2f} s")
        assert seen < SECONDS
        cluster.kill_master()
        browser.until(
            lambda: browser.run("document.getElementById('state').dataset.well"), lambda well: well == "false"
        )
        assert "no word from the master" in browser.text("line")
        browser.errors()  # that it is gone
        assert browser.run("document.title") == "! wancoll"


@pytest.mark.timeout(180)
def test_it_fits_is_read_aloud_and_is_used_without_a_mouse(browser: Browser) -> None:
    with training() as (_, at):
        for width in (1280, 390):
            for dark in (False, True):
                browser.shape(width, dark=dark)
                browser.driver.get(at)
                browser.until_text("line", "all is well")
                browser.until(lambda: browser.run("document.querySelectorAll('#chart .line').length"), bool)
                assert browser.run("document.documentElement.scrollWidth <= innerWidth"), (width, dark)
                off = "[...document.querySelectorAll('section, section *:not(.scrolls *)')].filter(one => {"
                off += "const box = one.getBoundingClientRect(); return box.width > 1 && box.right > innerWidth + 1;})"
                assert browser.run(f"{off}.map(one => one.outerHTML.slice(0, 100))") == []
                back, ink = browser.run("['backgroundColor', 'color'].map(of => getComputedStyle(document.body)[of])")
                assert (_light(back) < _light(ink)) == dark
                assert abs(_light(back) - _light(ink)) > 0.6
        assert browser.errors() == []
        for role, most in (("status", 1), ("main", 1), ("navigation", 1), ("banner", 1)):
            named = {"main": "main", "navigation": "nav", "banner": "header"}
            assert browser.run(f"document.querySelectorAll('{named.get(role, f'[role={role}]')}').length") == most
        assert browser.run("document.querySelector('[role=status]').getAttribute('aria-live')") == "polite"
        nameless = "[...document.querySelectorAll('svg[role=img], section, ol[tabindex], [role=region], nav')]"
        nameless += ".filter(one => !(one.getAttribute('aria-label') || one.getAttribute('aria-labelledby')))"
        assert browser.run(f"{nameless}.map(one => one.outerHTML.slice(0, 100))") == []
        assert "3 members" in browser.run("document.querySelector('#picture svg').getAttribute('aria-label')")
        browser.run("document.body.focus()")
        reached = []
        for _ in range(5):
            browser.driver.switch_to.active_element.send_keys(Keys.TAB)
            reached.append(browser.run("document.activeElement.className + ' ' + document.activeElement.id"))
        assert [one.strip() for one in reached[:2]] == ["skip", "scrolls epochs"]
        assert reached[3].strip() == "scrolls events"
        browser.driver.find_element(By.CLASS_NAME, "skip").send_keys(Keys.ENTER)
        assert browser.run("document.activeElement.id") == "main"
        assert browser.errors() == []


@pytest.mark.timeout(180)
def test_names_of_groups_and_links_to_the_page_are_free(browser: Browser) -> None:
    names = ["__proto__", "constructor", "good", "toString"]
    with Cluster(1, fork=True, lanes=1, master_args=OPTIONS, heartbeat_timeout=20) as cluster:
        for name in names:
            cluster.client(0, train, "m", name, 1).next()
        at = f"http://{page_of(cluster.master_logs(1000))}/"
        shown = "[...document.querySelectorAll('#groups option')].map(one => one.textContent)"
        line = "document.querySelectorAll('#chart .line').length"
        browser.driver.get(at)
        browser.until(lambda: browser.run(line), bool)
        browser.driver.refresh()  # the past is told now
        browser.until_text("line", "all is well: 4 groups")
        browser.until(lambda: browser.run(shown), lambda found: sorted(found) == names)
        for name in names:
            browser.driver.find_element(By.CSS_SELECTOR, f"#groups option[value='{name}']").click()
            browser.until_text("name", f"of {name}")
            assert browser.run("document.getElementById('rows').childElementCount") == 1
            browser.until(lambda: browser.run(line), bool)
        browser.driver.get("about:blank")
        browser.driver.get(f"{at}#%")
        browser.until(lambda: browser.run("!document.getElementById('main').hidden"), bool)
        assert browser.errors() == []


def _light(colour: str) -> float:
    """Of "rgb(1, 2, 3)": from 0 to 1."""
    red, green, blue = (int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

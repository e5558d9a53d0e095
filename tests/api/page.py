"""The page at `/` in headless Chromium: what a person sees and does.

Usage: page.py BASE_URL [KEY]
"""

import sys
import tempfile

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

base, key = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
# Without the network: the page loads nothing from elsewhere, and Chromium should not either.
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync""".split()


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in [*FLAGS, f"--user-data-dir={tempfile.mkdtemp()}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService("/usr/bin/chromedriver"))


page = browser()
try:
    page.get(base)
    at = lambda id: page.find_element(By.ID, id)
    turns = lambda role: [turn.text for turn in page.find_elements(By.CSS_SELECTOR, f".turn.{role}")]
    until = lambda condition: WebDriverWait(page, 20, 0.05).until(lambda _: condition())

    if key:
        until(lambda: "API key" in at("status").text)
        at("key").send_keys(key)
        page.execute_script("document.getElementById('key').onchange()")
    until(lambda: at("model").text and "running" in at("status").text)
    print("the model and the server's state are shown:", at("model").text, "|", at("status").text)

    at("text").send_keys("the engine")
    at("send").click()
    until(lambda: at("send").text == "Send" and turns("assistant") and len(turns("assistant")[0].split()) > 5)
    assert turns("user") == ["the engine"] and not turns("error"), (turns("user"), turns("error"))
    print("an answer is shown as it comes:", len(turns("assistant")[0].split()), "words")

    at("text").send_keys("and again\n")
    until(lambda: at("send").text == "Stop")
    at("send").click()
    until(lambda: at("send").text == "Send")
    assert len(turns("user")) == 2 and not turns("error"), turns("error")
    print("Enter sends, and Stop stops")

    at("reset").click()
    assert not page.find_elements(By.CSS_SELECTOR, ".turn")
    at("text").send_keys("<b>bold</b><script>document.title='owned'</script>")
    at("send").click()
    until(lambda: turns("user"))
    assert turns("user")[0].startswith("<b>") and page.title == "Windlass", "markup in a message was rendered"
    print("messages are text, and New forgets")

    faults = [line["message"] for line in page.get_log("browser") if line["level"] == "SEVERE" and "favicon" not in line["message"]]
    faults = [fault for fault in faults if not (key and "401" in fault)]
    assert not faults, faults
finally:
    page.quit()

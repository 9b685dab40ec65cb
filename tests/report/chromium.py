"""Controls a headless Chromium through its debugging pipe, using only the standard library."""
import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find():
    """The path of the browser, or None."""
    named = os.environ.get("REPRISE_BROWSER")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A browser with one page. Commands are written to fd 3, replies are read from fd 4."""

    def __init__(self, path):
        self.profile = tempfile.mkdtemp(prefix="reprise-chromium-")
        to_browser, self.write = os.pipe()
        self.read, from_browser = os.pipe()

        def connect():
            # Duplicated first, since the pipes may themselves be 3 or 4.
            a, b = os.dup(to_browser), os.dup(from_browser)
            high = [os.dup2(a, 60), os.dup2(b, 61)]
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        self.process = subprocess.Popen(
            [path, "--headless", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
             "--disable-background-networking", "--force-color-profile=srgb",
             "--remote-debugging-pipe", f"--user-data-dir={self.profile}",
             "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, close_fds=False, preexec_fn=connect)
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.last = 0
        self.events = []
        self.session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target,
                                 flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.write)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.read)
        shutil.rmtree(self.profile, ignore_errors=True)

    def message(self, deadline):
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self.read, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self.buffer += part
        text, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(text)

    def send(self, method, timeout=120, **params):
        self.last += 1
        number = self.last
        command = {"id": number, "method": method, "params": params}
        if self.session:
            command["sessionId"] = self.session
        left = json.dumps(command).encode() + b"\0"
        while left:
            left = left[os.write(self.write, left):]
        deadline = time.monotonic() + timeout
        while True:
            message = self.message(deadline)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def evaluate(self, expression):
        """Evaluates a JavaScript expression; awaits promises."""
        answer = self.send("Runtime.evaluate", expression=expression,
                           returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get(
                "description", details["text"]))
        return answer["result"].get("value")

    def open(self, url, width, height=900, dark=False, phone=False):
        self.send("Emulation.setDeviceMetricsOverride", width=width,
                  height=height, deviceScaleFactor=1, mobile=phone)
        self.send("Emulation.setEmulatedMedia", features=[
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        # A URL that differs only in its fragment would not reload the document.
        for address in ("about:blank", url):
            self.events.clear()
            self.send("Page.navigate", url=address)
            deadline = time.monotonic() + 120
            while not any(e.get("method") == "Page.loadEventFired"
                          for e in self.events):
                self.events.append(self.message(deadline))

    def settle(self):
        """Waits until the page has rendered two frames."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => "
                      "requestAnimationFrame(() => done(true))))")

    def screenshot(self, path, whole=False, clip=None):
        params = {"format": "png", "captureBeyondViewport": whole or bool(clip)}
        if clip:
            params["clip"] = dict(zip(("x", "y", "width", "height"), clip), scale=1)
        data = self.send("Page.captureScreenshot", **params)["data"]
        with open(path, "wb") as file:
            file.write(base64.b64decode(data))

    def complaints(self):
        """Errors and warnings on the console, exceptions, and network requests."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append("exception: " + details.get("exception", {}).get(
                    "description", details["text"]))
            elif method == "Runtime.consoleAPICalled" and params["type"] in (
                    "error", "warning", "assert"):
                found.append(f"console {params['type']}: " + " ".join(
                    str(a.get("value", a.get("description"))) for a in params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in (
                    "error", "warning"):
                found.append(f"log: {params['entry']['text']}")
        return found

    def requests(self):
        return [e["params"]["request"]["url"] for e in self.events
                if e.get("method") == "Network.requestWillBeSent"]

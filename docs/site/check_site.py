"""Checks the built site: links to pages, anchors, pictures and scripts, without a network.

    check_site.py SITE
    check_site.py --browser PICTURES SITE

With --browser, also opens every page in a headless Chromium, at 1280 and at 390 px: no page
may scroll sideways, complain on the console, or request anything from a network. Pictures of
some pages are written to PICTURES.
"""
import html.parser
import pathlib
import sys
import urllib.parse

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHOWN = ["index", "tutorial", "how-to/budget", "commands/train", "headers/recompute/checkpoint",
         "headers/index", "results/index", "troubleshooting", "faq", "out-of-memory"]
WIDTHS = {1280: 900, 390: 844}


class Page(html.parser.HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self, path):
        super().__init__()
        self.anchors = {""}
        self.targets = []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        self.anchors.update(names[key] for key in ("id", "name") if names.get(key))
        for key in ("href", "src"):
            if names.get(key) and tag in ("a", "img", "link", "script", "object"):
                self.targets.append((self.getpos()[0], names[key]))


def check_links(site):
    # What is copied as it is, such as a report, has links of its own.
    pages = {path: Page(path) for path in sorted(site.rglob("*.html"))
             if path.name != "report.html"}
    for path, page in pages.items():
        for line, target in page.targets:
            parts = urllib.parse.urlsplit(target)
            if parts.scheme or parts.netloc:
                if parts.scheme not in ("https", "http", "mailto", "data"):
                    yield f"{path}:{line}: '{target}' is no valid address"
                continue
            linked = (path.parent / urllib.parse.unquote(parts.path)).resolve() \
                if parts.path else path
            anchor = urllib.parse.unquote(parts.fragment)
            if not linked.is_file():
                yield f"{path}:{line}: '{target}' does not exist"
            elif linked in pages and anchor not in pages[linked].anchors:
                yield f"{path}:{line}: '{target}': that page has no #{anchor}"


# What is wider than the page, and not in an element that scrolls by itself.
TOO_WIDE = """(() => {
  if (document.documentElement.scrollWidth <= innerWidth) return '';
  const wide = [...document.querySelectorAll('main *, article *')].filter(e =>
      e.getBoundingClientRect().right > innerWidth + 1);
  return (wide.length ? wide[wide.length - 1].outerHTML.slice(0, 120) : 'the page');
})()"""


# Waits for results of the search, for ten seconds.
SEARCHED = """new Promise(done => {
  let left = 100;
  const look = () => {
    const found = document.querySelectorAll('#search-results li').length;
    if (found || left-- === 0) done(found); else setTimeout(look, 100);
  };
  look();
})"""


def check_browser(site, pictures):
    sys.path.insert(0, str(ROOT / "tests/report"))
    import chromium
    found = chromium.find()
    if not found:
        yield "no Chromium was found; install it or set REPRISE_BROWSER"
        return
    pictures.mkdir(parents=True, exist_ok=True)
    paths = [path for path in sorted(site.rglob("*.html")) if path.name != "report.html"]
    with chromium.Browser(found) as browser:
        for width, height in WIDTHS.items():
            for path in paths:
                name = path.relative_to(site).with_suffix("").as_posix()
                browser.open(path.as_uri(), width, height, phone=width < 500)
                wide = browser.evaluate(TOO_WIDE)
                if wide:
                    yield f"{name} at {width} px scrolls sideways: {wide}"
                for complaint in browser.complaints():
                    yield f"{name} at {width} px: {complaint}"
                for url in browser.requests():
                    if not url.startswith(("file:", "about:", "data:")):
                        yield f"{name} requests {url}"
                if name in SHOWN:
                    browser.settle()
                    browser.screenshot(pictures / f"{name.replace('/', '-')}-{width}.png")
        browser.open((site / "search.html").as_uri() + "?q=checkpoint", 1280)
        if not browser.evaluate(SEARCHED):
            yield "the search finds no page for 'checkpoint'"
        for name in ("index", "headers/recompute/checkpoint"):
            browser.open((site / f"{name}.html").as_uri(), 1280, dark=True)
            browser.settle()
            browser.screenshot(pictures / f"{name.replace('/', '-')}-dark.png")
    print(f"{len(paths)} pages at {' and '.join(map(str, WIDTHS))} px")


def main(arguments):
    if arguments[0] == "--browser":
        problems = list(check_browser(pathlib.Path(arguments[2]).resolve(),
                                      pathlib.Path(arguments[1]).resolve()))
    else:
        problems = list(check_links(pathlib.Path(arguments[0]).resolve()))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

import json
import math
import re
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Composes what is under a text before it takes the contrast, as the page paints tints.
CONTRAST = """
const parse = c => c.match(/[\\d.]+/g).map(Number);
const luminance = c => { const [r, g, b] = parse(c).map(v => v / 255)
  .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const ground = e => { for (; e; e = e.parentElement) {
  const c = getComputedStyle(e).backgroundColor;
  if (parse(c)[3] !== 0) return c; } return 'rgb(255, 255, 255)'; };
const texts = 'body, h1, p, th, td, .note, .verdict, a, code, dt, li';
return [...document.querySelectorAll(texts)].map(e => {
  const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))].sort((x, y) => y - x);
  return [e.tagName + '.' + e.className, (a + 0.05) / (b + 0.05)]; });
"""


LENGTHS = tuple(range(10, 101, 10))
SEEDS = (0, 1, 2)
ARMS = (
    ("coupled_relative", "Coupled relative bias (ours)", "ours", 400.0, ""),
    ("random_start", "Random starting position", "baseline", 17.0, ""),
    ("none", "No positions", "baseline", 9.0, "did not fit the trained range"),
)


def exact_match(reach, length, seed):
    """A made-up curve that falls at `reach`; every value is a share with four digits."""
    return round(1 / (1 + math.exp((length - reach) / 4)) * (1 - 0.004 * seed), 4)


def rows():
    return [
        {
            "arm": name,
            "seed": seed,
            "digits": n,
            "inputs": 64,
            "exact_match": exact_match(reach, n, seed),
        }
        for name, _, _, reach, _ in ARMS
        for seed in SEEDS
        for n in LENGTHS
    ]


def table_row(name, role, reach, note):
    row = {"arm": name, "role": role, "seeds": len(SEEDS)}
    for n in LENGTHS:
        values = [exact_match(reach, n, seed) for seed in SEEDS]
        row |= {
            f"exact_match_{n}_here": statistics.median(values),
            f"exact_match_{n}_low_here": min(values),
            f"exact_match_{n}_high_here": max(values),
        }
    if role == "ours":
        row["exact_match_100_paper"] = 0.957
    return row | {"seconds_here": 83.2 if role == "ours" else 71.5, "note": note}


def claim(text, rule, length, verdict, **changes):
    ours = [exact_match(400.0, length, seed) for seed in SEEDS]
    made = {
        "text": text, "metric": f"exact_match_{length}", "unit": "exact match",
        "ours": {
            "name": "coupled_relative", "statistic": "median", "value": statistics.median(ours),
            "values": ours,
        },
        "baseline": {"name": "bar", "value": 0.99},
        "difference": round(statistics.median(ours) - 0.99, 4), "interval": [-0.004, 0.016],
        "rule": rule, "better": "higher", "bar": 0.99, "verdict": verdict, "paper": {},
    }  # fmt: skip
    return made | changes


def claims():
    baseline = [exact_match(17.0, 20, seed) for seed in SEEDS]
    side = {
        "name": "random_start",
        "statistic": "median",
        "value": statistics.median(baseline),
        "values": baseline,
    }
    return [
        claim("Trained on 1–10 digits, it adds 30 digits exactly", "bar", 30, "held"),
        claim(
            "At 20 digits it beats the best uncoupled baseline", "paired", 20, "held",
            baseline=side, difference=0.672, interval=[0.66, 0.69], bar=0.5,
        ),
        claim(
            "At 100 digits every seed stays exact", "seeds", 100, "held",
            paper={"100 digits": 0.957},
        ),
    ]  # fmt: skip


def summary():
    return {
        "recipe": "position-coupling",
        "scale": "small",
        "seeds": list(SEEDS),
        "verdict": "held",
        "claims": claims(),
        "table": [
            *(table_row(name, role, reach, note) for name, _, role, reach, note in ARMS),
            table_row("coupled_relative", "ours", 60.0, "") | {"variant": "hard"},
        ],
        "seconds": 412.6,
        "version": "0.1.0",
    }


def page():
    curve = {
        "kind": "curve", "name": "exact-match-by-length", "title": "Exact match by length",
        "alt": "The coupled arm stays at 1 up to 100 digits; both baselines fall to 0 by 30.",
        "x": "digits", "y": "exact_match", "group": None, "value": None, "where": {},
        "x_label": "digits of each operand", "y_label": "exact match", "shade": [1, 10],
        "log_x": False, "log_y": False,
        "paper": {"100 digits": 0.957},
    }  # fmt: skip
    bars = {
        "kind": "bars", "name": "twenty-digits", "title": "Exact match at 20 digits",
        "alt": "One bar per method: ours 1, random start 0.3, no positions 0.06.",
        "x": "arm", "y": "exact_match", "where": {"digits": 20}, "y_label": "exact match",
    }  # fmt: skip
    heat = {
        "kind": "heatmap", "name": "by-seed", "title": "Exact match by length and seed",
        "alt": "All cells of the coupled arm are near 1.",
        "x": "digits", "y": "seed", "value": "exact_match", "box": [[10, 10], [0, 2]],
    }  # fmt: skip
    return {
        "title": "Position coupling adds numbers ten times longer than it was trained on",
        "what": "A small transformer learns to add numbers of 1 to 10 digits. Digits of the same "
        "weight share a position, and the model is then asked for sums of up to 100 digits.",
        "paper": "Cho et al., Position Coupling: Improving Length Generalization of Arithmetic "
        "Transformers, NeurIPS 2024",
        "columns": [
            {
                "name": f"exact_match_{n}",
                "label": f"{n} digits",
                "unit": "exact match",
                "in_domain": n == 10,
            }
            for n in LENGTHS
        ],
        "arms": [{"name": name, "title": title, "role": role} for name, title, role, *_ in ARMS],
        "figures": [curve, bars, heat],
        "deviations": [
            "Two layers instead of one; the paper's table 1 is the setting for 1-layer models."
        ],
        "notes": ["Model choice looked at 10 digits only."],
        "command": "gossamer reproduce position-coupling --scale small --seeds 3",
    }


def environment():
    return {
        "python": "3.11.7", "platform": "Linux x86_64", "cpu": "2 cores", "threads": 1,
        "packages": {"numpy": "2.4.6", "torch": "2.13.0"},
    }  # fmt: skip


def write_csv(path, table):
    heads = list(table[0])
    lines = [",".join(heads), *(",".join(str(row[head]) for head in heads) for row in table)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_run(folder, **changes):
    """Write a run folder; `summary=`, `page=` and `rows=` replace what it would hold."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("summary", summary), ("page", page), ("environment", environment)):
        data = changes.get(name) or content()
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2), encoding="utf-8")
    write_csv(folder / "rows.csv", changes.get("rows") or rows())
    (folder / "config.toml").write_text('scale = "small"\n[train]\nsteps = 2000\nlr = 0.001\n')
    (folder / "metrics.jsonl").write_text("{}\n")
    return folder


class Outline(HTMLParser):
    """Headings, links and identifiers of a page, and whether its tags are balanced."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.headings = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_outline(html):
    parser = Outline()
    parser.feed(html)
    assert parser.open == []
    return parser


def read_words(html):
    """The text a reader sees, without style and figures."""
    html = re.sub(r"(?s)<style>.*?</style>|<svg.*?</svg>", " ", html)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "position-coupling")


@pytest.fixture
def make_run(tmp_path):
    """Write a run folder under a name of its own."""
    return lambda name="run", **changes: write_run(tmp_path / name, **changes)


@pytest.fixture
def parts():
    """The contents of a run folder, to change before writing."""
    return {"summary": summary(), "page": page(), "rows": rows()}


@pytest.fixture(scope="session")
def writer():
    """The function that writes a run folder."""
    return write_run


@pytest.fixture
def outline():
    """The function that reads headings, attributes and balance of a page."""
    return read_outline


@pytest.fixture
def words():
    """The function that reads the text of a page."""
    return read_words


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """A headless browser."""
    if not (CHROMIUM and DRIVER):
        pytest.skip(f"needs a browser: chromium: {CHROMIUM}, chromedriver: {DRIVER}")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def show(browser):
    """Open a file at a width in a colour scheme."""

    def run(path, width=1280, scheme="light", media=""):
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": features}
        )
        browser.get(path.resolve().as_uri())
        return browser

    return run

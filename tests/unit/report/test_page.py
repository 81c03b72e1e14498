"""The page holds the rows' numbers, asks the network for nothing, and no text from a row acts in it."""

import html.parser
import re

import pytest

from tests.support import synthetic
from tests.support.commands import report as main
from tests.unit.report.test_tables import HOSTILE
from tests.unit.report.test_verdicts import measured
from tpbench import packages
from tpbench.report.page.html_page import page
from tpbench.results.read import load


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return synthetic.write(synthetic.cells(), tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def source(rows):
    return page(load(rows))


class Page(html.parser.HTMLParser):
    """Tables by name, as lists of lists of (text, number)."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.text, self.attributes, self.tables = set(), "", [], []
        self._cell = None
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        found = dict(attrs)
        if tag == "div" and "data-name" in found:
            self.tables.append((found["data-name"], []))
        if tag == "tr":
            self.tables[-1][1].append([])
        self._cell = ["", found.get("data-v")] if tag in ("td", "th") else self._cell

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            text, number = self._cell
            self.tables[-1][1][-1].append((text, None if number is None else float(number)))
            self._cell = None

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell[0] += data


def test_every_time_with_all_its_digits(rows, source):
    frame = load(rows)
    for name in ("time_ms", "device_ms"):
        numbers = {
            number or float(text.split()[0])
            for table, (_, *lines) in Page(source).tables
            if table == name
            for line in lines
            for text, number in line
            if " ms" in text
        }
        assert numbers == {*frame[frame.status == "ok"][name]}


def test_the_page_has_all_its_parts(source):
    made = Page(source)
    names = [name for name, _ in made.tables]
    for name in ("time_ms", "device_ms", "peak_gib", "verdicts", "failures", "what it ran on"):
        assert name in names
    for words in (
        "55 ok, 1 oom, 3 skipped", "needs 8 GPUs, found 4", "asking for 40 GiB", "NVIDIA H200", "580.1", "floor",
        "Device time by size, with its floor", "Fastest in ", "t test of logarithms",
    ):  # fmt: skip
        assert words in made.text, words


def test_the_metric_in_question_comes_first(rows, source):
    by_wall = page(load(rows), "time_ms")
    assert source.index('data-name="device_ms"') < source.index('data-name="time_ms"')
    assert by_wall.index('data-name="time_ms"') < by_wall.index('data-name="device_ms"')


def test_the_page_loads_nothing(source):
    made = source
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', made).group(1)
    assert policy.startswith("default-src 'none'; ") and "unsafe-eval" not in policy
    assert "script-src 'sha256-" in policy
    parsed = Page(made)
    assert not {"link", "iframe", "img", "object", "embed", "form", "base"} & parsed.tags
    for name, value in parsed.attributes:
        if name in ("href", "xlink:href"):
            assert value.startswith("#")
        assert name != "src" and not name.startswith("on")
    assert len(made) < 3_000_000


def test_hostile_text(add, frame):
    names = {"gpu_name": HOSTILE, "dtype": HOSTILE, "loss": HOSTILE, "host": HOSTILE, "driver_version": HOSTILE}
    names |= {"samples_ms": [1.0, 2.0, 3.0], "log_dir": HOSTILE}
    hostile = f"$x^{{$ '\" </script></title></style></svg>--> <img src=x onerror=alert(1)> {HOSTILE}"
    add(hostile, status="error", reason=hostile, job={HOSTILE: 1}, **names)
    add(hostile, 2.0, device_ms=1.0, job={HOSTILE: 2}, block_cap=hostile, **names)
    add("triton_tp", 1.0, device_ms=0.5, **names)
    made = page(frame())
    parsed = Page(made)
    assert "img" not in parsed.tags and made.count("<script>") == 1 and made.count("</style>") == 1 + made.count("<svg")
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "src"]
    assert "<img src=x onerror=alert(1)>" in parsed.text
    assert not {char for char in made if not char.isprintable()} - {"\n"}


def test_without_matplotlib(rows, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(packages, "installed", lambda module: module != "matplotlib")
    monkeypatch.setattr(packages, "checkout", lambda: None)
    made = page(load(rows))
    assert "<svg" not in made and made.count("Pictures need matplotlib: ") == 1
    assert main([str(rows), "--loss", "cross_entropy", "--plot", "time", "-o", str(tmp_path / "x.svg")]) == 2
    assert "pip install 'tpbench[report]'" in capsys.readouterr().err


def test_little_and_nothing(add, frame):
    assert "0 cells" in page(frame())
    add("triton_tp", 45000.0, interpreted=True, device="cpu", gpu_name=None, cpu_model="EPYC", samples_ms=[45000.0])
    add("mystery", 1.0, workload="of_the_future", vocab=None, tp_size=None)
    assert "of_the_future" in page(frame())


def test_a_row_below_its_floor_is_marked(tmp_path):
    rows = [synthetic.cell("triton_tp", 32768, 2), synthetic.cell("liger", 32768, 2, floor_ms=9.0)]
    made = Page(page(load(synthetic.write(rows, tmp_path))))
    assert "¶ faster than its floor: by more than 5%" in made.text and "below floor" in made.text


def test_pictures_have_the_colours_of_the_page_and_texts_of_rows_do_nothing(add, frame):
    for vocab in (1000, 2000):
        for variant, loss in (("triton_tp", "cross_entropy"), (HOSTILE, "cross_entropy"), (HOSTILE, "reverse_kl")):
            add(variant, loss=loss, **measured(vocab / 1000, vocab=vocab, floor_ms=vocab / 2000, peak_gib=1.0))
    made = page(frame())
    pictures = re.findall("<svg.*?</svg>", made, re.DOTALL)
    assert len(pictures) == 2 and all("var(--s0)" in svg and "var(--ink)" in svg for svg in pictures)
    assert not re.search("#[0-9a-f]{6}", "".join(pictures))
    ids = [set(re.findall(' id="(.*?)"', svg)) for svg in pictures]
    assert not ids[0] & ids[1] and made.count("<script>") == 1


def test_pictures_of_device_and_loop_have_error_bars_hovers_and_a_colour_for_each_variant(add, frame):
    for at in range(30):
        for vocab in (1000, 2000):
            loop = {"chained_ms": 2.0, "device_ci_low_ms": 0.9, "device_ci_high_ms": 1.2, "peak_gib": 2.0 - at / 30}
            add(f"v{at}", **measured(1.0 + at, vocab=vocab, **loop))
    alone = {"tokens": 64, "loss": "forward_kl", "device_ci_low_ms": 2.7}
    add("alone", **measured(3.0, device_ci_high_ms=3.6, **alone))
    add("other", **measured(6.0, device_ci_high_ms=9.0, **alone))
    made = page(frame())
    device, loop = re.findall("<svg.*?</svg>", made, re.DOTALL)
    assert "device time" in device and "time in a loop" in loop
    assert {*re.findall(r"var\(--s\d+\)", device)} == {f"var(--s{at})" for at in range(30)}
    assert len(set(re.findall(r"--s\d+: (#\w+)", made))) == 96
    assert (
        "<title>v7: ok, time_ms 8.100, device_ms 8.000 (0.900 to 1.200), chained_ms 2.000, peak_gib 1.767, row r"
        in device
    )
    assert "Time in a loop by size" in Page(made).text
    bars = made[made.rindex('<div class="bars">') :]  # of a single problem
    assert re.findall(r"<i style=\"width: ([\d.]+)%", bars) == ["33.33", "66.67"]
    assert re.findall(r"margin-left: ([\d.]+)%; width: ([\d.]+)%", bars) == [("30.0", "10.0"), ("30.0", "70.0")]
    assert "Least memory: v29, with 52% of the fastest variant's." in Page(made).text


def test_tables_of_verdicts_and_failures(add, frame):
    for variant, factor in (("triton_tp", 1), ("pytorch_gather", 3)):
        add(variant, **measured(factor, 2.0 * factor), fraction_of_floor=0.5, peak_gib=0.0004)
    add("quack", status="oom", reason="asked for 4 GiB", log_dir="sweeps/x")
    tables = {
        name: [[text.strip() for text, _ in line] for line in lines] for name, lines in Page(page(frame())).tables
    }
    heads, line = tables["verdicts"]
    assert line.pop(heads.index("runner-up")).startswith("3.00x pytorch_gather 2.9")
    assert dict(zip((name for name in heads if name != "runner-up"), line, strict=True)) == {
        "problem": "vocab=32768 tp=2", "fastest": "triton_tp", "time": "1.000 ms", "trust": "good", "of floor": "50%",
        "memory": "419 KiB", "wall time": "2.000 ms",
    }  # fmt: skip
    assert tables["failures"][1] == ["1", "oom", "asked for 4 GiB", "quack vocab=32768 tp=2"]

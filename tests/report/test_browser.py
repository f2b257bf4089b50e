"""The page of a report works in a browser: the pointer shows values, the table is filtered and sorted."""

import json
import re
import shutil
import subprocess

import numpy as np
import pytest

from ikkuna.backends.tensorboard import TensorBoardBackend
from ikkuna.report import write_report
from ikkuna.store.names import Series
from ikkuna.store.values import ModuleEntry

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed"),
]
NAMES = ("first", "second", "third")
VALUES = np.array([[1.0, 10.0], [0.0, 100.0], [np.nan, 1000.0]])

SCRIPT = """
<pre id="found"></pre>
<script>
const wait = time => new Promise(done => setTimeout(done, time));
function send(svg, name, x, y) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  const at = {bubbles: true, clientX: box.left + x / view.width * box.width, clientY: box.top + y / view.height * box.height};
  svg.dispatchEvent(new MouseEvent(name, at));
}
function point(svg, x, y) {
  send(svg, "mousemove", x, y);
  return tip.hidden ? null : tip.textContent;
}
function drag(svg, x0, y0, x1, y1) {
  send(svg, "mousedown", x0, y0);
  send(svg, "mousemove", x1, y1);
  send(svg, "mouseup", x1, y1);
}
const texts = (svg, group) => [...svg.querySelectorAll(group + " text")].map(text => text.textContent);
const found = {errors: []};
addEventListener("error", event => found.errors.push(event.message));
const map = document.querySelector("[data-heatmap] svg"), card = document.querySelector("[data-chart]");
const legend = () => [...card.querySelectorAll(".u-legend .u-series")].map(row => row.textContent);
function over(name, share, dx = 0) {
  const area = card.querySelector(".u-over"), box = area.getBoundingClientRect(), x = box.left + share * (box.width - 1), y = box.top + 50;
  const move = new MouseEvent(name, {bubbles: true, clientX: x, clientY: y, movementX: 5, button: 0});
  (name === "mouseup" ? document : area).dispatchEvent(move);
}
const table = document.querySelector(".modules"), heads = table.querySelectorAll("th"), filter = document.querySelector(".filter");
const rows = () => [...table.tBodies[0].rows].filter(row => !row.hidden).map(row => row.cells[0].textContent);
heads[0].click();
found.up = rows();
heads[0].click();
found.down = rows();
filter.value = "SEC";
filter.dispatchEvent(new Event("input", {bubbles: true}));
found.filtered = rows();
(async () => {try {
  await wait(500);
  const charts = [...document.querySelectorAll("[data-chart]")];
  const rates = charts.find(each => JSON.parse(each.dataset.chart).curves.length === 2);
  found.marks = rates.plot.axes[1]._values.filter(text => text);
  found.kinds = [...document.querySelectorAll("figcaption")].map(each => each.textContent.trim());
  over("mousemove", 0);
  await wait(100);
  found.chart = [legend()];
  over("mousemove", 1);
  await wait(100);
  found.chart.push(legend());
  over("mousedown", 0.6);
  over("mousemove", 0.99);
  over("mouseup", 0.99);
  await wait(100);
  found.zoomed = [card.plot.scales.x.min, card.plot.scales.x.max];
  card.querySelector(".u-over").dispatchEvent(new MouseEvent("dblclick", {bubbles: true}));
  await wait(100);
  found.whole = [card.plot.scales.x.min, card.plot.scales.x.max];
  document.querySelector(".axis").click();
  over("mousemove", 0);
  await wait(100);
  found.time = legend()[0];
  point(map, 300, 5);
  await wait(500);
  const [left, top, width, height] = ["x", "y", "width", "height"].map(name => Number(map.querySelector(".plot").getAttribute(name)));
  found.map = [0, 1, 2].map(row => [0.25, 0.75].map(x => point(map, left + x * width, top + (row + 0.5) / 3 * height)));
  found.labels = point(map, 5, 5);
  drag(map, left + 0.6 * width, top + 0.4 * height, left + width, top + 0.98 * height);
  found.part = [texts(map, ".rows"), texts(map, ".steps"), point(map, left + 5, top + 0.9 * height)];
  document.getElementById("found").textContent = JSON.stringify(found);
} catch (error) { document.getElementById("found").textContent = JSON.stringify({errors: [String(error.stack)]}); }})();
</script>
</body>"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return what the script has read from the page."""
    directory = tmp_path_factory.mktemp("browser")
    backend = TensorBoardBackend()
    (directory / "run").mkdir()
    backend.open(directory / "run")
    backend.describe([ModuleEntry(name, "Linear", (("weight", (2, 2)),)) for name in NAMES])
    for i, step in enumerate((0, 10)):
        backend.add_scalar(Series("loss"), 0.5 - i / 4, step)
        for group, rate in (("group 0", 0.1), ("group 1", 0.01)):
            backend.add_scalar(Series("learning_rate", group), rate, step)
        for name, values in zip(NAMES, VALUES, strict=True):
            backend.add_scalar(Series("weights_norm2", name), values[i], step)
        backend.commit(step)
    backend.close()
    page = write_report(directory / "run", directory / "page.html")
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", SCRIPT), encoding="utf-8")
    command = ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    command += [f"--user-data-dir={directory / 'profile'}", "--window-size=1200,2000", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    [text] = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    return json.loads(text)


def test_the_script_raises_no_error(found):
    assert found["errors"] == []


def test_a_logarithmic_axis_that_begins_below_a_power_of_ten_has_marks(found):
    assert found["marks"] == ["0.01", "0.02", "0.05", "0.1"]


def test_the_pointer_shows_the_values_of_a_chart(found):
    assert found["chart"] == [["step0", "training0.5"], ["step10", "training0.25"]]


def test_the_pointer_shows_module_step_and_value_of_a_heat_map(found):
    texts = [[text.split("\n") for text in row] for row in found["map"]]
    assert [[text[:2] for text in row] for row in texts] == [[[name, "step 0"], [name, "step 10"]] for name in NAMES]
    assert texts[1][0][2] == "exactly zero"
    assert texts[2][0][2] == "NaN or infinite"
    for row, column in ((0, 0), (0, 1), (1, 1), (2, 1)):
        value = float(texts[row][column][2].removeprefix("≈ "))
        assert value == pytest.approx(VALUES[row, column], rel=0.02)  # a colour stands for a range of values
    assert found["labels"] is None


def test_a_part_of_a_chart_is_enlarged_until_a_double_click(found):
    assert found["zoomed"] == pytest.approx([6, 9.9], abs=0.2)
    assert found["whole"] == [0, 10]


def test_the_axis_shows_the_wall_time(found):
    assert found["time"].startswith("step0 (")
    assert found["time"].endswith(" s)")


def test_a_part_of_a_heat_map_is_enlarged(found):
    rows, steps, text = found["part"]
    assert rows == ["second", "third"]
    assert steps == ["10"]
    assert text.startswith("third\nstep 10\n")


def test_the_table_is_sorted_and_filtered(found):
    assert found["up"] == sorted(NAMES)
    assert found["down"] == sorted(NAMES, reverse=True)
    assert found["filtered"] == ["second"]

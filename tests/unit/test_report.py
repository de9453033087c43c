"""The report of a run: what is on the page is what is in the folder, and in bad cases one line."""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib as mpl
import pytest
from matplotlib.colors import to_hex

from asyncmesh.config import Config
from asyncmesh.errors import DivergedError, InputFileError
from asyncmesh.observe import plots, style
from asyncmesh.observe.events import Backward, Event, Forward, Update, read_events
from asyncmesh.observe.folder import RunFolder
from asyncmesh.observe.report import headline, write_report
from asyncmesh.observe.style import spread
from asyncmesh.observe.timeline import read_window, timeline
from asyncmesh.simulator.run import Result, simulate_modules
from tiny import batch, settings, squared_error, stages

UPDATES, STAGES, REPLICAS = 30, 3, 2


def recorded(path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run in a folder; its summary."""
    given = {"train": {"updates": UPDATES, "eval_every": 10}, **sections}
    given.setdefault("mesh", {"stages": STAGES, "replicas": REPLICAS})
    config = Config.from_dict(settings(**given))
    validation = [batch(9, n) for n in range(2)]
    try:
        result = simulate_modules(
            stages(config.mesh.stages), squared_error, batch, config, validation=validation
        )
    except DivergedError as error:
        result = error.result
    assert isinstance(result, Result)
    folder = RunFolder(path, config)
    for event in result.events:
        folder(event)
    folder.finish(result.summary)
    return result.summary


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "original"
    averaging = {"method": "async-ema", "delay": 4}
    links = {"latency_ms": 1.0, "bandwidth_mbps": 1000.0}
    recorded(path, averaging=averaging, links=links)
    return path


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    """A run's folder that a test may spoil."""
    return Path(shutil.copytree(original, tmp_path / "<b>run & more"))


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


class Page(HTMLParser):
    """The parts of a page that a reader sees: text by tag, table rows, and the tags themselves."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, list[str]] = {}
        self.rows: dict[str, list[str]] = {}
        self.marked: set[str] = set()
        self._open: list[str] = []
        self._cells: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "path", "use", "br"):
            self._open.append(tag)
        if tag == "tr":
            self._cells, self._is_marked = [], dict(attrs).get("class") == "marked"
        if tag in ("td", "dt", "dd", "figcaption", "text", "p", "h1"):
            self.text.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            while self._open.pop() != tag:
                pass
        if tag == "td":
            self._cells.append(self.text["td"][-1])
        if tag == "tr" and self._cells:
            self.rows[self._cells[0]] = self._cells[1:]
            if self._is_marked:
                self.marked.add(self._cells[0])

    def handle_data(self, data: str) -> None:
        for tag in self._open[-2:]:
            if tag in self.text:
                self.text[tag][-1] += data

    @property
    def svgs(self) -> list[ElementTree.Element]:
        found = re.findall(r"<svg.*?</svg>", self.source, re.DOTALL)
        return [ElementTree.fromstring(text) for text in found]

    @property
    def headline(self) -> dict[str, str]:
        names = re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", self.source)
        return dict(names)


def words(svg: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in svg.iter() if element.tag.endswith("text")]


@pytest.fixture(scope="module")
def page(original: Path) -> Page:
    return Page(write_report(original))


# -- the page -------------------------------------------------------------------------------------
def test_the_page_needs_nothing_but_itself(page: Page) -> None:
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "image"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            if name.endswith(("href", "src")):
                assert value is not None
                assert value.startswith("#"), f"{tag} {name}={value}"
    styles = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert "url(" not in styles
    assert "@import" not in styles


def test_ids_are_unique_and_every_reference_finds_its_own(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = set(re.findall(r'(?:url\(|href=")#([^")]+)', page.source))
    assert references <= set(ids)


def test_the_headline_is_the_summarys(original: Path, page: Page) -> None:
    summary, shown = summary_of(original), page.headline
    assert shown["final validation loss"] == f"{summary['final_val_loss']:.3f}"
    assert shown["best validation loss"] == f"{summary['best_val_loss']:.3f}"
    assert shown["tokens"] == style.human_count(summary["tokens"])
    assert shown["virtual time"] == style.human_seconds(summary["virtual_seconds"])
    assert shown["tokens per virtual second"] == style.human_count(summary["tokens_per_second"])
    busy = list(summary["busy_fraction"].values())
    assert shown["busy fraction"] == f"{100 * sum(busy) / len(busy):.1f}%"
    assert shown["rounds merged"] == str(summary["rounds"]["completed"])
    assert shown["consensus distance"] == f"{100 * summary['consensus_distance']:.2g}%"
    notes = " ".join(page.text["dd"])
    assert f"the least busy worker: {min(busy):.1%}" in notes
    assert "0 skipped; mean delay 4.0 updates" in notes
    assert page.text["h1"][0].split() == ["original", "completed"]
    assert 'role="alert"' not in page.source


def test_every_plot_has_a_caption_and_its_numbers(original: Path, page: Page) -> None:
    summary, svgs = summary_of(original), page.svgs
    assert len(svgs) == len(page.text["figcaption"]) == 5
    loss, delays, computed, busy, traffic = map(words, svgs)
    assert f"validation {summary['final_val_loss']:.3f}" in loss
    assert {"update", "loss (nats per token)"} <= set(loss)
    for histogram in summary["delays"].values():
        count = sum(histogram.values())
        mean = sum(int(delay) * times for delay, times in histogram.items()) / count
        assert f"▲ mean {mean:.2f}" in delays
        assert {str(times) for times in histogram.values()} <= set(delays)
    assert {"forward", "backward", "update", "replica 0", "replica 1"} <= set(computed)
    assert computed.count("stage 0") == computed.count("stage 2") == REPLICAS
    for name, share in summary["busy_fraction"].items():
        stage, replica = plots.worker_of(name)
        assert f"stage {stage} · replica {replica}" in busy
        assert f"{share:.1%}" in busy
    for axis in ("pipeline", "data"):
        total = sum(sent[axis] for sent in summary["bytes_sent"].values())
        assert f"{axis} axis ({style.human_bytes(total)} in all)" in traffic


def test_svgs_take_their_colours_from_the_page(page: Page) -> None:
    for svg in re.findall(r"<svg.*?</svg>", page.source, re.DOTALL):
        assert set(re.findall(r"#[0-9a-f]{6}\b", svg)) <= {style.ON_COLOUR}
        used = set(re.findall(r"var\(--(\w+)\)", svg))
        assert used <= {*style.LIGHT, "font"}
    for colour, value in style.DARK.items():
        assert f"--{colour}: {value};" in page.source


def test_memory_is_told_once_for_replicas_that_are_alike(original: Path, page: Page) -> None:
    memory = summary_of(original)["memory"]["stage-1-replica-0"]
    weights = memory["buffers"] * memory["buffer_bytes"]
    total = weights + memory["optimizer_bytes"] + memory["averaging_bytes"]
    replicas, buffers, of_weights, *_, in_all = page.rows["1"]
    assert replicas == "0, 1"
    assert buffers == f"{memory['buffers']} × {style.human_bytes(memory['buffer_bytes'])}"
    assert of_weights == style.human_bytes(weights)
    assert in_all == style.human_bytes(total)


def test_settings_are_told_and_marked_where_they_were_chosen(page: Page) -> None:
    assert page.rows["optimizer.learning_rate"] == ["0.01", "η at its highest"]
    assert page.rows["averaging.method"][0] == "async-ema"
    assert page.rows["train.compile"][0] == "false"
    assert page.rows["averaging.ema_warmup"][0] == "0.0333333"
    assert {"averaging.method", "averaging.delay", "links.bandwidth_mbps"} <= page.marked
    assert not {"seed", "averaging.interval", "averaging.fraction"} & page.marked
    assert page.rows["python"] == [platform.python_version()]


# -- runs that are not as they should be ----------------------------------------------------------
def test_a_diverged_run_says_so_first(tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "learning_rate": 1e6, "max_grad_norm": 0.0}
    summary = recorded(tmp_path, mesh={"stages": 2, "replicas": 1}, optimizer=optimizer)
    assert summary["status"] == "diverged"
    page = Page(write_report(tmp_path))
    alert = page.source.index('role="alert"')
    assert alert < page.source.index("<dl")
    assert f"diverged after update {summary['updates']} of {UPDATES}" in page.source[alert:]
    assert page.headline["last validation loss"] == style.human_loss(summary["final_val_loss"])
    assert page.headline["consensus distance"] == "0%"
    shown = " ".join(page.text["dd"] + page.text["text"]).lower()
    assert not re.search(r"\b(nan|inf|none)\b", shown)
    assert summary["memory"].keys() == {"stage-0-replica-0", "stage-1-replica-0"}
    assert "Not recorded" not in page.source


def test_an_interrupted_run_without_events_has_all_but_the_timeline(run: Path) -> None:
    shutil.rmtree(run / "events")
    summary = summary_of(run) | {"status": "interrupted", "updates": 17}
    (run / "summary.json").write_text(json.dumps(summary))
    page = Page(write_report(run))
    assert f"was interrupted after update 17 of {UPDATES}" in " ".join(page.text["p"])
    assert len(page.svgs) == 4
    assert "What each worker computes" not in page.text["text"]
    assert page.text["h1"][0].split() == ["<b>run", "&", "more", "interrupted"]
    assert not any(tag == "b" for tag, _ in page.tags)


def test_a_run_in_real_time_has_no_virtual_seconds(original: Path) -> None:
    summary = summary_of(original) | {"wall_seconds": 90.0}
    del summary["virtual_seconds"]
    shown = {figure.name: figure.value for figure in headline(summary)}
    assert shown["time"] == style.human_seconds(90.0)
    assert shown["tokens per second"] == style.human_count(summary["tokens_per_second"])


def _spoil_folder(run: Path) -> None:
    shutil.rmtree(run)


def _spoil_summary(run: Path) -> None:
    (run / "summary.json").write_text('{"status": "comp')


def _spoil_key(run: Path) -> None:
    summary = summary_of(run)
    del summary["busy_fraction"]
    (run / "summary.json").write_text(json.dumps(summary))


def _spoil_config(run: Path) -> None:
    (run / "config.toml").unlink()


def _spoil_event(run: Path) -> None:
    path = run / "events" / "stage-1-replica-0.jsonl"
    path.write_text(path.read_text().replace('"microbatch": 15,', '"microbatch": 15;'))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_spoil_folder, r"more: holds no summary\.json.*; give"),
        (_spoil_summary, r"summary\.json: cannot be read .*; run again"),
        (_spoil_key, r"summary\.json: has no busy_fraction.*; run again"),
        (_spoil_config, r"config\.toml: .*; give"),
        (_spoil_event, r"stage-1-replica-0\.jsonl: line \d+ is no event .*; copy"),
    ],
)
def test_a_broken_folder_is_told_in_one_line(run: Path, spoil: Any, told: str) -> None:
    spoil(run)
    with pytest.raises(InputFileError, match=told) as raised:
        write_report(run)
    assert "\n" not in str(raised.value)


# -- the timeline ---------------------------------------------------------------------------------
WORKERS = [plots.Worker(stage, replica) for stage in range(STAGES) for replica in range(REPLICAS)]


def test_the_window_is_twelve_microbatches_about_the_middle(original: Path) -> None:
    window = read_window(original / "events", WORKERS, UPDATES)
    assert window is not None
    starts = {
        event.microbatch: event.start_s
        for event in read_events(original / "events")
        if isinstance(event, Forward) and (event.stage, event.replica) == (0, 0)
    }
    assert (window.from_s, window.to_s) == (starts[UPDATES // 2 - 6], starts[UPDATES // 2 + 6])
    inside = [
        event
        for event in read_events(original / "events")
        if isinstance(event, Forward | Backward | Update)
        and event.end_s >= window.from_s
        and event.start_s <= window.to_s
    ]
    assert sorted(window.spans, key=repr) == sorted(inside, key=repr)


def test_a_short_run_is_shown_whole(original: Path, tmp_path: Path) -> None:
    recorded(tmp_path, train={"updates": 3}, mesh={"stages": 1, "replicas": 1})
    window = read_window(tmp_path / "events", [plots.Worker(0, 0)], 3)
    assert window is not None
    assert window.from_s == 0.0
    assert len(window.spans) == 3 * 3
    assert window.to_s == max(span.end_s for span in spans_of(window.spans))


def spans_of(events: list[Event]) -> Iterator[Forward | Backward | Update]:
    return (event for event in events if isinstance(event, Forward | Backward | Update))


def test_nothing_is_parsed_outside_the_window(original: Path, run: Path) -> None:
    for path in (run / "events").glob("stage-*.jsonl"):
        path.write_bytes(b"\xff\xfe no event\n" + path.read_bytes() + b'{"event": "forw')
    before, after = (read_window(path / "events", WORKERS, UPDATES) for path in (original, run))
    assert before == after


def test_only_whole_replicas_are_shown(tmp_path: Path) -> None:
    workers = [plots.Worker(stage, replica) for replica in range(3) for stage in range(8)]
    for stage, replica in workers:
        (tmp_path / f"stage-{stage}-replica-{replica}.jsonl").touch()
    window = read_window(tmp_path, workers, 0)
    assert window is not None
    assert window.workers == workers[:16]
    assert read_window(tmp_path / "none", workers, 0) is None


def test_boxes_lie_where_the_events_were() -> None:
    events: list[Event] = [
        Forward(10.0, 11.0, 0, 0, 7, 6),
        Backward(11.5, 13.5, 0, 0, 7, 6, 6, 0),
        Update(13.5, 13.6, 0, 0, 7, 0.1),
        Forward(30.0, 31.0, 0, 0, 8, 7),
    ]
    figure = timeline(events, 10.0, 14.0, [plots.Worker(1, 0)])
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 1"]
    boxes = [collection.get_paths()[0].get_extents().bounds for collection in axes.collections]
    colours = {to_hex(collection.get_facecolor()[0]) for collection in axes.collections}  # type: ignore[arg-type]
    assert colours == {style.SKY, style.ORANGE, style.GREEN}
    left_and_width = sorted((round(b[0], 6), round(b[2], 6)) for b in boxes)
    assert left_and_width == [(0.0, 1.0), (1.5, 2.0), (3.5, 0.1)]
    assert [text.get_text() for text in axes.texts] == ["7", "7"]


# -- plots of unusual runs ------------------------------------------------------------------------
def texts(figure: Any) -> list[str]:
    return words(ElementTree.fromstring(style.svg(figure, "test", "a <test> & more")))


def test_one_worker_has_nothing_to_send() -> None:
    bytes_sent = {"stage-0-replica-0": {"pipeline": 0, "data": 0}}
    assert "Nothing was sent." in texts(plots.traffic({"bytes_sent": bytes_sent}))
    busy = texts(plots.busy({"busy_fraction": {"stage-0-replica-0": 1.0}}))
    assert {"stage 0", "100%"} <= set(busy)
    assert "stage 0 · replica 0" not in busy
    delays = texts(plots.delays({"delays": {"0": {"0": 12_345}}}))
    assert delays.count("stage 0") == 1
    assert {"12.3k", "▲ mean 0.00"} <= set(delays)


def test_what_was_not_measured_is_said() -> None:
    assert "No loss was recorded." in texts(plots.loss({"train_curve": [], "val_curve": []}))
    assert "No gradient was applied." in texts(plots.delays({"delays": {}}))
    ended = {"busy_fraction": {"stage-0-replica-0": 0.0}}
    assert "The run ended before its steady state." in texts(plots.busy(ended))
    assert "Nothing was computed in this time." in texts(timeline([], 0.0, 1.0))


def test_many_workers_share_a_bar() -> None:
    shares = {f"stage-{s}-replica-{r}": 0.25 + 0.5 * (r % 2) for s in range(40) for r in range(4)}
    figure = plots.busy({"busy_fraction": shares})
    bars = figure.axes[0].patches
    assert len(bars) == 40
    assert {round(bar.get_width(), 9) for bar in bars} == {0.5}  # type: ignore[attr-defined]
    assert "replicas' mean" in texts(figure)
    assert figure.get_figheight() < 12


def test_losses_over_many_magnitudes_are_on_a_logarithmic_scale() -> None:
    curve = [
        {"update": u, "loss": loss} for u, loss in enumerate([5.0, 2e3, 6e9, 1e290, float("nan")])
    ]
    figure = plots.loss({"train_curve": curve, "val_curve": []})
    assert figure.axes[0].get_yscale() == "log"
    assert "training 6.00e+09" in texts(figure)


def test_smoothing_is_a_mean_over_neighbours() -> None:
    assert plots.smoothed([1.0, 2.0, 6.0, 3.0], 1) == pytest.approx([1.5, 3.0, 11 / 3, 4.5])
    assert plots.smoothed([1.0, 2.0], 0) == [1.0, 2.0]


# -- the house style ------------------------------------------------------------------------------
def test_drawing_is_repeatable_and_leaves_no_trace(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    summary = {"delays": {"0": {"0": 1, "2": 3}}}
    first, second = (style.svg(plots.delays(summary), "delays", "as seen") for _ in range(2))
    style.save(plots.delays(summary), tmp_path / "a.svg")
    style.save(plots.delays(summary), tmp_path / "a.png")
    assert first == second
    assert 'aria-label="as seen"' in first
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    ElementTree.parse(tmp_path / "a.svg")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (style.human_bytes(0), "0 B"),
        (style.human_bytes(999), "999 B"),
        (style.human_bytes(999.7), "1 kB"),
        (style.human_bytes(2_457_600), "2.46 MB"),
        (style.human_bytes(167_040), "167 kB"),
        (style.human_count(38_400), "38.4k"),
        (style.human_count(12), "12"),
        (style.human_seconds(0.0), "0 s"),
        (style.human_seconds(0.93), "930 ms"),
        (style.human_seconds(12.345), "12.3 s"),
        (style.human_seconds(150), "2.5 min"),
        (style.human_seconds(3 * 86_400), "3 d"),
        (style.percent(1.0), "100%"),
        (style.percent(0.99999), "100%"),
        (style.percent(0.36), "36.0%"),
        (style.human_loss(2.8701), "2.870"),
    ],
)
def test_numbers_are_told_as_people_read_them(told: str, expected: str) -> None:
    assert told.replace("\N{NO-BREAK SPACE}", " ") == expected


@pytest.mark.parametrize(
    ("wanted", "heights", "room", "expected"),
    [
        ([10.0, 50.0], [10.0, 10.0], 100.0, [10.0, 50.0]),
        ([50.0, 50.0], [10.0, 10.0], 100.0, [45.0, 55.0]),
        ([52.0, 50.0, 51.0], [10.0, 10.0, 10.0], 100.0, [61.0, 41.0, 51.0]),
        ([0.0, 0.0], [10.0, 10.0], 100.0, [5.0, 15.0]),
        ([100.0, 100.0], [10.0, 20.0], 100.0, [75.0, 90.0]),
        ([5.0, 5.0], [10.0, 10.0], 10.0, [5.0, 15.0]),
    ],
)
def test_labels_are_moved_no_further_than_they_must(
    wanted: list[float], heights: list[float], room: float, expected: list[float]
) -> None:
    assert spread(wanted, heights, room) == pytest.approx(expected)

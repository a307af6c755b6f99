"""The page is read back with Python's own parser."""

from __future__ import annotations

import base64
from html.parser import HTMLParser

import pytest
import yaml
from matplotlib.figure import Figure

from lightning_bayes.report import write_report

VOID = {"meta", "img"}


class Page(HTMLParser):
    """Tables, images and the nesting of a page."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.tables, self.headings, self.best = [], [], [], [], [], []
        self.loose_arrows = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in {"td", "th"}:
            self.tables[-1][-1].append("")
        elif tag == "h2":
            self.headings.append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tag, attrs = self.open[-1] if self.open else (None, {})
        if tag in {"td", "th"}:
            self.tables[-1][-1][-1] += data.replace("\xa0", " ")
            self.loose_arrows |= data.endswith((" ↑", " ↓"))
            self.best += [data] if attrs.get("class") == "best" else []
        elif tag == "h2":
            self.headings[-1] += data

    def table_with(self, heading):
        return next(table for table in self.tables if heading in table[0])


FIT = {"epoch": 0, "val/cls/Acc": 0.5, "val/cls/NLL": 1.0}
TEST = {
    "epoch": 3,
    "test/cls/Acc": 0.9,
    "test_mean/cls/Acc": 0.8,
    "test/post/cls/NLL": 0.25,
    "test/cls/NLL": 0.3,
    "test/mis/AUROC": float("nan"),
    "ood/AUROC": 0.7,
    "ood/svhn/AUROC": 0.71,
    "ood/svhn/entropy/AUROC": 0.71,
    "ood/svhn/max_logit/AUROC": 0.72,
    "ood_mean/svhn/entropy/AUROC": 0.6,
    "ood/svhn/entropy/FPR95": 0.4,
    **{
        f"shift/{kind}/{level}/{key}": value
        for kind in ("fog", "all")
        for level, key, value in [
            (1, "cls/Acc", 0.81),
            (2, "cls/Acc", 0.61),
            (1, "cls/NLL", 0.5),
            (2, "cls/NLL", 0.9),
            (1, "cal/ECE", 0.01),
            (2, "cal/ECE", 0.05),
        ]
    },
    "test/cal/ECE": 0.005,
}


def write_run(folder, *rows, config=None):
    folder.mkdir(parents=True)
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [",".join(keys), *(",".join(str(row.get(key, "")) for key in keys) for row in rows)]
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(yaml.safe_dump(config or {"seed_everything": 0}))
    return folder


def png(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Figure(figsize=(1, 1)).savefig(path)
    return path.read_bytes()


@pytest.fixture
def runs(tmp_path):
    adam = write_run(tmp_path / "adam", FIT, {**FIT, "epoch": 1, "val/cls/Acc": 0.6}, config={"lr": 0.1, "seed": 0})
    vogn = write_run(tmp_path / "vogn", TEST, {"epoch": 3}, config={"lr": 0.2, "seed": 0, "<b>": "&"})
    other = write_run(
        tmp_path / "other", {"epoch": 3, "test/cls/Acc": 0.95, "test/cls/NLL": 0.4}, config={"lr": 0.2, "seed": 0}
    )
    return [adam, vogn, other]


@pytest.fixture
def page(runs, tmp_path):
    return Page(write_report(runs, tmp_path / "out" / "report.html").read_text("utf-8"))


def test_the_page_is_well_formed_html(page):
    assert page.open == []
    assert page.tags[:2] == ["html", "head"]


def test_nothing_is_fetched_or_run(page):
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = [attrs["src"] for _, attrs in page.attributes if "src" in attrs]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not any("href" in attrs for _, attrs in page.attributes)


def test_an_arrow_stays_on_the_line_of_its_word(page):
    assert page.table_with("accuracy ↑")
    assert not page.loose_arrows


def test_values_of_all_ways_and_runs_are_rows_of_one_table(page):
    head, *rows = page.table_with("accuracy ↑")
    assert head == ["", "accuracy ↑", "NLL ↓", "ECE ↓", "error AUROC ↑"]
    assert rows == [
        ["vogn: test", "0.9000", "0.3000", "0.0050", "–"],
        ["vogn: test, mean", "0.8000", "–", "–", "–"],
        ["vogn: test, temperature-scaled", "–", "0.2500", "–", "–"],
        ["other: test", "0.9500", "0.4000", "–", "–"],
    ]


def test_the_best_value_of_each_column_is_marked_by_its_direction(page):
    marked = set(page.best)
    assert {"0.9500", "0.2500"} <= marked  # the highest accuracy, the lowest NLL
    assert not {"0.9000", "0.4000", "0.0050"} & marked  # a value alone is not the best


def test_the_last_validation_has_a_table_of_its_own(page):
    tables = [table for table in page.tables if "accuracy ↑" in table[0]]
    assert tables[1][1:] == [["adam: validation", "0.6000", "1.0000"]]


def test_detection_has_a_column_per_set_and_score(page):
    head, *rows = page.table_with("svhn, max logit ↑")
    assert head == ["", "all sets, entropy ↑", "svhn, entropy ↑", "svhn, max logit ↑"]
    assert rows == [["vogn: test", "0.7000", "0.7100", "0.7200"], ["vogn: test, mean", "–", "0.6000", "–"]]


def test_shift_is_shown_by_severity(page):
    head, row = page.table_with("accuracy, severity 1 ↑")
    assert head[1:3] == ["accuracy, severity 1 ↑", "accuracy, severity 2 ↑"]
    assert row[:3] == ["vogn: test", "0.8100", "0.6100"]


def test_keys_of_another_scheme_are_no_shift(tmp_path):
    strange = {
        "shift": 1.0,
        "shift/all/x": 2.0,
        "shift/all/x/cls/Acc": 2.0,
        "shift/fog/weak/cls/Acc": 3.0,
        "ood/x": 4.0,
    }
    folder = write_run(tmp_path / "a", {"epoch": 0, "test/cls/Acc": 0.5, **strange})
    text = write_report([folder], tmp_path / "report.html").read_text("utf-8")
    assert Page(text).headings == ["Test", "Everything"]
    assert "shift/fog/weak/cls/Acc: 3" in text


def test_runs_on_different_data_are_pointed_out(tmp_path):
    runs = [
        write_run(tmp_path / name, {"epoch": 0, "test/cls/Acc": 0.5}, config={"data": {"class_path": f"{name}Data"}})
        for name in ("MNIST", "SVHN")
    ]
    different = write_report(runs, tmp_path / "two.html").read_text("utf-8")
    assert "<b>These runs are on different data</b> (MNISTData, SVHNData)" in different
    assert "different data" not in write_report(runs[:1], tmp_path / "one.html").read_text("utf-8")


def test_only_settings_that_differ_are_listed_and_text_is_escaped(page):
    (table,) = [table for table in page.tables if table[0] == ["", "adam", "vogn", "other"]]
    assert table[1:] == [["lr", "0.1", "0.2", "0.2"], ["<b>", "–", "&", "–"]]


def test_figures_of_runs_are_inside(runs, tmp_path):
    first, second = png(runs[0] / "figures" / "ood_scores.png"), png(runs[1] / "figures" / "ood_scores.png")
    text = write_report(runs, tmp_path / "report.html").read_text("utf-8")
    for content in (first, second):
        assert base64.b64encode(content).decode() in text
    assert "OOD scores" in Page(text).headings


def test_training_and_shift_curves_are_drawn_if_there_is_something_to_draw(page, tmp_path):
    assert {"Training", "Shift"} <= set(page.headings)
    alone = write_run(tmp_path / "alone", {"epoch": 0, "test/cls/Acc": 0.5})
    headings = Page(write_report([alone], tmp_path / "alone.html").read_text("utf-8")).headings
    assert headings == ["Test", "Everything"]

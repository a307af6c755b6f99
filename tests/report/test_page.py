"""The page is read back with Python's own parser."""

from __future__ import annotations

import base64
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
import yaml
from matplotlib.figure import Figure

from lightning_bayes.metrics.example_scores import write_scores
from lightning_bayes.report import main, read_run, read_runs, write_report
from lightning_bayes.report.comparison import change
from lightning_bayes.report.summary import verdict

VOID = {"meta", "img", "br", "wbr"}


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
        if {"td", "th"} & {name for name, _ in self.open}:
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
        for level, values in ((1, (0.81, 0.5, 0.01)), (2, (0.61, 0.9, 0.05)))
        for key, value in zip(("cls/Acc", "cls/NLL", "cal/ECE"), values, strict=True)
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


def png(path, side=1):
    path.parent.mkdir(parents=True, exist_ok=True)
    Figure(figsize=(side, side)).savefig(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return make_runs(tmp_path_factory.mktemp("runs"))


def make_runs(tmp_path):
    adam = write_run(tmp_path / "adam", FIT, {**FIT, "epoch": 1, "val/cls/Acc": 0.6}, config={"lr": 0.1, "seed": 0})
    vogn = write_run(tmp_path / "vogn", TEST, {"epoch": 3}, config={"lr": 0.2, "seed": 0, "<b>": "&"})
    last, values = {"lr": 0.2, "seed": 0, "trainer": {"max_epochs": 9}}, {"test/cls/Acc": 0.95, "test/cls/NLL": 0.4}
    other = write_run(tmp_path / "other", {"epoch": 3, **values}, config=last)
    return [adam, vogn, other]


@pytest.fixture(scope="module")
def page(runs, tmp_path_factory):
    return Page(write_report(runs, tmp_path_factory.mktemp("out") / "new" / "report.html").read_text("utf-8"))


def test_the_page_is_well_formed_html(page):
    assert page.open == []
    assert page.tags[:2] == ["html", "head"]


def test_nothing_is_fetched_or_run(page, runs):
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    sources = [attrs["src"] for _, attrs in page.attributes if "src" in attrs]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    links = {attrs["href"] for _, attrs in page.attributes if "href" in attrs}
    assert links == {(folder / "config.yaml").as_uri() for folder in runs}


def test_configs_are_linked_from_where_the_page_is(tmp_path):
    runs = make_runs(tmp_path)[1:2]
    beside = Page(write_report(runs, tmp_path / "report.html").read_text("utf-8"))
    assert next(attrs["href"] for tag, attrs in beside.attributes if tag == "a") == "vogn/config.yaml"
    assert (tmp_path / "vogn" / "config.yaml").is_file()


def test_an_arrow_stays_on_the_line_of_its_word(page):
    assert page.table_with("accuracy ↑posterior / mean")
    assert not page.loose_arrows


def test_every_run_is_one_row_with_both_evaluations(page):
    head, *rows = page.tables[0]
    assert [name.replace("posterior / mean", "") for name in head] == [
        *("run", "method", "settings", "accuracy ↑", "NLL ↓", "ECE ↓", "OOD AUROC ↑")
    ]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["adam config", "–", "lr 0.1", "–", "–", "–", "–"],
        ["vogn config", "–", "lr 0.2, <b> &", "0.9000 / 0.8000", "0.3000", "0.0050", "0.7000"],
        ["other config", "–", "epochs 9", "0.9500", "0.4000", "–", "–"],
    ]


def test_all_measures_have_a_row_and_a_column_for_each_evaluation(page):
    head, *rows = page.table_with("vognmean")
    assert head == ["", "vognposterior", "vognmean", "otherposterior"]
    assert rows == [
        ["accuracy ↑", "0.9000", "0.8000", "0.9500"],
        ["NLL ↓", "0.3000", "–", "0.4000"],
        ["ECE ↓", "0.0050", "–", "–"],
        ["error AUROC ↑", "–", "–", "–"],
    ]


def test_the_best_is_marked_among_the_same_evaluations_of_several_runs(page):
    assert set(page.best) == {"0.9500", "0.3000"}  # 0.25 was scaled, and a value alone is not the best


def test_ties_have_no_best(tmp_path):
    values = [{"epoch": 0, "test/cls/Acc": 0.9, "test/cls/NLL": nll} for nll in (0.3, 0.30001, 0.4)]
    folders = [write_run(tmp_path / str(number), row) for number, row in enumerate(values)]
    assert Page(write_report(folders, tmp_path / "report.html").read_text("utf-8")).best == []


IVON = {"class_path": "lightning_bayes.IVONCallback", "init_args": {"eval_samples": 8}}
FITTED = {
    "trainer": {"callbacks": [IVON], "max_epochs": 4},
    "data": {"class_path": "Pictures", "init_args": {"image_size": 96, "root": "a"}},
}


def write_test(folder, accuracy, samples=8, **data):
    """A test of version_0, with other arguments of the data module or the callback."""
    changed = {**FITTED["data"], "init_args": {**FITTED["data"]["init_args"], **data}}
    config = {"ckpt_path": "runs/version_0/checkpoints/last.ckpt", **FITTED, "data": changed}
    config["trainer"] = {"callbacks": [{**IVON, "init_args": {"eval_samples": samples}}], "max_epochs": 4}
    return write_run(folder, {"epoch": 4, "test/cls/Acc": accuracy, "test/n": 100}, config=config)


def test_tests_stand_under_their_fit_and_the_last_one_with_its_settings_counts(tmp_path):
    fit = write_run(tmp_path / "runs" / "version_0", FIT, config=FITTED)
    tests = [
        write_test(tmp_path / "runs" / "version_1", 0.99, image_size=224),
        write_test(tmp_path / "runs" / "version_2", 0.7),
        write_test(tmp_path / "runs" / "version_3", 0.75, root="b"),  # where the images lie does not matter
        write_test(tmp_path / "runs" / "version_4", 0.98, image_size=64),
        write_test(tmp_path / "runs" / "version_5", 0.97, samples=1),
    ]
    other = write_run(tmp_path / "other", {"epoch": 0, "test/cls/Acc": 0.8, "test/n": 100})
    page = Page(write_report([fit, *tests, other], tmp_path / "report.html").read_text("utf-8"))
    rows = [[cell.strip() for cell in row] for row in page.tables[0][1:]]
    assert [row[0].removesuffix(" config") for row in rows] == [
        *("runs", "runs/version_1", "runs/version_2", "runs/version_4", "runs/version_5", "other")
    ]
    assert [float(row[3].split("±")[0]) for row in rows] == [0.75, 0.99, 0.7, 0.98, 0.97, 0.8]
    assert rows[1][2] == "test of last.ckpt, data.image_size is 224 instead of 96; not compared"
    assert rows[2][2] == "test of last.ckpt, repeated; not compared"
    assert rows[4][2] == "test of last.ckpt, eval_samples is 1 instead of 8; not compared"
    assert page.best == ["0.8000", "0.8000"]  # in the summary and in the table: other settings win nothing
    assert float(rows[0][3].split("±")[1]) == pytest.approx((0.75 * 0.25 / 100) ** 0.5, abs=1e-4)


def test_the_verdict_compares_samples_with_the_mean_and_runs_in_standard_errors(tmp_path):
    values = {"epoch": 0, "test/cls/NLL": 0.5, "test_mean/cls/NLL": 0.6, "test/cls/MI": 1e-4, "test/cls/NLL_SE": 0.03}
    runs = [write_run(tmp_path / "a", values), write_run(tmp_path / "b", {**values, "test/cls/NLL": 0.52})]
    text = write_report(runs, tmp_path / "report.html").read_text("utf-8")
    text = text.replace("\u00a0", " ")
    assert "a: averaging over the posterior changes NLL by -0.1000, from its mean. The samples hardly" in text
    assert "b against a (independent tests): NLL +0.0200 ± 0.0424. No difference" in text


def test_runs_with_scores_of_the_same_examples_are_compared_in_pairs_with_the_first(tmp_path):
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(200) % 4
    logits = torch.randn(200, 4, generator=generator) + 3 * torch.nn.functional.one_hot(targets, 4)
    folders, both = [], []
    for name, scale in (("a", 1.0), ("b", 0.5)):
        probs = (scale * logits).softmax(1)
        nlls = -probs.log()[torch.arange(200), targets]
        accuracy = (probs.argmax(1) == targets).float().mean().item()
        values = {"epoch": 0, "test/cls/Acc": accuracy, "test/cls/NLL": nlls.mean().item(), "test/n": 200}
        folders.append(write_run(tmp_path / name, values))
        (tmp_path / name / "figures").mkdir()
        write_scores(tmp_path / name / "figures" / "scores.csv", probs, targets)
        both.append(nlls.numpy())
    sentence = next(verdict(read_runs(folders))).replace("\u00a0", " ")
    gap = both[1] - both[0]
    error = gap.std(ddof=1) / 200**0.5
    assert sentence.startswith("b against a (the same 200 test examples, paired): accuracy ")
    assert f"NLL {gap.mean():+.4f} ± {error:.4f}. By more than two standard errors: worse NLL." in sentence
    assert "accuracy +0.0000 ± 0.0000, NLL" in sentence  # a temperature changes no label

    (tmp_path / "b" / "figures" / "scores.csv").write_text("target,cls/Acc,cls/NLL\n1,1,0.5\n2,1,0.5\n")
    assert "b against a (independent tests)" in next(iter(verdict(read_runs(folders))))


def test_a_report_replaces_no_other_unless_told(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a", {"epoch": 0, "test/cls/Acc": 0.5})
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        main([str(run)])
    assert sorted(path.name for path in tmp_path.glob("*.html")) == ["report-1.html", "report.html"]
    Path("report.html").write_text("")
    main([str(run), "--output=report.html"])
    assert Path("report.html").read_text("utf-8")


def test_the_last_validation_has_a_table_of_its_own(page):
    assert page.table_with("adamposterior")[1:] == [["accuracy ↑", "0.6000"], ["NLL ↓", "1.0000"]]


def test_detection_has_a_row_per_set_and_score(page):
    (table,) = [table for table in page.tables if ["all sets, entropy ↑", "0.7000", "–"] in table]
    assert table[0] == ["", "vognposterior", "vognmean"]
    assert table[2:] == [["svhn, entropy ↑", "0.7100", "0.6000"], ["svhn, max logit ↑", "0.7200", "–"]]


def test_shift_is_shown_by_severity(page):
    (table,) = [table for table in page.tables if ["accuracy, severity 1 ↑", "0.8100"] in table]
    assert (table[0], table[2]) == (["", "vognposterior"], ["accuracy, severity 2 ↑", "0.6100"])


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
    assert Page(text).headings == ["Test", "Details"]
    assert "shift/fog/weak/cls/Acc: 3" in text


def test_runs_on_different_data_are_pointed_out(tmp_path):
    runs = [
        write_run(tmp_path / name, {"epoch": 0, "test/cls/Acc": 0.5}, config={"data": {"class_path": f"{name}Data"}})
        for name in ("MNIST", "SVHN")
    ]
    different = write_report(runs, tmp_path / "two.html").read_text("utf-8")
    assert "<b>These runs use different data</b> (MNISTData, SVHNData)" in different
    assert "different data" not in write_report(runs[:1], tmp_path / "one.html").read_text("utf-8")


def test_only_settings_that_differ_are_listed_and_text_is_escaped(page):
    (table,) = [table for table in page.tables if table[0] == ["", "adam", "vogn", "other"]]
    assert table[1:] == [["lr", "0.1", "0.2", "0.2"], ["<b>", "–", "&", "–"], ["trainer.max_epochs", "–", "–", "9"]]


def test_figures_of_runs_are_inside(tmp_path):
    runs = make_runs(tmp_path)
    first, second = (png(run / "figures" / "ood_scores.png", side) for run, side in zip(runs, (1, 2), strict=False))
    png(runs[2] / "figures" / "ood_scores.png", 2)  # the same picture as the second run's
    text = write_report(runs, tmp_path / "report.html").read_text("utf-8")
    for content in (first, second):
        assert text.count(base64.b64encode(content).decode()) == 1
    assert "ood_scores of vogn, other" in text
    width = int.from_bytes(first[16:20], "big")  # of the PNG's header
    assert f'ood_scores of {runs[0].name}" width="{round(width * 2 / 3)}"' in text
    assert "OOD scores" in Page(text).headings


def test_training_and_shift_curves_are_drawn_if_there_is_something_to_draw(page, tmp_path):
    assert {"Training", "Shift"} <= set(page.headings)
    alone = write_run(tmp_path / "alone", {"epoch": 0, "test/cls/Acc": 0.5})
    headings = Page(write_report([alone], tmp_path / "alone.html").read_text("utf-8")).headings
    assert headings == ["Test", "Details"]


def test_the_verdict_states_the_error_of_the_paired_difference(tmp_path):
    values = {"test/cls/NLL": 0.1, "test_mean/cls/NLL": 0.2, "test_diff/cls/NLL": -0.1, "test_diff/cls/NLL_SE": 0.03}
    path = tmp_path / "metrics.csv"
    path.write_text(",".join(values) + "\n" + ",".join(map(str, values.values())) + "\n", "utf-8")
    (sentence,) = verdict([read_run(tmp_path, "a")])
    assert "changes NLL by -0.1000 ± 0.0300, from its mean" in sentence.replace("\u00a0", " ")


@pytest.mark.parametrize("value", [0.0, -1e-9])
def test_a_difference_of_nothing_has_no_negative_sign(value):
    assert change(value, None) == "+0.0000"

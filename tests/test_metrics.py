"""The metrics of shipped weights: `matcher weights list`, the model card and README give the same numbers."""

import re
from itertools import pairwise
from pathlib import Path

import pytest

from matcher.weights.files import read_manifest

ROOT = Path(__file__).resolve().parent.parent
NUMBER = r"\d*\.\d+"


def tables(document: str) -> list[list[list[str]]]:
    """The tables of a document as rows, header first; an empty first or second cell repeats the one above."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", (ROOT / document).read_text("utf-8"), re.MULTILINE):
        rows = [
            [cell.strip().replace("`", "") for cell in line.split("|")[1:-1]] for line in block.splitlines()
        ]
        del rows[1]
        for above, row in pairwise(rows):
            row[:2] = [row[0] or above[0], row[1] or above[1]]
        found.append(rows)
    return found


def cells(column: str, dataset: str, measure: str) -> list[list[str]]:
    """The numbers of a preset's column in every table of the model card that has such a row."""
    found = []
    for header, *rows in tables("weights/README.md"):
        if column in header:
            wanted = [row for row in rows if row[0].startswith(dataset) and row[2].startswith(measure)]
            found += [re.findall(NUMBER, row[header.index(column)].split(" (")[0]) for row in wanted[:1]]
    return found


# What the manifest gives, and where the model card has it. AUC@5 is the first number of a row of poses.
CLAIMS = [
    (r"levels 1 / 2 / 3 / 4 ([\d. /]+);", "synthetic, levels 1 / 2", "AUC@5 px", slice(0, 4)),
    (rf"oxford_graf AUC@5 px ({NUMBER})", "oxford_graf", "AUC@5 px", slice(0, 1)),
    (rf"sceaux_castle pose AUC@5° ({NUMBER})", "sceaux_castle", "pose AUC@5", slice(0, 1)),
    (rf"kitti_mini pose AUC@5° ({NUMBER})", "kitti_mini", "pose AUC@5", slice(0, 1)),
    (rf"multimodal AUC@10 px ({NUMBER})", "multimodal", "AUC@10 px", slice(0, 1)),
]


@pytest.mark.parametrize("name", ["hybrid", "hybrid-learned"])
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: f"{claim[1]} {claim[2]}")
def test_the_manifest_gives_the_numbers_of_the_model_card(name, claim):
    pattern, dataset, measure, part = claim
    given = re.findall(NUMBER, re.search(pattern, read_manifest()[name].metrics)[1])
    rows = cells(name, dataset, measure)
    assert rows
    assert all(row[part] == given for row in rows), (given, rows)


def test_what_only_one_file_gives_is_from_the_model_card():
    text = read_manifest()["hybrid-learned"].metrics
    (row,) = cells("hybrid-learned", "kitchen", "pose AUC@5")
    assert row[1] == re.search(rf"kitchen pose AUC@10° ({NUMBER})", text)[1]
    given = re.search(rf"precision ({NUMBER}), recall ({NUMBER})", text).groups()
    assert cells("hybrid-learned", "synthetic, four levels", "precision / recall")[0] == list(given)


# Of the front end: keypoints, the model card's row, and what the manifest gives, its own value before SIFT's.
FRONT_END = [
    ("512", "precision at 3 px", rf"precision ({NUMBER}) \(SIFT ({NUMBER})\)"),
    ("512", "AUC@5 px", rf"AUC@5 px ({NUMBER}) \(({NUMBER})\); 1024"),
    ("1024", "repeatability at 3 px", rf"repeatability ({NUMBER}) at 3 px \(({NUMBER})\)"),
    ("1024", "correct matches", r"(\d+) correct matches \((\d+)\)"),
    ("1024", "precision at 3 px", rf"precision ({NUMBER}) \(({NUMBER})\)"),
    ("1024", "AUC@5 px", rf"AUC@5 px ({NUMBER}) \(({NUMBER})\); by"),
]


@pytest.mark.parametrize("claim", FRONT_END, ids=lambda claim: f"{claim[0]} {claim[1]}")
def test_the_manifest_gives_the_numbers_of_the_front_end(claim):
    keypoints, measure, pattern = claim
    (table,) = [table for table in tables("weights/README.md") if "nearest (SIFT)" in table[0]]
    (row,) = [row for row in table if row[:3] == ["synthetic, levels 1-3", f"402, {keypoints}", measure]]
    given = re.search(pattern, read_manifest()["learned"].metrics).groups()
    columns = [table[0].index(name) for name in ("nearest-learned, unrefined", "nearest (SIFT)")]
    assert given == tuple(row[column].split(" (")[0] for column in columns)


SHORT = [
    ("warped photos", "synthetic, levels 1 / 2", "AUC@5 px", 3),
    ("a real kitchen", "kitchen", "pose AUC@5", 1),
    ("Oxford graffiti", "oxford_graf", "AUC@5 px", 0),
    ("Sceaux castle", "sceaux_castle", "pose AUC@5", 0),
    ("KITTI", "kitti_mini", "pose AUC@5", 0),
]


@pytest.mark.parametrize("row", SHORT, ids=lambda row: row[0])
def test_the_readme_gives_the_numbers_of_the_model_card(row):
    title, dataset, measure, index = row
    header, *rows = next(table for table in tables("README.md") if table[0][1] == "measure")
    assert len(rows) == len(SHORT)
    (short,) = [line for line in rows if line[0].startswith(title)]
    for name in ("nearest", "hybrid", "nearest-learned", "hybrid-learned"):
        (value,) = re.findall(NUMBER, short[header.index(name)])
        found = {numbers[index] for numbers in cells(name, dataset, measure)}
        assert found == {value}, (name, found)

"""Labelled rows: tables and images from files, every fault with its place, batches by number."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from gossamer.errors import ConfigError, DataError
from gossamer.tasks import (
    ImageTask,
    LabelledStream,
    TableTask,
    build_labelled_task,
    build_task,
    read_images,
)


def table(folder: Path, text: str, name: str = "my.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def rows(count: int = 60) -> str:
    lines = [f"{n * 1.5},{'red' if n % 3 else 'blue'},id{n},{'ab'[n % 2]}" for n in range(count)]
    return "\n".join(["size,colour,name,label", *lines])


def test_columns_are_scaled_by_the_rows_of_training(tmp_path: Path) -> None:
    task = TableTask(table(tmp_path, rows()), ignore="name")
    assert (task.shape, task.classes, task.num_classes) == ((3,), ("a", "b"), 2)
    train = task.rows("train")
    sizes = np.array([1.5 * n for n in range(60)])[~task.test_rows.numpy()]
    expected = (sizes - sizes.mean()) / sizes.std()
    assert train.x[:, 0].numpy() == pytest.approx(expected, abs=1e-6)
    # levels are sorted: blue, red
    blue = np.array([n % 3 == 0 for n in range(60)])
    assert task.x[:, 1].bool().tolist() == blue.tolist()
    assert (task.x[:, 1] + task.x[:, 2]).tolist() == [1.0] * 60
    assert task.labels.tolist() == [n % 2 for n in range(60)]
    assert len(train) + len(task.rows("test")) == 60
    assert 3 <= len(task.rows("test")) <= 25
    assert task.lines[0].endswith("my.csv, line 2")


def test_a_row_stays_on_its_side_when_others_come(tmp_path: Path) -> None:
    few = TableTask(table(tmp_path, rows(40)), ignore=["name"])
    many = TableTask(table(tmp_path, rows(60)), ignore=["name"])
    assert few.test_rows.tolist() == many.test_rows[:40].tolist()


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_quotes_and_a_byte_order_mark(tmp_path: Path, separator: str) -> None:
    text = "\ufeff" + rows().replace(",", separator).replace("red", '"a, b"')
    task = TableTask(table(tmp_path, text), ignore="name")
    assert task.columns[1].levels == ("a, b", "blue")
    assert task.columns[0].name == "size"


def test_missing_cells_are_the_mean_and_are_marked(tmp_path: Path) -> None:
    text = "x,label\n" + "\n".join(f"{'' if n % 4 == 0 else n},{n % 2}" for n in range(40))
    task = TableTask(table(tmp_path, text))
    missing = torch.tensor([n % 4 == 0 for n in range(40)])
    assert task.shape == (2,)
    assert task.x[missing, 0].tolist() == [0.0] * 10
    assert task.x[:, 1].bool().tolist() == missing.tolist()


def test_the_task_of_its_own_config_encodes_other_files_alike(tmp_path: Path) -> None:
    task = TableTask(table(tmp_path, rows()), ignore="name")
    again = TableTask(**{k: v for k, v in task.config.items() if k != "name"})
    # columns in another order, one more, no labels, a new word
    other = table(tmp_path, "colour,extra,size\nred,1,0\ngreen,2,1.5", "other.csv")
    x, labels = again.read(other)
    assert labels == [None, None]
    assert x[0].tolist() == [float(task.x[0, 0]), 0.0, 1.0]
    assert x[1, 1:].tolist() == [0.0, 0.0]
    same, known = again.read(tmp_path / "my.csv")
    assert torch.equal(same, task.x)
    assert known == ["ab"[n % 2] for n in range(60)]


def test_classes_that_are_numbers_are_sorted_as_numbers(tmp_path: Path) -> None:
    text = "x,label\n" + "\n".join(f"{n},{n % 12}" for n in range(60))
    assert TableTask(table(tmp_path, text)).classes == tuple(str(n) for n in range(12))
    names = ["7", "nan", "10", "b", "9", "NaN", "a"]
    text = "x,label\n" + "\n".join(f"{n},{names[n % 7]}" for n in range(60))
    found = TableTask(table(tmp_path, text)).classes
    assert found == ("7", "9", "10", "NaN", "a", "b", "nan")


def test_signs_inside_a_cell_end_no_row(tmp_path: Path) -> None:
    signs = ["\u2028", "\x85", "\x0c", "\x1c", "\x0b"]
    cells = [f"a{signs[n % 5]}b" for n in range(40)]
    text = "x,colour,label\n" + "\n".join(f"{n},{c},{'uv'[n % 2]}" for n, c in enumerate(cells))
    path = tmp_path / "my.csv"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    task = TableTask(path)
    assert len(task.labels) == 40
    assert len(task.columns[1].levels) == 5
    assert task.lines[-1].endswith("line 41")


@pytest.mark.parametrize(
    ("text", "options", "error", "words"),
    [
        ("", {}, DataError, "got no row"),
        ("x,label", {}, DataError, "got no row"),
        ("x,label\n1,a\n2", {}, DataError, "line 3: expected 2 cells.*got 1"),
        ("x,label\n1,a\n2,", {}, DataError, "line 3: expected a class.*empty"),
        ("x,label\n1,a\n2,a", {}, DataError, "2 to 1000 classes; got 1"),
        ("x,x\n1,a\n2,b", {}, DataError, "line 1.*'x' 2 times"),
        ("x,kind\n1,a\n2,b", {}, ConfigError, "target must be a column.*Known: x, kind"),
        ("x,label\n1,a\n2,b", {"ignore": "y"}, ConfigError, "ignore must be a column"),
        ("label\na\nb", {}, DataError, "a column besides 'label'"),
        ("x,label\n1,a\n1,b", {}, DataError, "two different rows"),
        (f'x,label\n1,a\n"{"2" * 200_000},b\n', {}, DataError, "line 3: expected cells.*limit"),
        (rows(100), {}, DataError, "'name' must hold numbers, or at most 50.*ignore=name"),
    ],
)
def test_bad_tables(
    tmp_path: Path, text: str, options: dict, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        TableTask(table(tmp_path, text), **options)


def test_bad_rows_of_another_file(tmp_path: Path) -> None:
    task = TableTask(table(tmp_path, rows()), ignore="name")
    with pytest.raises(DataError, match="no column 'size'"):
        task.read(table(tmp_path, "colour,label\nred,a", "o.csv"))
    with pytest.raises(DataError, match=r"o.csv, line 3, column 'size'.*'big'"):
        task.read(table(tmp_path, "colour,size\nred,1\nred,big", "o.csv"))
    with pytest.raises(DataError, match="does not exist"):
        TableTask(tmp_path / "none.csv")


def test_tasks_by_name(tmp_path: Path) -> None:
    path = table(tmp_path, rows().replace("label", "kind"))
    task = build_labelled_task(f"table:{path},target=kind,ignore=name")
    assert task.classes == ("a", "b")
    with pytest.raises(ConfigError, match="unknown key 'taget'"):
        build_labelled_task(f"table:{path},taget=kind")
    with pytest.raises(ConfigError, match="unknown task 'table'"):
        build_task(f"table:{path}")
    with pytest.raises(ConfigError, match="unknown task 'copy'"):
        build_labelled_task("copy")


def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (6, 4, 5), dtype=np.uint8)


def write_idx(folder: Path, images: np.ndarray, labels: np.ndarray) -> None:
    head = b"".join(int(n).to_bytes(4, "big") for n in (2051, *images.shape))
    content = gzip.compress(head + images.tobytes())
    (folder / "train-images-idx3-ubyte.gz").write_bytes(content)
    head = b"".join(int(n).to_bytes(4, "big") for n in (2049, len(labels)))
    (folder / "train-labels-idx1-ubyte").write_bytes(head + labels.astype(np.uint8).tobytes())


def test_images_of_the_three_formats_are_the_same(tmp_path: Path) -> None:
    images, labels = pixels(), np.array([0, 1, 2, 0, 1, 2])
    np.savez(tmp_path / "a.npz", images=images, labels=labels)
    (tmp_path / "idx").mkdir()
    write_idx(tmp_path / "idx", images, labels)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        place = tmp_path / "folder" / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{number}.png")
    found = [read_images(tmp_path / name) for name in ("a.npz", "idx", "folder")]
    order = np.argsort(labels, kind="stable")
    expected = images[:, None] / np.float32(255)
    for x, y, classes, lines in found:
        assert classes == ("0", "1", "2")
        assert len(lines) == 6
        assert x.dtype == np.float32
        folder = len(set(y[:2])) == 1  # images of a folder come class by class
        assert np.array_equal(x, expected[order] if folder else expected)
        assert y.tolist() == sorted(labels) if folder else labels.tolist()


def test_coloured_images_have_three_channels_first(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 3, 2, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", images=images, labels=np.array(["x", "y", "x", "y"]))
    task = ImageTask(tmp_path / "a.npz", test_share=0.5)
    assert task.shape == (3, 3, 2)
    assert task.classes == ("x", "y")
    assert torch.equal(task.x[1, 2], torch.from_numpy(images[1, :, :, 2]) / 255)
    assert int(task.test_rows.sum()) == 2
    again = build_labelled_task(f"images:{tmp_path / 'a.npz'}", test_share=0.5)
    assert torch.equal(task.test_rows, again.test_rows)


def test_bad_images(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="got no image"):
        ImageTask(tmp_path)
    with pytest.raises(ConfigError, match="test_share"):
        ImageTask(tmp_path, test_share=0.0)
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"a\.npz must be"):
        ImageTask(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", pictures=pixels())
    with pytest.raises(DataError, match="arrays images and labels; got"):
        ImageTask(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", images=pixels(), labels=np.arange(5))
    with pytest.raises(DataError, match="5 and 6"):
        ImageTask(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", images=pixels()[0], labels=np.arange(4))
    with pytest.raises(DataError, match="channels last"):
        ImageTask(tmp_path / "a.npz")
    np.savez(tmp_path / "a.npz", images=pixels()[:1], labels=np.arange(1))
    with pytest.raises(DataError, match="two images"):
        ImageTask(tmp_path / "a.npz")
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.npz must be"):
        ImageTask(tmp_path / "a.npz")
    nan, labels = np.where(pixels() > 0, np.nan, 0.0), np.arange(6) % 2
    for images, own, words in (
        (nan, labels, "images must be finite numbers; got NaN"),
        (pixels().astype(complex), labels, "images must be finite numbers; got complex128"),
        (pixels().astype(np.uint16) + 256, labels, "must lie in 0 to 255; got 256 to "),
        (pixels().astype(np.int64) - 1, labels, "must lie in 0 to 255; got -1 to"),
        (pixels(), labels / 2, "labels must be whole numbers or text; got float64"),
        (pixels(), np.zeros(6, int), "at least two classes; got '0' alone"),
    ):
        np.savez(tmp_path / "a.npz", images=images, labels=own)
        with pytest.raises(DataError, match=words):
            ImageTask(tmp_path / "a.npz")
    (tmp_path / "f" / "x").mkdir(parents=True)
    (tmp_path / "f" / "x" / "a.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=re.escape("a.png: expected an image")):
        ImageTask(tmp_path / "f")
    Image.fromarray(np.full((3, 3), 40_000, np.uint16)).save(tmp_path / "f" / "x" / "a.png")
    with pytest.raises(DataError, match="8 bits for each channel"):
        ImageTask(tmp_path / "f")
    Image.new("L", (3, 3)).save(tmp_path / "f" / "x" / "a.png")
    Image.new("L", (3, 4)).save(tmp_path / "f" / "x" / "b.png")
    with pytest.raises(DataError, match=r"expected 3 x 3 pixels.*got 3 x 4"):
        ImageTask(tmp_path / "f")


def test_bad_idx_files(tmp_path: Path) -> None:
    write_idx(tmp_path, pixels(), np.zeros(6))
    labels = tmp_path / "train-labels-idx1-ubyte"
    whole = labels.read_bytes()
    labels.write_bytes(whole[:-1])
    with pytest.raises(DataError, match="number 2049 and as many bytes"):
        read_images(tmp_path)
    labels.write_bytes(b"\0\0\0\1" + whole[4:])
    with pytest.raises(DataError, match="number 2049"):
        read_images(tmp_path)
    labels.unlink()
    with pytest.raises(DataError, match="IDX file of labels"):
        read_images(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="must be an IDX file"):
        read_images(tmp_path)


def test_stream_passes_over_all_rows_in_a_new_order_each_time() -> None:
    stream = LabelledStream(torch.arange(10.0), torch.arange(10), 4, seed=3)
    assert stream.steps_per_epoch == 3
    passes = [
        torch.cat([stream.batch(3 * epoch + n).x for n in range(3)]).tolist() for epoch in range(2)
    ]
    assert sorted(passes[0]) == sorted(passes[1]) == list(range(10))
    assert passes[0] != passes[1]
    # any batch can be asked for at any time
    late = LabelledStream(torch.arange(10.0), torch.arange(10), 4, seed=3).batch(4)
    assert torch.equal(late.x, stream.batch(4).x)
    assert torch.equal(late.labels, late.x.long())
    assert [len(stream.batch(n)) for n in range(3)] == [4, 4, 2]
    other = LabelledStream(torch.arange(10.0), torch.arange(10), 4, seed=4)
    assert not torch.equal(other.batch(0).x, stream.batch(0).x)
    with pytest.raises(ConfigError, match="batch_size"):
        LabelledStream(torch.arange(3.0), torch.arange(3), 0, seed=0)

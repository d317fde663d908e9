"""The data sets: what is read, how it is prepared, and what is said of files that are not what they should be."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import io
import pickle
import random
import re
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("tyro", reason="the extra lab is not installed")

import numpy
from PIL import Image

from opnorm.lab import data_cifar, data_download
from opnorm.lab.data import Data, DataError, Request, derived, load_data
from opnorm.lab.data_cifar import cifar10
from opnorm.lab.data_download import Download, download
from opnorm.lab.data_folder import FileImages, random_box
from opnorm.lab.data_idx import fashion_mnist, read_idx
from opnorm.lab.data_memory import MemoryImages, cropped

CPU = torch.device("cpu")
RECORDS = 7


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFAR-10's files with seven records each, and no known checksums."""
    monkeypatch.setattr(data_cifar, "RECORDS", RECORDS)
    monkeypatch.setattr(data_cifar, "SUMS", {})


@pytest.fixture
def cifar(tmp_path: Path, small_files: None) -> Path:
    """A folder with all six files."""
    folder = tmp_path / "cifar"
    folder.mkdir()
    for seed, name in enumerate((*data_cifar.TRAIN, data_cifar.TEST)):
        (folder / name).write_bytes(records(seed))
    return folder


def records(seed: int) -> bytes:
    """Records whose pixels are random, with labels 0, 1, 2, ..."""
    random_ = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (RECORDS, 3072), generator=random_, dtype=torch.uint8)
    return torch.cat([torch.arange(RECORDS, dtype=torch.uint8).view(-1, 1), pixels], 1).numpy().tobytes()


def archive_of(folder: Path, target: Path, mode: str = "w:gz") -> Path:
    """As the publisher packs it: the files in a folder of their own, which begins with its own entry."""
    with tarfile.open(target, mode) as tar:  # type: ignore[call-overload]
        tar.add(folder, "cifar-10-batches-bin")
    return target


def all_batches(data: Data, epoch: int, **options: Any) -> list[tuple[Tensor, Tensor]]:
    return list(data.training_batches(epoch, options.pop("batch_size", 5), options.pop("seed", 0), CPU, **options))


def images_equal(a: MemoryImages, b: MemoryImages) -> bool:
    return torch.equal(a.images, b.images) and torch.equal(a.labels, b.labels)


class TestBatches:
    """What holds for every data set, on the digits and on CIFAR-10's augmentation."""

    def test_an_epoch_has_every_image_once(self) -> None:
        data = load_data("digits")
        batches = all_batches(data, 0, batch_size=97)
        assert len(batches) == data.steps(97)
        seen = torch.cat([x for x, _ in batches]).flatten(1)
        whole = data.train.images.flatten(1).float() / 16
        assert torch.equal(seen.unique(dim=0, return_counts=True)[1], whole.unique(dim=0, return_counts=True)[1])
        assert torch.cat([y for _, y in batches]).bincount().tolist() == data.train.labels.bincount().tolist()

    def test_batches_are_functions_of_seed_and_epoch(self, cifar: Path) -> None:
        data = cifar10(cifar)
        first, again = all_batches(data, 3), all_batches(data, 3)
        other, later = all_batches(data, 3, seed=1), all_batches(data, 4)
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(first, again, strict=True))
        assert not torch.equal(first[0][0], other[0][0])
        assert not torch.equal(first[0][0], later[0][0])

    def test_an_epoch_goes_on_in_the_middle(self, cifar: Path) -> None:
        data = cifar10(cifar)
        whole, rest = all_batches(data, 1), all_batches(data, 1, start=3)
        assert len(rest) == len(whole) - 3
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(whole[3:], rest, strict=True))

    def test_global_random_numbers_are_left_alone(self, cifar: Path) -> None:
        data = cifar10(cifar)
        before = torch.get_rng_state()
        all_batches(data, 0)
        assert torch.equal(torch.get_rng_state(), before)

    def test_test_images_come_in_order_standardized_or_not(self, cifar: Path) -> None:
        data = cifar10(cifar)
        plain = torch.cat([x for x, _ in data.test_batches(3, CPU, standardize=False)])
        assert torch.equal(plain, data.test.images.float() / 255)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)))
        got = torch.cat([x for x, _ in data.test_batches(4, CPU)])
        torch.testing.assert_close(got, (plain - mean) / std, rtol=0, atol=1e-6)

    def test_seeds_that_differ_in_one_part_differ(self) -> None:
        seeds = {derived(a, b, c) for a in range(11) for b in ("order", "batch") for c in range(13)}
        assert len(seeds) == 11 * 2 * 13
        assert derived(1, 11) != derived(11, 1)


class TestAugmentation:
    def test_crops_and_flips_are_those_of_one_image_at_a_time(self) -> None:
        batch = torch.randint(1, 256, (11, 3, 7, 5), dtype=torch.uint8)
        tops, lefts = torch.randint(0, 5, (2, 11))
        flips = torch.arange(11) % 2 == 0
        got = cropped(batch, 2, tops, lefts, flips)
        padded = torch.nn.functional.pad(batch, (2, 2, 2, 2))
        for i in range(11):
            crop = padded[i, :, tops[i] : tops[i] + 7, lefts[i] : lefts[i] + 5]
            assert torch.equal(got[i], crop.flip(-1) if flips[i] else crop)

    def test_every_shift_and_both_directions_occur_alike(self) -> None:
        point = torch.zeros(1, 1, 32, 32, dtype=torch.uint8)
        point[..., 16, 13] = 255
        images = MemoryImages(point, torch.zeros(1, dtype=torch.int64), padding=4, flip=True)
        n = 8100
        (batch,) = images.fetch([Request(torch.zeros(n, dtype=torch.int64), 5)], CPU, 0)
        where = batch.view(n, -1).argmax(1)
        rows, columns = where // 32, where % 32
        assert sorted(set(rows.tolist())) == [*range(12, 21)]
        assert sorted(set(columns.tolist())) == [*range(9, 23)]  # 13 ± 4, and mirrored 18 ± 4
        counts = torch.bincount(rows - 12, minlength=9)
        assert ((counts - n / 9).abs() < 5 * (n / 9) ** 0.5).all()
        beyond = int((columns >= 18).sum())  # only where it was mirrored: 5 of its 9 places
        assert abs(beyond - n * 5 / 18) < 5 * (n * 5 / 18) ** 0.5

    def test_test_images_are_not_augmented(self) -> None:
        pixels = torch.randint(256, (5, 1, 3, 3), dtype=torch.uint8)
        images = MemoryImages(pixels, torch.zeros(5, dtype=torch.int64), padding=2, flip=True)
        (batch,) = images.fetch([Request(torch.arange(5), None)], CPU, 0)
        assert torch.equal(batch, images.images.float() / 255)


class TestDigits:
    def test_the_split_is_fixed_and_even(self) -> None:
        data = load_data("digits")
        assert (len(data.train.labels), len(data.test.labels)) == (1433, 364)
        assert data.train.labels.bincount().min() > 130
        assert images_equal(data.test, load_data("digits").test)  # type: ignore[arg-type]
        (batch, labels), *_ = data.test_batches(1000, CPU)
        assert batch.shape == (364, 1, 8, 8)
        assert (float(batch.min()), float(batch.max())) == (0.0, 1.0)
        assert torch.equal(labels.unique(), torch.arange(10))

    def test_no_image_is_in_both_parts(self) -> None:
        data = load_data("digits")
        test = {i.numpy().tobytes() for i in data.test.images}
        assert not any(i.numpy().tobytes() in test for i in data.train.images)


class TestCifar10:
    def test_records_are_a_label_and_three_planes(self, cifar: Path) -> None:
        data = cifar10(cifar)
        content = (cifar / data_cifar.TEST).read_bytes()
        assert torch.equal(data.test.labels, torch.arange(RECORDS))
        assert data.test.images.shape == (RECORDS, 3, 32, 32)
        at = 3 * 3073 + 1 + 1 * 1024 + 5 * 32 + 11  # record 3, green, row 5, column 11
        assert int(data.test.images[3, 1, 5, 11]) == content[at]
        assert len(data.train.labels) == 5 * RECORDS
        assert not data.notes

    def test_fewer_batches_are_accepted_and_reported(self, cifar: Path) -> None:
        for i in (2, 4, 5):
            (cifar / f"data_batch_{i}.bin").unlink()
        data = cifar10(cifar)
        assert len(data.train.labels) == 2 * RECORDS
        (note,) = data.notes
        assert note.startswith("2 of 5 training batches, 14 images; without data_batch_2.bin, data_batch_4.bin, data_b")

    @pytest.mark.parametrize("mode", ["w:gz", "w"])
    def test_folder_parent_folder_and_archive_are_the_same(self, cifar: Path, tmp_path: Path, mode: str) -> None:
        whole = cifar10(cifar)
        archive = archive_of(cifar, tmp_path / "any.tar.gz", mode)
        parent = tmp_path / "parent"
        parent.mkdir()
        archive_of(cifar, parent / data_cifar.ARCHIVE.name, mode)
        for source in (archive, parent):
            assert images_equal(cifar10(source).train, whole.train)  # type: ignore[arg-type]
        cifar.rename(parent / "cifar-10-batches-bin")
        assert images_equal(cifar10(parent).test, whole.test)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda b: b[:-1], "truncated: expected 21,511 bytes"),
            (lambda b: b[:-3073], "truncated"),
            (lambda b: b + b"0", "too long"),
            (lambda b: b[: 2 * 3073] + b"\x0b" + b[2 * 3073 + 1 :], "mislabelled: expected labels of 0 to 9, got 11"),
        ],
    )
    @pytest.mark.parametrize("packed", [False, True])
    def test_a_bad_file_is_named(
        self, cifar: Path, tmp_path: Path, change: Callable[[bytes], bytes], words: str, packed: bool
    ) -> None:
        file = cifar / "data_batch_3.bin"
        file.write_bytes(change(file.read_bytes()))
        source = archive_of(cifar, tmp_path / "a.tar.gz") if packed else cifar
        with pytest.raises(DataError, match=re.escape(words)) as caught:
            cifar10(source)
        assert "data_batch_3.bin" in str(caught.value) and str(source) in str(caught.value)
        assert "https://" in str(caught.value)

    def test_a_changed_byte_is_found_by_its_checksum(self, cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        content = (cifar / data_cifar.TEST).read_bytes()
        monkeypatch.setattr(data_cifar, "SUMS", {data_cifar.TEST: hashlib.sha256(content).hexdigest()})
        cifar10(cifar)
        (cifar / data_cifar.TEST).write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        with pytest.raises(DataError, match=r"test_batch\.bin is corrupt"):
            cifar10(cifar)

    @pytest.mark.parametrize("cut", [10, 5000, -20])
    def test_a_cut_archive_is_named(self, cifar: Path, tmp_path: Path, cut: int) -> None:
        archive = archive_of(cifar, tmp_path / "cut.tar.gz")
        archive.write_bytes(archive.read_bytes()[:cut])
        with pytest.raises(DataError, match=r"cut\.tar\.gz is no whole archive"):
            cifar10(archive)

    def test_missing_files_are_named_with_their_source(self, tmp_path: Path, cifar: Path) -> None:
        with pytest.raises(DataError, match=rf"expected data_batch_1\.bin.* in {re.escape(str(tmp_path))}.*https://"):
            cifar10(tmp_path)
        (cifar / data_cifar.TEST).unlink()
        with pytest.raises(DataError, match=r"expected test_batch\.bin in"):
            cifar10(cifar)

    def test_pickles_are_not_loaded(self, tmp_path: Path, small_files: None) -> None:
        (tmp_path / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(DataError, match="pickled, and could run code"):
            cifar10(tmp_path)
        (tmp_path / "data_batch_1.bin").write_bytes(pickle.dumps(Bomb()))
        (tmp_path / "test_batch.bin").write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(DataError, match="truncated"):
            cifar10(tmp_path)

    def test_the_real_files(self, data_dir: Path) -> None:
        data = load_data("cifar10", data_dir / "cifar-10-batches-bin")
        assert data.test.labels.bincount().tolist() == [1000] * 10
        pixels = data.train.images.float() / 255
        assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(data.mean, abs=4e-3)
        assert pixels.std((0, 2, 3)).tolist() == pytest.approx((0.247, 0.243, 0.261), abs=4e-3)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("data was unpickled",)


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; a file called "short" claims to be ten bytes longer than it is."""

    def log_message(self, *_: Any) -> None:
        pass

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length" and self.path.endswith("short"):
            value = str(int(value) + 10)
        super().send_header(keyword, value)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder, and the address under which a server on this machine gives it out."""
    folder = tmp_path / "site"
    folder.mkdir()
    handler = functools.partial(Server, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class TestDownload:
    @pytest.fixture(autouse=True)
    def cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("OPNORM_CACHE", str(tmp_path / "cache"))
        return tmp_path / "cache"

    def test_cifar10_is_downloaded_once(
        self, site: tuple[Path, str], cifar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder, address = site
        archive = archive_of(cifar, folder / "cifar-10-binary.tar.gz")
        digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
        monkeypatch.setattr(data_cifar, "ARCHIVE", Download(f"{address}/{archive.name}", "md5", digest))
        shown: list[str] = []
        first = load_data("cifar10", show=shown.append)
        assert images_equal(first.train, cifar10(cifar).train)  # type: ignore[arg-type]
        assert [path.name for path in cache.iterdir()] == [archive.name]
        archive.unlink()
        assert images_equal(load_data("cifar10", show=shown.append).test, first.test)  # type: ignore[arg-type]
        assert len(shown) == 1 and address in shown[0]

    def test_a_wrong_checksum_leaves_nothing(self, site: tuple[Path, str], cache: Path) -> None:
        folder, address = site
        (folder / "file").write_bytes(b"changed on the way")
        with pytest.raises(DataError, match=f"{address}/file arrived with sha256 .*, expected 00"):
            download(Download(f"{address}/file", "sha256", "00"), lambda _: None)
        assert not [*cache.iterdir()]

    def test_a_connection_that_breaks_off_leaves_nothing(self, site: tuple[Path, str], cache: Path) -> None:
        folder, address = site
        (folder / "short").write_bytes(b"x" * 1000)
        with pytest.raises(DataError, match="broke off after 1,000 of 1,010 bytes"):
            download(Download(f"{address}/short", "md5", "00"), lambda _: None)
        assert not [*cache.iterdir()]

    def test_without_a_network_it_says_what_to_do(
        self, site: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, address = site
        monkeypatch.setattr(data_download, "TIMEOUT", 5.0)
        for url in (f"{address}/not-there", "http://127.0.0.1:9/file"):
            with pytest.raises(DataError, match=rf"{url} cannot be downloaded .*--data-path"):
                download(Download(url, "md5", "00"), lambda _: None)

    def test_the_folder_follows_the_user(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("OPNORM_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert data_download.cache_folder() == tmp_path / "opnorm"


def idx(array: Tensor) -> bytes:
    sizes = b"".join(n.to_bytes(4) for n in array.shape)
    return bytes([0, 0, 8, array.dim()]) + sizes + array.to(torch.uint8).numpy().tobytes()


def packed(content: bytes) -> bytes:
    """Without the time of day, since tests are named by it: two workers that collect a second apart must agree."""
    return gzip.compress(content, mtime=0)


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """A folder with Fashion-MNIST's four files, two of them packed."""
    for prefix, n in (("train", 11), ("t10k", 5)):
        images, labels = torch.randint(256, (n, 28, 28)), torch.arange(n) % 10
        (tmp_path / f"{prefix}-images-idx3-ubyte").write_bytes(idx(images))
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(packed(idx(labels)))
    return tmp_path


class TestFashionMnist:
    def test_what_was_written_is_read(self, clothes: Path) -> None:
        data = load_data("fashion-mnist", clothes)
        assert data.shape == (1, 28, 28)
        assert torch.equal(data.train.labels, torch.arange(11) % 10)
        raw = (clothes / "t10k-images-idx3-ubyte").read_bytes()
        assert int(data.test.images[3, 0, 17, 5]) == raw[16 + 3 * 784 + 17 * 28 + 5]

    @pytest.mark.parametrize(
        ("name", "content", "words"),
        [
            ("t10k-images-idx3-ubyte", idx(torch.zeros(5, 28, 28))[:-1], "truncated"),
            ("t10k-images-idx3-ubyte", idx(torch.zeros(5, 28, 28)) + b"x", "too long"),
            ("t10k-images-idx3-ubyte", idx(torch.zeros(5, 28)), "no idx file of bytes in 3 dimensions"),
            ("t10k-images-idx3-ubyte", idx(torch.zeros(5, 28, 27)), "corrupt: expected n×28×28"),
            ("t10k-images-idx3-ubyte", b"", "begins with nothing"),
            ("t10k-images-idx3-ubyte", idx(torch.zeros(4, 28, 28)), "as many labels as images"),
            (
                "t10k-labels-idx1-ubyte.gz",
                packed(idx(torch.tensor([1, 2, 3, 10, 5]))),
                "mislabelled: .* got 10 at 3",
            ),
            ("t10k-labels-idx1-ubyte.gz", packed(idx(torch.arange(5)))[:-9], "cannot be read"),
            ("t10k-labels-idx1-ubyte.gz", b"not packed", "cannot be read"),
        ],
    )
    def test_a_bad_file_is_named(self, clothes: Path, name: str, content: bytes, words: str) -> None:
        (clothes / name).write_bytes(content)
        with pytest.raises(DataError, match=words) as caught:
            fashion_mnist(clothes)
        assert str(clothes / name) in str(caught.value)

    def test_a_missing_file_is_named_with_its_source(self, clothes: Path) -> None:
        (clothes / "train-images-idx3-ubyte").unlink()
        for path in (clothes, None):
            with pytest.raises(DataError, match=r"idx.*https://"):
                fashion_mnist(path)

    def test_any_size_is_read_where_any_is_allowed(self, tmp_path: Path) -> None:
        array = torch.arange(2 * 3 * 5).view(2, 3, 5)
        (tmp_path / "x").write_bytes(idx(array))
        assert torch.equal(read_idx(tmp_path / "x", (None, 3, None)).to(torch.int64), array)


def picture(width: int, height: int) -> Image.Image:
    """Red grows to the right, green grows downwards."""
    across, down = numpy.meshgrid(numpy.linspace(0, 255, width), numpy.linspace(0, 255, height))
    return Image.fromarray(numpy.stack([across, down, 0 * down + 77], -1).round().astype(numpy.uint8))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """train and val with two classes of pictures of several sizes and formats."""
    for part, n in (("train", 7), ("val", 2)):
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            for i in range(n):
                picture(40 + 7 * i, 61 - 3 * i).save(tmp_path / part / kind / f"{i}.{'png' if i % 2 else 'jpg'}")
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    return tmp_path


class TestFolders:
    def test_classes_and_files_in_order(self, pictures: Path) -> None:
        data = load_data("imagenet", pictures)
        assert data.classes == ("cat", "dog")
        assert data.train.labels.tolist() == [0] * 7 + [1] * 7
        assert data.shape == (3, 224, 224)
        assert data.mean == (0.485, 0.456, 0.406)
        x, y = next(data.training_batches(0, 5, 0, CPU, workers=2))
        assert x.shape == (5, 3, 224, 224)
        assert y.shape == (5,)

    def test_batches_do_not_depend_on_the_number_of_threads(self, pictures: Path) -> None:
        data = load_data("folder", pictures, image_size=29)
        one, many = (all_batches(data, 2, workers=n) for n in (1, 5))
        assert all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(one, many, strict=True))
        rest = all_batches(data, 2, start=1, workers=2)
        assert torch.equal(rest[0][0], one[1][0])

    def test_test_images_are_resized_whole_and_cropped_in_the_centre(self, pictures: Path) -> None:
        data = load_data("imagenet", pictures, image_size=28)
        file = data.test.files[0]  # type: ignore[attr-defined]
        with Image.open(file) as image:
            whole = numpy.asarray(image.convert("RGB").resize((32, 32), Image.Resampling.BILINEAR))
        x = next(data.test_batches(3, CPU, standardize=False))[0][0]
        centre = torch.from_numpy(whole[2:30, 2:30].copy()).permute(2, 0, 1)
        assert torch.equal((x * 255).round().to(torch.uint8), centre)

    def test_training_images_are_crops_and_half_are_mirrored(self, pictures: Path) -> None:
        images = load_data("folder", pictures, image_size=24).train
        assert isinstance(images, FileImages)
        seen = torch.stack([images.read(3, seed) for seed in range(200)]).float()
        slopes = (seen[:, 0, :, -1] - seen[:, 0, :, 0]).mean(1)  # of red from left to right
        assert 60 < int((slopes < 0).sum()) < 140
        extent = slopes.abs() / 255
        assert 0.1 < float(extent.min()) < 0.5
        assert float(extent.max()) > 0.8
        assert (seen[:, 1, -1] > seen[:, 1, 0]).all()  # never upside down

    @pytest.mark.parametrize(("width", "height"), [(500, 375), (31, 997), (997, 31), (1, 1), (3, 2)])
    def test_random_boxes_lie_inside_and_have_the_published_areas(self, width: int, height: int) -> None:
        chance = random.Random(0)
        boxes = [random_box(width, height, chance) for _ in range(500)]
        assert all(0 <= a < c <= width and 0 <= b < d <= height for a, b, c, d in boxes)
        if (width, height) == (500, 375):
            areas = torch.tensor([(c - a) * (d - b) / (width * height) for a, b, c, d in boxes])
            assert 0.07 < areas.min() < 0.15
            assert areas.max() > 0.85
            aspects = torch.tensor([(c - a) / (d - b) for a, b, c, d in boxes])
            assert 0.73 < aspects.min() < 0.8
            assert 1.25 < aspects.max() < 1.36

    def test_without_a_test_folder_every_fifth_image_is_held_out(self, pictures: Path) -> None:
        data = load_data("folder", pictures / "train", image_size=16)
        assert (len(data.train.labels), len(data.test.labels)) == (10, 4)
        assert not {*data.train.files} & {*data.test.files}  # type: ignore[attr-defined]
        assert "one image in 5" in data.notes[0]

    @pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
    def test_a_file_that_is_no_image_is_named(self, pictures: Path, damage: str) -> None:
        file = pictures / "train" / "dog" / "4.jpg"
        content = {"truncated": file.read_bytes()[:-200], "text": b"no image", "empty": b""}[damage]
        file.write_bytes(content)
        data = load_data("folder", pictures, image_size=16)
        with pytest.raises(DataError, match=r"dog/4\.jpg is no whole image"):
            all_batches(data, 0, workers=2)

    def test_a_folder_that_does_not_fit_is_named(self, pictures: Path, tmp_path: Path) -> None:
        (pictures / "val" / "cow").mkdir()
        with pytest.raises(DataError, match=r"in every class of .*val, got none in cow"):
            load_data("imagenet", pictures)
        picture(9, 9).save(pictures / "val" / "cow" / "a.png")
        with pytest.raises(DataError, match=r"the same classes in .*, got cow in only one"):
            load_data("imagenet", pictures)
        with pytest.raises(DataError, match=r"expected a folder train in .*val"):
            load_data("imagenet", pictures / "val")
        with pytest.raises(DataError, match=r"one folder a class in .*, at least two"):
            load_data("folder", pictures / "val" / "cow")
        (pictures / "val").rename(pictures / "elsewhere")
        with pytest.raises(DataError, match="only one of them"):
            load_data("folder", pictures)

    def test_gray_and_transparent_images_become_rgb(self, tmp_path: Path) -> None:
        for i, mode in enumerate(("L", "RGBA", "P", "1", "I;16")):
            for kind in ("a", "b"):
                (tmp_path / kind).mkdir(exist_ok=True)
                Image.new(mode, (20, 20)).save(tmp_path / kind / f"{i}.png")
        x = torch.cat([x for x, _ in all_batches(load_data("folder", tmp_path, image_size=16), 0)])
        assert x.shape == (8, 3, 16, 16)

    def test_threads_end_with_the_batches(self, pictures: Path) -> None:
        batches = load_data("folder", pictures, image_size=16).training_batches(0, 2, 0, CPU, workers=3)
        next(batches)
        batches.close()  # type: ignore[attr-defined]
        assert not [t for t in threading.enumerate() if t.name.startswith("images")]


class TestArguments:
    @pytest.mark.parametrize(
        ("name", "path", "size", "words"),
        [
            ("mnist", None, None, "expected --data among digits, cifar10"),
            ("digits", None, 8, "expected --image-size with folders of images, got it with digits"),
            ("digits", ".", None, "expected no --data-path"),
            ("cifar10", "not-there", None, "expected --data-path as a folder or file that exists, got not-there"),
            ("imagenet", None, None, "image-net.org"),
            ("folder", None, None, "expected --data-path as a folder of images"),
            ("fashion-mnist", None, None, "github.com/zalandoresearch"),
        ],
    )
    def test_wrong_ones_are_said_in_one_line(self, name: str, path: str | None, size: int | None, words: str) -> None:
        with pytest.raises(DataError, match=re.escape(words)):
            load_data(name, path and Path(path), image_size=size)

    def test_a_file_is_no_folder_of_images(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(io.BytesIO().getvalue())
        with pytest.raises(DataError, match="which is a file"):
            load_data("folder", tmp_path / "file")

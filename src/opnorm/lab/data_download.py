"""`download`: one file from its publisher, whole and with the right checksum, or not at all."""

from __future__ import annotations

import hashlib
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from opnorm.lab.data import DataError, Show

CHUNK = 1 << 18
TIMEOUT = 30.0  # seconds without a byte


@dataclass(frozen=True)
class Download:
    """A file on the network, and its checksum as its publisher gives it."""

    url: str
    algorithm: str
    digest: str

    @property
    def name(self) -> str:
        """The name of the file."""
        return self.url.rpartition("/")[2]


def cache_folder() -> Path:
    """Where downloads are kept: $OPNORM_CACHE, or `opnorm` in the user's cache."""
    own = os.environ.get("OPNORM_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) if own else Path(base) / "opnorm"


def download(what: Download, show: Show = print) -> Path:
    """The file in the cache, fetched with a progress bar where it is not there yet."""
    target = cache_folder() / what.name
    if target.is_file():
        return target
    show(f"downloading {what.url} to {target}")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            found = _fetch(what, file)
            file.flush()
            os.fsync(file.fileno())
        if found != what.digest:
            raise DataError(
                f"{what.url} arrived with {what.algorithm} {found}, expected {what.digest}; try again, or give a copy "
                "by --data-path"
            )
        os.replace(part, target)
    except OSError as error:  # no network, no such host, a server's refusal, a full disk: their texts say which
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise DataError(
            f"{what.url} cannot be downloaded to {target}: {reason}; get it by other means, and give it by --data-path"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return target


def _fetch(what: Download, file: BinaryIO) -> str:
    """Copy the bytes into `file`; their checksum."""
    sum_ = hashlib.new(what.algorithm, usedforsecurity=False)
    name = TextColumn("{task.description}")
    columns = (name, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with urllib.request.urlopen(what.url, timeout=TIMEOUT) as response, Progress(*columns) as progress:
        size = int(response.headers.get("Content-Length", 0))
        task = progress.add_task(what.name, total=size or None)
        done = 0
        while chunk := response.read(CHUNK):
            file.write(chunk)
            sum_.update(chunk)
            done += len(chunk)
            progress.update(task, completed=done)
    if size and done < size:
        raise DataError(f"{what.url} broke off after {done:,} of {size:,} bytes; try again")
    return sum_.hexdigest()

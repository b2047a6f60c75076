"""Replacing a whole folder at once: a kill at any moment leaves the old one or the new one, never a mixture."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import socket
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import AutoNormError


class FolderError(AutoNormError):
    """The folder cannot be written to, or be read from."""


@contextlib.contextmanager
def replacing(directory: str | os.PathLike, stale: Callable[[Path], bool]) -> Iterator[tuple[Path, Path]]:
    """Yields (an empty folder to write into, the folder it will replace); the swap happens when the block ends well.

    What else lies in the old folder is carried over, except what the block wrote itself and what `stale` (of a path
    below the old folder) names. An exception leaves the old folder as it was.
    """
    if not isinstance(directory, (str, os.PathLike)) or not str(directory).strip():
        raise FolderError(f"{directory!r} names no folder to save into")
    target = Path(directory).resolve()  # a link to a folder stays a link
    try:
        in_the_way = next((path for path in (target, *target.parents) if path.exists() and not path.is_dir()), None)
        if in_the_way is not None:
            raise FolderError(f"{in_the_way} is a file; name a folder to save into")
        if target == Path.cwd() or target in Path.cwd().parents:
            raise FolderError(
                f"{directory} is, or holds, the current directory; save into a folder below or beside it"
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        restore(target)
        _sweep(target)
        new = _beside(target, "new")
        new.mkdir()
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
            raise
        raise FolderError(
            f"cannot write beside {directory} ({error.strerror}): a folder is first written under a temporary name in "
            f"{target.parent}, which needs to be writable"
        ) from error
    try:
        yield new, target
        if target.exists():
            _carry_over(target, new, stale)
            shutil.copymode(target, new)
        _put_in_place(new, target)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def restore(target: Path) -> None:
    """Puts the old folder back where a kill came between the two renames of `_put_in_place`."""
    if not target.exists():
        for old in sorted(target.parent.glob(f".{target.name}.*.old")):
            with contextlib.suppress(OSError):
                os.rename(old, target)
                return


def _beside(target: Path, kind: str) -> Path:
    """A hidden name in the same parent (one file system); it says who is at work, so that `_sweep` knows leftovers."""
    return target.with_name(f".{target.name}.{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}.{kind}")


def _sweep(target: Path) -> None:
    """Deletes what killed processes of this machine left beside `target`."""
    for path in target.parent.glob(f".{target.name}.{socket.gethostname()}-*-*.*"):
        pid = path.name.rsplit("-", 2)[1]
        if path.suffix in (".new", ".old") and pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # os.kill(pid, 0) would end the process there
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _carry_over(old: Path, new: Path, stale: Callable[[Path], bool]) -> None:
    for entry in sorted(old.iterdir()):
        place = new / entry.name
        if entry.is_symlink() or not entry.is_dir():
            if not place.exists() and not stale(entry):
                link(entry, place)
        elif place.is_dir():
            _carry_over(entry, place, stale)
        elif not place.exists():
            place.mkdir()
            _carry_over(entry, place, stale)
            shutil.copymode(entry, place)


def link(file: Path, place: Path) -> None:
    """A hard link (checkpoints may lie here, gigabytes of them), or a copy where the file system has none."""
    if file.is_symlink():
        os.symlink(os.readlink(file), place)
        return
    try:
        os.link(file, place)
    except OSError:
        shutil.copy2(file, place)


def _put_in_place(new: Path, target: Path) -> None:
    if not target.exists():
        os.rename(new, target)
        return
    if _exchange(new, target):
        return  # `new` holds the old files now, and is deleted
    # No atomic exchange here (Windows, some network file systems): between the two renames there is no folder;
    # `restore` finds the old one after a kill, and the next lines after an exception.
    old = _beside(target, "old")
    os.rename(target, old)
    try:
        os.rename(new, target)
    except BaseException:
        os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Swaps two folders in one step of the kernel; False where there is no such call."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "linux":
            at_fdcwd, exchange = -100, 2  # RENAME_EXCHANGE
            return libc.renameat2(at_fdcwd, os.fsencode(a), at_fdcwd, os.fsencode(b), exchange) == 0
        if sys.platform == "darwin":
            swap = 2  # RENAME_SWAP
            return libc.renamex_np(os.fsencode(a), os.fsencode(b), swap) == 0
    except (OSError, AttributeError, TypeError):
        pass
    return False

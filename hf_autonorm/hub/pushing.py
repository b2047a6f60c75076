"""Pushing a model to the Hub: written and checked on this machine first, then sent in one commit."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ..errors import AutoNormError, ConfigError
from .atomic import FolderError, link
from .metadata import CardError, check_metadata, merge, read_card
from .reading import RECORD_FILE
from .saving import is_stale_name, save_pretrained

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo, HfApi
    from huggingface_hub.hf_api import ModelInfo

_SCANNED = 64 * 2**20  # bytes; larger files are tensors, not texts that a token could have slipped into


class PushError(AutoNormError):
    """The Hub did not take the model: why, and the remedy."""


def push_to_hub(
    model: nn.Module | str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    create_pr: bool = False,
    **options: Any,
) -> CommitInfo | None:
    """Uploads `model`, its patch and its card to the Hub in one commit; returns that commit (a `str`: its URL).

        push_to_hub(model, "me/my-model", tokenizer=tokenizer, metrics={"accuracy": 0.91}, private=True)

    All is first written into a temporary folder and checked; only then anything is sent. A README.md on the Hub keeps
    its own words, files of an earlier model that this one no longer has are deleted. After a broken upload call it
    again: what has arrived is not sent twice.

    Args:
        model: patched or not, of any kind; or a folder written by `save_pretrained`, which is sent as it is.
        repo_id: `owner/name`, or a name in your own namespace; made if missing.
        private: of a repository that is made. An existing one keeps its visibility: `private=True` for a public one is
            an error, `private=False` for a private one a warning.
        token: a token with write access; default: HF_TOKEN, or that of `hf auth login`.
        revision: the branch, made from `main` if missing; or `refs/pr/N`. Default: `main`.
        commit_message: default: "Upload" and the model's class.
        create_pr: open a pull request against `main`; its address is `.pr_url` of the result.
        options: those of `save_pretrained` (`metrics`, `baseline`, `tokenizer`, `files_from`, `custom_code`, …).

    Returns None where `is_main_process=False`. Raises `PushError` where the Hub refuses or cannot be reached, and the
    errors of `save_pretrained`; nothing was uploaded then, or all that was is kept for the next try.
    """
    repo_id, source = _checked(model, repo_id, revision, create_pr, options)
    if options.get("is_main_process") is False:
        return None
    secret = _token(token)
    from huggingface_hub import HfApi

    from ..version import __version__

    api = HfApi(token=secret, library_name="hf_autonorm", library_version=__version__)
    with _explained(repo_id), tempfile.TemporaryDirectory(prefix="hf_autonorm-") as scratch:
        if "/" not in repo_id:
            repo_id = f"{api.whoami()['name']}/{repo_id}"
        head, is_new_branch = _head(api, repo_id, revision)
        if head is not None:
            _compare_visibility(repo_id, head.private, private)
        folder = Path(scratch, repo_id.split("/")[1])
        folder.mkdir()
        if head is not None:
            _fetch(api, head, folder, Path(scratch, "cache"))
        if source is None:
            try:
                save_pretrained(model, folder, repo_id=repo_id, **options)
            except CardError as error:
                raise CardError(f"{error.__cause__ or error}. Nothing was uploaded") from None
        else:
            _collect(source, folder)
        _check(folder, secret)
        if head is None:
            api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None and (is_new_branch or (head is None and revision != "main")):
            api.create_branch(repo_id, branch=revision, revision=head.sha if head else None, exist_ok=True)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            create_pr=create_pr,
            commit_message=commit_message or f"Upload {source.name if source else type(model).__name__}",
            # README.md was brought up to date from this commit: words that came in between must not be lost. (Whoever
            # merges a pull request sees them.)
            parent_commit=head.sha if head and not create_pr else None,
            delete_patterns=[glob.escape(name) for name in _no_longer(head, folder)] or None,
        )


def _checked(
    model: Any, repo_id: Any, revision: str | None, create_pr: bool, options: dict[str, Any]
) -> tuple[str, Path | None]:
    """(the repository's id, the folder where one is to be pushed)"""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ConfigError(f"repo_id={repo_id!r} is no name of a repository (owner/name): {error}") from None
    if create_pr and revision not in (None, "main"):
        raise ConfigError(
            f"create_pr=True opens a pull request against main; leave revision={revision!r} out. To go on with an "
            "open pull request, push with revision='refs/pr/N' and without create_pr"
        )
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ConfigError(f"revision={revision!r} is a commit, which nothing can be added to; name a branch")
    if not isinstance(model, (str, os.PathLike)):
        return repo_id, None
    source = Path(model)
    if not source.is_dir():
        raise FolderError(f"there is no folder {source} to push")
    if not any((source / name).is_file() for name in ("config.json", RECORD_FILE)):
        raise FolderError(
            f"{source} holds no saved model (no config.json, no {RECORD_FILE}); save_pretrained makes one"
        )
    given = sorted(options.keys() - {"is_main_process"})
    if given:
        raise ConfigError(f"{given} belong to the saving of a model; the folder {source} is pushed as it is")
    return repo_id, source


def _token(token: str | bool | None) -> str:
    from huggingface_hub import constants, get_token

    if constants.HF_HUB_OFFLINE:
        raise PushError("HF_HUB_OFFLINE is set: nothing may be sent. Unset it, or save_pretrained into a folder")
    found = token if isinstance(token, str) else None if token is False else get_token()
    if not found:
        raise PushError("no token: run `hf auth login`, set HF_TOKEN, or pass token=… (one with write access)")
    return found


def _head(api: HfApi, repo_id: str, revision: str | None) -> tuple[ModelInfo | None, bool]:
    """(what the commit will stand on, or None where there is no repository; whether the branch is still to be made)"""
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    try:
        main = api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None, False
    if revision in (None, "main"):
        return main, False
    try:
        return api.model_info(repo_id, revision=revision), False
    except RevisionNotFoundError:
        if revision.startswith("refs/"):
            raise PushError(f"{repo_id} has no {revision}; create_pr=True opens a pull request") from None
        return main, True


def _compare_visibility(repo_id: str, is_private: bool | None, private: bool | None) -> None:
    if private is True and not is_private:
        raise PushError(
            f"{repo_id} exists and is public; private=True cannot hide what is pushed there. Make it private first "
            "(its settings on the Hub), push elsewhere, or leave `private` out"
        )
    if private is False and is_private:
        warnings.warn(f"{repo_id} exists and stays private; its settings on the Hub make it public", stacklevel=3)


def _fetch(api: HfApi, head: ModelInfo, folder: Path, cache: Path) -> None:
    """README.md, whose own words stay, and config.json, which the new model may no longer have."""
    there = {file.rfilename for file in head.siblings or []}
    for name in ("README.md", "config.json"):
        if name in there:
            file = api.hf_hub_download(head.id, name, revision=head.sha, cache_dir=cache)
            shutil.copyfile(file, folder / name)


def _no_longer(head: ModelInfo | None, folder: Path) -> list[str]:
    """Files on the Hub of the model that is being replaced, which the new one does not have."""
    there = [file.rfilename for file in head.siblings or []] if head else []
    ours = (name for name in there if is_stale_name(name) or name == "config.json")
    return [name for name in ours if not (folder / name).exists()]


def _collect(source: Path, folder: Path) -> None:
    """The files of a saved model; not checkpoints, nor what is hidden. README.md goes into the one from the Hub."""
    for file in sorted(source.rglob("*")):
        inner = file.relative_to(source)
        hidden = any(part.startswith((".", "checkpoint-")) for part in inner.parts)
        if file.is_dir() or hidden or inner.as_posix() == "README.md":
            continue
        place = folder / inner
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        link(file.resolve(), place)
    if not (source / "config.json").exists():
        (folder / "config.json").unlink(missing_ok=True)
    if (source / "README.md").exists():
        _merge_readme(source / "README.md", folder / "README.md")


def _merge_readme(ours: Path, theirs: Path) -> None:
    """Our section and metadata of `ours` into `theirs`, the one from the Hub, whose own words stay."""
    from .cards import _SECTION, _splice

    if not theirs.exists():
        shutil.copyfile(ours, theirs)
        return
    mine, other = read_card(ours), read_card(theirs)
    words = [_SECTION.sub("", card.text).strip() for card in (mine, other)]
    if words[0] and words[0] != words[1]:
        warnings.warn(
            f"README.md on the Hub keeps its own words; those of {ours} that differ are not pushed. Edit it on the "
            "Hub, or upload yours over it: hf upload REPO README.md",
            stacklevel=4,
        )
    if _SECTION.search(mine.text):
        facts = mine.data.to_dict()
        facts.pop("model-index", None)
        facts["eval_results"], facts["model_name"] = mine.data.eval_results, mine.data.model_name or theirs.parent.name
        other.data, other.text = merge(other, facts, set()), _splice(other.text, mine.text)
        other.save(theirs)


def _check(folder: Path, secret: str) -> None:
    """The Hub's own checks, and that the token is in no file: before anything is sent."""
    readme = folder / "README.md"
    if readme.exists():
        check_metadata(read_card(readme).data.to_dict())
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.stat().st_size < _SCANNED and secret.encode() in file.read_bytes():
            raise PushError(
                f"{file.relative_to(folder)} holds your Hub token; nothing was uploaded. Take it out (Trainer writes "
                "hub_token into training_args.bin: use HF_TOKEN or `hf auth login` instead)"
            )


# --- what went wrong -------------------------------------------------------------------------------------------------

_REMEDIES = {
    401: "the token is missing, wrong or expired: run `hf auth login`, or pass token=…",
    403: "the token may not do this: it needs write access to the repository (and to its owner, to create it)",
    404: "there is no such repository, or the token does not see it",
    409: "another change came in between: push again",
    412: "another commit came in between: push again, the card is then brought up to date from that one",
    413: "the Hub takes no files of this size; save with a smaller max_shard_size",
    429: "the Hub's rate limit is reached: wait, and push again; what has arrived is not sent twice",
}


@contextlib.contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """The client's errors as PushError, with the remedy."""
    try:
        yield
    except AutoNormError:
        raise
    except Exception as error:
        words = _explanation(error)
        if words is None:
            raise
        raise PushError(f"{repo_id} was not pushed: {words}") from error


def _explanation(error: BaseException | None) -> str | None:
    from huggingface_hub.errors import HfHubHTTPError

    if error is None:
        return None
    said = " ".join(str(error).split())[:200]
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        again = "the Hub has a fault of its own: push again later; what has arrived is not sent twice"
        return f"{_REMEDIES.get(status, again if status >= 500 else 'the Hub refuses it')} ({said})"
    if type(error).__module__.split(".")[0] in ("httpx", "httpx2", "hf_xet") or isinstance(error, ConnectionError):
        return f"the connection broke ({said or type(error).__name__}): push again, what has arrived is not sent twice"
    if isinstance(error, ValueError) and "README.md" in said:
        return f"the Hub refuses the card's metadata ({said})"
    return _explanation(error.__cause__)

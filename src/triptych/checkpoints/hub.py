"""`hub:org/name`: the only model names that use the network, through huggingface-hub and its cache.

`locate.py` says how a name is written.  Only weights without code in them (safetensors, or the one
named GGUF) and the small text files beside them are ever downloaded.  huggingface-hub compares the size of each file
with what the server announced; nothing else is verified here.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from triptych.errors import FetchError, InputError, first_line, nearest, shown
from .locate import PICKLES, PREFIX, HubName, is_safe, model_in_run, parse_name

_TIMEOUT = 10.0  # seconds without an answer

_NOT_DOWNLOADED = (
    "has not been downloaded; run once without --offline (offline=True, or HF_HUB_OFFLINE=1 in the environment)"
)
_TEXTS = (".json", ".txt", ".model", ".spm", ".jinja")


def local_path(model: str | Path, offline: bool = False, weights: bool = True) -> Path:
    """The place of `model` on this machine: a path, of a run directory its model, or what a `hub:` name fetched.

    Raises InputError for what is neither a path nor a name; the empty string would be the current directory.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise InputError(f"a model is a directory, a .gguf file or hub:org/name, not {shown(model)}")
    if not str(model).startswith(PREFIX):
        return model_in_run(Path(model))
    name = parse_name(str(model))
    return fetch(name.repo, name.revision, name.file, offline=offline, weights=weights)


def fetch(
    repo: str,
    revision: str | None = None,
    file: str | None = None,
    offline: bool = False,
    endpoint: str | None = None,
    cache: Path | None = None,
    weights: bool = True,
) -> Path:
    """The directory of a hub repository's model, or its one GGUF `file`, in huggingface-hub's cache.

    What is there already is not downloaded again; the rest comes with a progress bar on stderr.  `offline` (or
    `HF_HUB_OFFLINE=1`) looks in the cache alone.  Without `weights` only the texts beside
    them come.  Raises `FetchError`, one line, for whatever goes wrong.
    """
    name = parse_name(str(HubName(repo, revision, file)))
    from huggingface_hub import HfApi, constants, snapshot_download

    offline = offline or constants.HF_HUB_OFFLINE
    try:
        patterns = [file or "config.json"]  # in the cache, one of the files leads to the folder of all
        if not offline:
            info = HfApi(endpoint=endpoint).model_info(repo, revision=revision, timeout=_TIMEOUT)
            patterns = choose(name, [sibling.rfilename for sibling in info.siblings or []])
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=cache,
            allow_patterns=patterns if weights or file else [one for one in patterns if ".safetensors" not in one],
            local_files_only=offline,
            endpoint=endpoint,
            etag_timeout=_TIMEOUT,
        )
    except FetchError:
        raise
    except Exception as error:  # the library, its transport and the cache's disk raise from a dozen families
        _explain(name, error, offline)
    path = Path(folder, file) if file else Path(folder)
    if not path.exists():
        raise FetchError(f"{name}: {file} {_NOT_DOWNLOADED}")
    return path


def choose(name: HubName, files: Iterable[str]) -> list[str]:
    """Those of a repository's `files` to download: the named GGUF, or the safetensors weights and the texts.

    Raises `FetchError` when a name could leave the download directory, and when there is nothing to run.
    """
    files = list(files)
    for file in files:
        if not is_safe(file):
            raise FetchError(f"{name}: the repository holds a file with the unsafe name {shown(file)}")
    if name.file:
        if name.file not in files:
            ggufs = [file for file in files if file.endswith(".gguf")]
            raise FetchError(f"{name}: no such file in the repository{nearest(name.file, ggufs)}")
        return [name.file]
    weights = [file for file in files if re.fullmatch(r"model(-\d+-of-\d+)?\.safetensors", file)]
    if not weights:
        raise FetchError(f"{name}: {_why_no_weights(name, files)}")
    # A sentence encoder keeps the settings of its pooling one level down.
    texts = [file for file in files if file.endswith(_TEXTS if "/" not in file else "/config.json")]
    return weights + [file for file in texts if file.count("/") <= 1]


def _why_no_weights(name: HubName, files: list[str]) -> str:
    """The problem of a repository without safetensors weights, and what to load instead."""
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        return f"holds GGUF files; name one, for example hub:{name.repo}:{ggufs[0]}"
    if pickles := [file for file in files if file.endswith(PICKLES)]:
        return (
            f"holds its weights only as a pickle ({pickles[0]}), which is never opened here; convert it to "
            "safetensors in an environment you trust"
        )
    return "holds no model.safetensors"


def _explain(name: HubName, error: Exception, offline: bool) -> NoReturn:
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        problem = f"asks you to accept its terms at https://huggingface.co/{name.repo}; then run hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        problem = f"has no revision {name.revision}"
    elif isinstance(error, errors.RepositoryNotFoundError):
        problem = "no such repository; if it is private, run hf auth login"
    elif offline:
        problem = _NOT_DOWNLOADED
    else:
        reason = first_line(error)
        problem = f"could not be fetched ({reason}); if it was downloaded before, use --offline (offline=True)"
    raise FetchError(f"{name}: {problem}") from error

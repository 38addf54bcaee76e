"""The download of checkpoints from the Hugging Face hub, and the errors for downloads that fail."""

import shlex
from pathlib import Path

from kvexport.errors import EnvironmentProblem, KvexportError, UsageError, summary

_TEXTS = ["*.json", "*.jinja"]
_DOWNLOADED = [*_TEXTS, "*.safetensors"]
# Files that hold the same weights a second time: Mistral's own format, and copies in subfolders
_NOT_DOWNLOADED = ["*/*.json", "*/*.safetensors", "consolidated*.safetensors"]


def download(hub_id: str, revision: str | None, *, weights: bool = True) -> Path:
    """Return the folder of a hub model in the hub's cache, after downloading the files that the cache lacks.

    Pickles and code are never downloaded. Offline this function fails within a second and prints nothing, whereas
    transformers' readers of single files would repeat every request for 25 seconds and print each failure.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise EnvironmentProblem(
            f"huggingface_hub, which downloads {hub_id!r}, cannot be imported: {error}", "pip install huggingface_hub"
        ) from error
    try:
        return Path(
            snapshot_download(
                hub_id,
                revision=revision,
                allow_patterns=_DOWNLOADED if weights else _TEXTS,
                ignore_patterns=_NOT_DOWNLOADED,
            )
        )
    except (
        Exception
    ) as error:  # The HTTP library below, and with it the class of its errors, differs between hub versions.
        raise _hub_problem(hub_id, revision, error) from error


def _hub_problem(hub_id: str, revision: str | None, error: Exception) -> KvexportError:
    from huggingface_hub import constants, errors

    local = f"there is no local directory {hub_id!r}, and "
    command = f"hf download {hub_id}" + (f" --revision {shlex.quote(revision)}" if revision else "")
    if isinstance(error, errors.GatedRepoError):
        return EnvironmentProblem(
            f"{hub_id!r} is a gated model and this machine has no access to it",
            f"ask for access at {constants.ENDPOINT}/{hub_id}, then run: hf auth login",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return UsageError(
            f"the hub's {hub_id!r} has no revision {revision!r}",
            "--set model.revision=main, or a branch, tag or commit it has",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return UsageError(
            f"{local}the hub has no public model {hub_id!r}",
            "correct model.path; for a private model run: hf auth login",
        )
    if isinstance(error, errors.HFValidationError):
        return UsageError(
            f"{local}it is not a hub id: {error}", "--set model.path=DIRECTORY or --set model.path=ORG/NAME"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        if constants.HF_HUB_OFFLINE:
            reason, command = "the hub is switched off (HF_HUB_OFFLINE)", f"HF_HUB_OFFLINE=0 {command}"
        else:
            reason = f"the hub cannot be reached ({summary(error.__cause__ or error)})"
        return EnvironmentProblem(
            f"{local}{reason} while its cache under {constants.HF_HUB_CACHE} does not hold the whole model",
            f"with a network, beforehand: {command}",
        )
    return EnvironmentProblem(f"downloading {hub_id!r} failed: {summary(error)}", f"{command}, then build again")

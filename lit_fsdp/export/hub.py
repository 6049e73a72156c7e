"""An exported folder goes to the Hugging Face Hub: asked for before the export, sent after it.

The token is that of ``huggingface_hub``: of ``HF_TOKEN``, or of ``hf auth login``. Nothing here reads or prints it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import HfHubHTTPError, validate_repo_id  # type: ignore[attr-defined]  # exported without saying so

from lit_fsdp.export.out_folder import MANIFEST

# What an earlier export may have left there, by which Transformers would load its weights in place of those sent.
_DECISIVE = (
    "model.safetensors",
    "model-?????-of-?????.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
    "adapter_config.json",
)


@dataclass(frozen=True, kw_only=True)
class HubPlace:
    """Where a model goes: ``name`` with the user or organization before it."""

    name: str
    private: bool


def find_place(name: str, *, private: bool) -> HubPlace:
    """Return where a model will go, or refuse: without a token that may write there, or of another visibility.

    Asks the Hub, and changes nothing there.

    Raises:
        ValueError: The Hub does not know the token, or it may not write, or ``name`` is no name.
        RuntimeError: The Hub cannot be reached.
    """
    api = HfApi()
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ValueError(f"push_to_hub: got {name!r}: expected a name such as my-model or user/my-model") from error
    try:
        user = api.whoami()
    except LocalTokenNotFoundError as error:
        raise ValueError("push_to_hub: there is no token of the Hub: run `hf auth login`, or set HF_TOKEN") from error
    except Exception as error:  # of a network, by any of the libraries below
        if isinstance(error, HfHubHTTPError) and error.response.status_code == 401:
            where = "run `hf auth login`, or set another HF_TOKEN, which goes before it"
            raise ValueError(f"push_to_hub: {api.endpoint} refused the token: {where}") from error
        raise RuntimeError(
            f"push_to_hub: {api.endpoint} cannot be asked: {_name(error)}; leave it out to export only"
        ) from error
    owner, _, rest = name.rpartition("/")
    owner = owner or user["name"]
    name = f"{owner}/{rest}"
    if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise ValueError(
            "push_to_hub: the token may only read: make one that may write, at https://hf.co/settings/tokens"
        )
    owners = {user["name"]: "admin"} | {org["name"]: org.get("roleInOrg") for org in user.get("orgs", ())}
    if owner not in owners:
        raise ValueError(f"push_to_hub: got {name!r}: {user['name']} may write below {', '.join(owners)}")
    if owners[owner] == "read":
        raise ValueError(f"push_to_hub: got {name!r}: {user['name']} may only read what {owner} has")
    try:
        is_private = api.model_info(name).private
    except RepositoryNotFoundError:
        return HubPlace(name=name, private=private)
    except Exception as error:
        raise RuntimeError(f"push_to_hub: {name} cannot be asked for: {_name(error)}") from error
    if is_private is not None and is_private != private:
        there = "private" if is_private else "public"
        given = str(private).lower()
        raise ValueError(
            f"private: got {given}: {name} is there, and {there}: set private to {str(is_private).lower()}, or choose "
            "another name"
        )
    return HubPlace(name=name, private=private)


def push_folder(folder: Path, place: HubPlace, message: str) -> str:
    """Send a folder as one commit, and return its address. The folder stays as it is, also when that fails.

    The same commit removes weights and adapters that are there and would be loaded in place of a model's. A folder of
    adapters removes nothing, as peft loads these, and one of GGUF neither, as several may lie beside a model.

    Raises:
        RuntimeError: With the command to try again.
    """
    is_model = not (any(folder.glob("*.gguf")) or (folder / "adapter_config.json").is_file())
    removed = _DECISIVE if is_model else ()
    try:
        api = HfApi()
        api.create_repo(place.name, private=place.private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=place.name,
            folder_path=folder,
            commit_message=message,
            ignore_patterns=[MANIFEST],
            delete_patterns=list(removed) or None,
        )
    except Exception as error:
        visibility = "--private" if place.private else "--no-private"
        retry = ["hf", "upload", place.name, str(folder), ".", visibility, "--exclude", MANIFEST]
        retry += [f"--delete={pattern}" for pattern in removed]
        raise RuntimeError(
            f"push_to_hub: {folder} is complete, but was not sent: {_name(error)}; to try again: {shlex.join(retry)}"
        ) from error
    return str(commit.commit_url)


def _name(error: Exception) -> str:
    """Return what an error of the network says, in one line."""
    if isinstance(error, HfHubHTTPError):
        return f"it answered {error.response.status_code} ({error.server_message or type(error).__name__})"
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

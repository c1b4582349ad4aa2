"""Errors of the Hugging Face hub and of the way to it, in one line with a remedy."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from backends.contract.backend import one_line

_LOGIN = "run `hf auth login`, or set HF_TOKEN"
_STATUS = {
    401: f"the hub does not accept the token: {_LOGIN}",
    403: "the token may not read it: give it read access to this repository in the hub's settings",
    429: f"the hub takes no more requests for now: wait a few minutes, or {_LOGIN}",
}


def describe_hub_error(error: BaseException, repo_id: str) -> str:
    """Return what went wrong and what helps, for any exception of the hub's client.

    Classes are told apart by name: those of its HTTP library differ between its versions.
    """
    from huggingface_hub import constants

    chain = list(_chain(error))
    kinds = {kind.__name__ for item in chain for kind in type(item).__mro__}
    status = next(filter(None, map(_status, chain)), None)
    endpoint = constants.ENDPOINT
    if "OfflineModeIsEnabled" in kinds or constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set: unset it to reach the hub, or name a model on this disk"
    if "GatedRepoError" in kinds:
        return f"its owner gates it: accept the terms at {endpoint}/{repo_id}, then {_LOGIN}"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"{endpoint} has no repository {repo_id}, or it is private: check the name; for a "
            f"private one {_LOGIN}"
        )
    if "RevisionNotFoundError" in kinds:
        return f"{repo_id} has no such revision: name a branch, a tag or a commit of it"
    if "TimeoutException" in kinds or "TimeoutError" in kinds:
        return (
            f"{endpoint} does not answer within {constants.HF_HUB_DOWNLOAD_TIMEOUT} s: try again, "
            "or raise HF_HUB_DOWNLOAD_TIMEOUT and HF_HUB_ETAG_TIMEOUT"
        )
    if status is not None:
        what = f"{endpoint} answers with status {status}: try again later"
        return _STATUS.get(status, what if status >= 500 else one_line(error))
    if kinds & {"TransportError", "ConnectionError"}:
        return f"{endpoint} cannot be reached: check the network, proxies and HF_ENDPOINT"
    if any(isinstance(item, OSError) and item.errno == errno.ENOSPC for item in chain):
        return f"no storage is left in {constants.HF_HUB_CACHE}: free some, or set HF_HUB_CACHE"
    return one_line(error)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error's response, if it has one."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None

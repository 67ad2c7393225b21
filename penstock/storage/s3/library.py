"""The client library with its descriptions of S3: slow to load, so once, by whoever first needs it; slot processes are forked
from a process that has it where their job's checkpoints lie on S3.

Nothing here reads what a user configures, opens a connection or starts a thread.
"""

from __future__ import annotations

import os
from typing import Final

import boto3.session
import botocore.httpsession
import botocore.loaders
import botocore.session

_OF_S3: Final = ("service-2", "endpoint-rule-set-1")
_OF_ALL: Final = ("partitions", "endpoints", "sdk-default-configuration", "_retry")


def new_session() -> boto3.session.Session:
    """One that finds credentials as the library usually does."""
    core = botocore.session.Session()
    core.register_component("data_loader", _LOADER)
    return boto3.session.Session(botocore_session=core)


def _loaded() -> botocore.loaders.Loader:
    loader = botocore.loaders.create_loader(os.environ.get("AWS_DATA_PATH"))
    for description in _OF_S3:
        loader.load_service_model("s3", description)
    for name in _OF_ALL:
        loader.load_data(name)
    return loader


_LOADER: Final = _loaded()

"""Which endpoint, region and credentials botocore would use for a bucket: obstore is told the same.

obstore's own search ignores AWS_PROFILE and AWS_CA_BUNDLE and takes us-east-1 for every bucket. botocore's
knows them all and refreshes what expires, so that a run outlives its first session token.
"""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore
import botocore.session
from botocore.config import Config
from botocore.exceptions import ClientError

from streamloader.errors import AccessError, UnsupportedError
from streamloader.storage.failures import client_errors, storage_error
from streamloader.storage.location import Location
from streamloader.storage.translate import S3Options, Target, client_options, s3_config

# botocore renews a session at least ten minutes before it ends, so what it gives is good for that long
TRUST = timedelta(minutes=10)
DEFAULT_REGION = "us-east-1"


class RefreshingCredentials:
    """obstore's credential provider over botocore's chain: obstore asks again when the answer has expired."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials
        self._renewed = hasattr(credentials, "refresh_needed")

    def __call__(self) -> dict[str, Any]:
        """Return the current keys, and until when they may be used without asking again."""
        keys = self._credentials.get_frozen_credentials()
        return {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            "token": keys.token,
            "expires_at": datetime.now(UTC) + TRUST if self._renewed else None,
        }


def s3_target(location: Location, options: S3Options) -> Target:
    """Return what a client for the bucket is made of.

    Raises `UnsupportedError` for what obstore cannot do, `AccessError` where there are no credentials, and
    `EndpointError` where the bucket's region cannot be asked for.
    """
    bucket, _, prefix = location.path.partition("/")
    if ":" in bucket:
        raise UnsupportedError("obstore does not know access point ARNs")
    try:
        session = botocore.session.Session(profile=options.profile)
        endpoint, region = _endpoint_and_region(session, options, bucket)
        credentials = None if options.anon else _credentials(session, options, location.shown)
        http = client_options(options.connect_seconds, options.read_seconds, endpoint.startswith("http://"))
        verify = options.verify if options.verify is not None else session.get_config_variable("ca_bundle")
        _trust(http, verify)
    except client_errors() as error:
        raise storage_error(error, location.shown) from error
    custom = not _is_aws(endpoint)
    config = s3_config(options, endpoint if custom else None, region)
    if custom and "AWS_ENDPOINT_URL_S3" in os.environ:
        config["aws_endpoint_url_s3"] = endpoint  # to obstore the variable outranks `endpoint`
    return Target("s3", bucket, prefix, config, http, credentials, endpoint, verify)


def _endpoint_and_region(session: Any, options: S3Options, bucket: str) -> tuple[str, str]:
    region = options.region or os.environ.get("AWS_REGION") or session.get_config_variable("region")
    if options.endpoint_url and not _is_aws(options.endpoint_url):
        return options.endpoint_url, region or DEFAULT_REGION
    config = Config(
        connect_timeout=options.connect_seconds,
        read_timeout=options.read_seconds,
        retries={"max_attempts": 0},
        signature_version=botocore.UNSIGNED,  # only the region is asked for, which needs no credentials
    )
    given = {"region_name": region, "endpoint_url": options.endpoint_url, "verify": options.verify}
    with contextlib.closing(session.create_client("s3", config=config, **given)) as client:
        endpoint = str(client.meta.endpoint_url)  # botocore knows the environment and the profile
        if not region and _is_aws(endpoint):
            region = _ask_region(client, bucket)
    return endpoint, region or DEFAULT_REGION


def _is_aws(endpoint: str) -> bool:
    host = urlsplit(endpoint).hostname or ""
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _ask_region(client: Any, bucket: str) -> str:
    """Return the bucket's region; S3 tells it also to those who may not read the bucket."""
    try:
        answer = client.head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    headers = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    return str(headers.get("x-amz-bucket-region", DEFAULT_REGION))


def _credentials(session: Any, options: S3Options, url: str) -> RefreshingCredentials:
    if options.key and options.secret:
        session.set_credentials(options.key, options.secret, options.token)
    credentials = session.get_credentials()
    if credentials is None:
        raise AccessError(
            f"{url}: no credentials found",
            "give key and secret (or anon=True) in storage_options, or set AWS_PROFILE or AWS_ACCESS_KEY_ID",
        )
    return RefreshingCredentials(credentials)


def _trust(http: dict[str, Any], verify: bool | str | None) -> None:
    """Carry over botocore's `verify`: False, or the file of the certificates to trust."""
    if verify is False:
        http["allow_invalid_certificates"] = True
    elif isinstance(verify, str) and not http["allow_http"]:
        http["root_certificate"] = Path(verify).read_bytes()

"""URLs of the bucket itself, signed so that whoever has one can PUT one object of one size there: S3 only.

obstore knows where an object lies and in which region, but signs `host` and nothing else; so the URL is
obstore's, and the signature is made anew over `content-length` as well. The credentials have to be obstore's,
too. Those in the settings are read back from it; all others botocore looks for where obstore does: in the
environment, a web identity, a container's or an instance's role. Neither looks for profiles at home.
"""

from __future__ import annotations

import datetime
import os
from typing import NamedTuple
from urllib.parse import parse_qs

import obstore

from schemas.settings import Storage
from streams.blobs.bucket import open_store

_AMBIENT = {
    "region": (None, ["AWS_REGION", "AWS_DEFAULT_REGION"], "us-east-1", None),
    "profile": (None, None, None, None),
    "config_file": (None, None, os.devnull, None),
    "credentials_file": (None, None, os.devnull, None),
}
"""Where botocore is to look, as the store's client does."""
_PROBE = "arrivals/probe"


class PutUrls:
    def __init__(self, storage: Storage) -> None:
        """Signs once, so that what cannot work is known at the start: then it raises ValueError."""
        from botocore.credentials import Credentials  # heavy, and nothing else needs it
        from botocore.session import Session

        self._store = open_store(storage)
        known = self._store.config
        if "access_key_id" in known:
            self._credentials = Credentials(
                known["access_key_id"], known.get("secret_access_key"), known.get("session_token")
            )
        else:
            session = Session(session_vars=_AMBIENT)
            if "region" in known:
                session.set_config_variable("region", known["region"])
            self._credentials = session.get_credentials()
        if self._credentials is None or not self._credentials.secret_key:
            raise ValueError(
                "storage.presigned_puts: no credentials to sign with in storage.options or the environment"
            )
        self.sign(_PROBE, 1, 1)

    def sign(self, name: str, size: int, ttl_s: int) -> str:
        """A URL that takes exactly `size` bytes as the object `name` for `ttl_s` seconds from now.

        Blocks: credentials of a role are renewed when their time runs out. The URL ends with them, too.
        """
        from botocore.auth import S3SigV4QueryAuth
        from botocore.awsrequest import AWSRequest

        theirs = self._sign_as_obstore(name, ttl_s)
        ours = self._credentials.get_frozen_credentials()
        # Of temporary credentials each of the two may have some of its own, for the same role.
        if theirs.temporary != bool(ours.token) or not (
            theirs.temporary or theirs.access_key == ours.access_key
        ):
            raise ValueError("storage.presigned_puts: these credentials are not those of the store's client")
        request = AWSRequest("PUT", theirs.place, {"content-length": str(size)})
        S3SigV4QueryAuth(ours, theirs.service, theirs.region, expires=ttl_s).add_auth(request)
        url: str = request.url
        return url

    def _sign_as_obstore(self, name: str, ttl_s: int) -> _Signed:
        url = obstore.sign(self._store, "PUT", name, datetime.timedelta(seconds=ttl_s))
        place, _, query = url.partition("?")
        fields = parse_qs(query)
        access_key, _, region, service, _ = fields["X-Amz-Credential"][0].rsplit("/", 4)
        return _Signed(place, access_key, region, service, "X-Amz-Security-Token" in fields)


class _Signed(NamedTuple):
    """What a signed URL says."""

    place: str
    access_key: str
    region: str
    service: str
    temporary: bool

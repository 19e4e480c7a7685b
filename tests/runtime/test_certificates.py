from __future__ import annotations

import math
import os
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa

from tandem.protocol.errors import ConfigError
from tandem.runtime.certificates import NamedFile, exposure_of, load_ca, load_identity
from tandem.runtime.followed_tls import FollowedTls, LoadedTls
from tests.support.certificates import DAY, Authority, pem_of_key


def load(certificate: Path, key: Path) -> float:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    return load_identity(context, NamedFile("tls_cert", str(certificate)), NamedFile("tls_key", str(key)))


def test_a_pair_that_fits_is_loaded_with_its_expiry(tmp_path: Path) -> None:
    expiry = datetime.fromtimestamp(load(*Authority(tmp_path).issue(expires_in=10 * DAY)), UTC)
    assert timedelta(days=9, hours=23) < expiry - datetime.now(UTC) <= 10 * DAY


def test_an_rsa_key_and_one_file_for_both_are_loaded(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue(key=rsa.generate_private_key(65537, 2048))
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    assert math.isfinite(load(both, both))


def damaged(folder: Path, how: str) -> tuple[Path, Path]:
    """A certificate and its key, of which something is wrong."""
    authority = Authority(folder)
    certificate, key = authority.issue()
    match how:
        case "no certificate":
            certificate.unlink()
        case "no key":
            key.unlink()
        case "a folder as key":
            return certificate, folder
        case "a pipe":
            os.mkfifo(folder / "pipe")
            return folder / "pipe", key
        case "endless":
            (folder / "endless").touch()
            os.truncate(folder / "endless", 2 << 20)
            return folder / "endless", key
        case "swapped":
            return key, certificate
        case "garbage":
            certificate.write_bytes(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
        case "half a key":
            key.write_bytes(key.read_bytes()[:100])
        case "another key":
            return certificate, authority.issue("other")[1]
        case "another kind":
            key.write_bytes(pem_of_key(rsa.generate_private_key(65537, 2048)))
        case "issuer first":
            certificate.write_bytes(authority.ca_file.read_bytes() + certificate.read_bytes())
        case "expired":
            return authority.issue(expires_in=-DAY)
        case "not yet valid":
            return authority.issue(begins_in=DAY)
        case "encrypted":
            return authority.issue(passphrase=b"secret")
        case "weak":
            return authority.issue(key=rsa.generate_private_key(65537, 1024))
    return certificate, key


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no certificate", r"tls_cert='.*server.crt' cannot be read: No such file or directory; give a file that"),
        ("no key", r"tls_key='.*server.key' cannot be read: No such file or directory; give a file that exists"),
        ("a folder as key", r"tls_key='.*' (is not a regular file|cannot be read: Is a directory); give a file"),
        ("a pipe", r"tls_cert='.*pipe' is not a regular file; give a file in PEM form"),
        ("endless", r"tls_cert='.*endless' has more than 1048576 bytes; give a file"),
        ("swapped", r"tls_cert='.*server.key' has a private key and no certificate .*; give the certificate"),
        ("garbage", r"tls_cert='.*server.crt' has a certificate that cannot be read: .*; give another file"),
        ("half a key", r"tls_key='.*server.key' has no private key that can be used \(.*\); give the key of tls_cert"),
        ("another key", r"tls_key='.*other.key' does not fit the first certificate of tls_cert='.*server.crt'; give"),
        ("another kind", r"tls_key='.*server.key' does not fit the first certificate of tls_cert='.*'; give"),
        ("issuer first", r"tls_key='.*' does not fit .*, and put the certificate itself before those of its issuers"),
        ("expired", r"tls_cert='.*server.crt' expired on 20\d\d-.* UTC; renew the certificate"),
        ("not yet valid", r"tls_cert='.*crt' is not valid before 20\d\d-.* UTC; correct this machine's clock, or wait"),
        ("encrypted", r"tls_key='.*server.key' is encrypted with a passphrase.*: openssl pkey -in FILE -out FILE"),
        ("weak", r"tls_cert='.*server.crt' is too weak for TLS today \(EE_KEY_TOO_SMALL\); make one with RSA of 2048"),
    ],
)
def test_what_is_wrong_is_said_by_name(tmp_path: Path, how: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*damaged(tmp_path, how))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).issue()
    key.chmod(0)
    with pytest.raises(
        ConfigError, match=r"tls_key='.*' cannot be read: Permission denied; give a file that this user"
    ):
        load(certificate, key)


def test_a_ca_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority = Authority(tmp_path)
    load_ca(context, NamedFile("ca", str(authority.ca_file)))
    assert len(context.get_ca_certs()) == 1
    with pytest.raises(ConfigError, match=r"ca='.*server.key' has a private key and no certificate"):
        load_ca(context, NamedFile("ca", str(authority.issue()[1])))


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o440, False), (0o644, True), (0o620, True)])
def test_a_key_that_others_can_read_or_change_is_warned_of(tmp_path: Path, mode: int, is_warned: bool) -> None:
    key = Authority(tmp_path).issue()[1]
    key.chmod(mode)
    assert bool(exposure_of(NamedFile("tls_key", str(key)))) == is_warned


class Followed:
    """Follows a pair behind a link, as Kubernetes mounts a Secret."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self._folder = folder
        self._versions = 0
        self.swap(*self.authority.issue())
        self.certificate, self.key = folder / "live" / "tls.crt", folder / "live" / "tls.key"
        files = [NamedFile("tls_cert", str(self.certificate)), NamedFile("tls_key", str(self.key))]
        self.changes: list[str] = []
        self.tls = FollowedTls(files, self.load, lambda: self.changes.append(self.tls.damage))

    def load(self) -> LoadedTls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        return LoadedTls(context, load_identity(context, *self.tls_files()))

    def tls_files(self) -> tuple[NamedFile, NamedFile]:
        return NamedFile("tls_cert", str(self.certificate)), NamedFile("tls_key", str(self.key))

    def swap(self, certificate: Path, key: Path) -> None:
        self._versions += 1
        version = self._folder / f"version{self._versions}"
        version.mkdir()
        (version / "tls.crt").write_bytes(certificate.read_bytes())
        (version / "tls.key").write_bytes(key.read_bytes())
        (self._folder / "next").symlink_to(version)
        (self._folder / "next").rename(self._folder / "live")

    async def look(self, times: int = 2) -> None:
        for _ in range(times):
            await self.tls.look()


async def test_a_pair_that_is_swapped_behind_a_link_is_loaded(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    before = followed.tls.loaded
    await followed.look()
    assert followed.tls.num_reloads == 0
    followed.swap(*followed.authority.issue("renewed", expires_in=60 * DAY))
    await followed.look(times=1)
    assert followed.tls.loaded.context is not before.context
    assert followed.tls.loaded.expires_at_s > before.expires_at_s + 29 * DAY.total_seconds()
    await followed.look()
    assert (followed.tls.num_reloads, followed.changes) == (1, [""])


async def test_half_a_pair_keeps_the_old_one_and_is_told_only_if_it_stays(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    await followed.look()
    before = followed.tls.loaded
    certificate, key = followed.authority.issue("renewed", expires_in=60 * DAY)
    followed.certificate.write_bytes(certificate.read_bytes())
    await followed.look(times=1)
    assert (followed.tls.damage, followed.changes) == ("", [])
    await followed.look(times=1)
    assert "does not fit the first certificate" in followed.tls.damage
    await followed.look()
    assert (followed.changes, followed.tls.loaded) == ([followed.tls.damage], before)
    followed.key.write_bytes(key.read_bytes())
    await followed.look(times=1)
    assert followed.tls.damage == ""
    assert followed.tls.loaded.expires_at_s > before.expires_at_s
    assert followed.tls.num_reloads == 1


async def test_files_that_vanish_or_have_expired_keep_the_old_certificate(tmp_path: Path) -> None:
    followed = Followed(tmp_path)
    before = followed.tls.loaded
    content = followed.certificate.read_bytes()
    followed.certificate.unlink()
    await followed.look()
    assert "No such file" in followed.tls.damage
    followed.swap(*followed.authority.issue("late", expires_in=-DAY))
    await followed.look()
    assert "expired on" in followed.tls.damage
    assert followed.tls.loaded.expires_at_s == before.expires_at_s
    assert x509.load_pem_x509_certificate(content).not_valid_after_utc.timestamp() == before.expires_at_s

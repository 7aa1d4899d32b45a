"""Creates, checks and renews the webhook's certificate. Pure; the only module that imports cryptography.

The API server trusts only the authorities in the webhook's ``caBundle``. The operator can therefore use its
own authority. It signs for one Service, and its key is in the same Secret as the serving key.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS: Final = 3650
SERVING_DAYS: Final = 365
_RENEWED_AT: Final = 1 / 3
"""Remaining share of a certificate's lifetime at which it is renewed.

An operator that is down for months therefore does not let the certificate expire.
"""
_SKEW: Final = timedelta(hours=1)
"""Time before its creation from which a certificate is valid, because other clocks may be slow."""
_FIELDS: Final = ("ca.crt", "ca.key", "tls.crt", "tls.key")
_SIGNS_CERTIFICATES: Final = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=False,
    encipher_only=False,
    decipher_only=False,
)


@dataclass(frozen=True)
class Bundle:
    """PEM texts of the authority and the serving certificate.

    ``authority``: the authorities' certificates that clients trust, newest first.
    """

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def read_bundle(data: Mapping[str, Any]) -> Bundle | None:
    """Return the bundle in a Secret's ``data``, or None if it is incomplete or invalid base64."""
    try:
        values = [base64.b64decode(data[name], validate=True) for name in _FIELDS]
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None
    return Bundle(*values) if all(values) else None


def write_bundle(bundle: Bundle) -> dict[str, str]:
    """Return the ``data`` of the Secret."""
    values = (
        bundle.authority,
        bundle.authority_key,
        bundle.certificate,
        bundle.key,
    )
    return {
        name: base64.b64encode(value).decode()
        for name, value in zip(_FIELDS, values, strict=True)
    }


def renew(
    bundle: Bundle | None,
    names: Sequence[str],
    *,
    now: datetime,
) -> Bundle | None:
    """Return a new bundle that replaces this one, or None if this one is valid for ``names`` and not due.

    A new authority is placed before the old authority, which stays trusted, because other replicas may still
    serve a certificate that the old authority has signed.
    """
    # Keep the authority for many serving certificates, so that a new authority is rarely registered.
    authorities, key = _read_authority(bundle)
    is_trusted = key is not None and not _is_due(authorities[0], now)
    is_good = (
        is_trusted and bundle is not None and _is_good(bundle, authorities[0], names, now)
    )
    if is_good:
        return None

    # Keep only the newest old authority. No certificate of an earlier authority is still served.
    if key is None or not is_trusted:
        key, authority = _create_authority(now)
        authorities = [authority, *authorities[:1]]

    serving_key, certificate = _create_certificate(names, authorities[0], key, now)
    return Bundle(
        authority=b"".join(_pem(one) for one in authorities),
        authority_key=_private_pem(key),
        certificate=_pem(certificate),
        key=_private_pem(serving_key),
    )


def _create_authority(
    now: datetime,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new authority and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Use a new name each time, so that clients do not confuse two authorities.
    text = f"evergrad-webhook-ca-{now:%Y%m%d%H%M%S}"
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])
    # The authority may sign server certificates, but no further authorities.
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, name, key, now, days=AUTHORITY_DAYS)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    return key, builder.sign(key, hashes.SHA256())


def _create_certificate(
    names: Sequence[str],
    authority: x509.Certificate,
    authority_key: CertificateIssuerPrivateKeyTypes,
    now: datetime,
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Return a new serving certificate for ``names`` and its key."""
    # Create a new key with each certificate, so that a leaked key becomes useless with its certificate.
    serving_key = ec.generate_private_key(ec.SECP256R1())
    # In X.509, a common name has at most 64 characters. Clients compare the complete alternative names.
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    alternatives = [x509.DNSName(name) for name in names]
    constraints = x509.BasicConstraints(ca=False, path_length=None)
    usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    builder = _builder(subject, authority.subject, serving_key, now, days=SERVING_DAYS)
    builder = builder.add_extension(constraints, critical=True)
    builder = builder.add_extension(
        x509.SubjectAlternativeName(alternatives), critical=False
    )
    builder = builder.add_extension(usage, critical=False)
    return serving_key, builder.sign(authority_key, hashes.SHA256())


def _read_authority(
    bundle: Bundle | None,
) -> tuple[list[x509.Certificate], CertificateIssuerPrivateKeyTypes | None]:
    if bundle is None:
        return [], None
    try:
        key = serialization.load_pem_private_key(bundle.authority_key, None)
        authorities = x509.load_pem_x509_certificates(bundle.authority)
        is_its_own = authorities[0].public_key() == key.public_key()
    except Exception:  # noqa: BLE001 - the Secret may hold anything: a new authority is made
        return [], None
    # A certificate that is signed with a foreign key is never trusted, and would be created again each time.
    if not is_its_own or not isinstance(key, ec.EllipticCurvePrivateKey):
        return [], None
    return authorities, key


def _is_good(
    bundle: Bundle,
    authority: x509.Certificate,
    names: Sequence[str],
    now: datetime,
) -> bool:
    try:
        key = serialization.load_pem_private_key(bundle.key, None)
        certificate = x509.load_pem_x509_certificate(bundle.certificate)
        certificate.verify_directly_issued_by(authority)
        extension = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except Exception:  # noqa: BLE001 - the Secret may hold anything: a new certificate is made
        return False
    # OpenSSL refuses a certificate with a key that does not belong to it, so it could not be served.
    is_its_own = certificate.public_key() == key.public_key()
    # If the namespace or Service has another name, for example after a restore, a new certificate is needed.
    has_names = extension.value.get_values_for_type(x509.DNSName) == list(names)
    return is_its_own and has_names and not _is_due(certificate, now)


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    start, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    # If the creator's clock was fast, the certificate is not valid yet, and no client trusts it.
    return start > now or end - now < (end - start) * _RENEWED_AT


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    now: datetime,
    *,
    days: int,
) -> x509.CertificateBuilder:
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
    )
    builder = builder.not_valid_before(now - _SKEW)
    return builder.not_valid_after(now + timedelta(days=days))


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _private_pem(key: Any) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)

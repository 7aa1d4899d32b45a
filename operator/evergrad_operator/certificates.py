"""The webhook's certificate: made, judged and renewed. Values in, values out; the only module that imports
cryptography.

The API server trusts what stands in the webhook's ``caBundle``, and nothing else; so the authority is our
own, signs one name, and its key lies beside the serving key in one Secret of the operator's namespace.
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
"""Share of its life that a certificate still has when it is renewed: months, in which many things may be
broken."""
_SKEW: Final = timedelta(hours=1)
"""Clocks of other machines may be behind: a certificate is valid from a little before it was made."""
_FIELDS: Final = ("ca.crt", "ca.key", "tls.crt", "tls.key")


@dataclass(frozen=True)
class Bundle:
    """PEM texts.

    ``authority``: what clients trust, newest first; its key is empty where another makes the certificates.
    """

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes


def read_bundle(data: Mapping[str, Any]) -> Bundle | None:
    """The bundle in a Secret's ``data``; None where it is not whole."""
    try:
        values = [base64.b64decode(data[name], validate=True) for name in _FIELDS]
    except (KeyError, TypeError, ValueError, binascii.Error):
        return None
    return Bundle(*values) if all(values) else None


def write_bundle(bundle: Bundle) -> dict[str, str]:
    """``data`` of the Secret."""
    values = (bundle.authority, bundle.authority_key, bundle.certificate, bundle.key)
    return {
        name: base64.b64encode(value).decode()
        for name, value in zip(_FIELDS, values, strict=True)
    }


def renew(bundle: Bundle | None, names: Sequence[str], *, now: datetime) -> Bundle | None:
    """A bundle to take the place of this one; None while it is good for ``names``.

    A new authority stands before the old one, which stays trusted: other replicas may still serve what it has
    signed.
    """
    # The authority outlives the serving certificates, so that the API server is told a new one rarely.
    authorities, key = _read_authority(bundle)
    is_new = key is None or _is_due(authorities[0], now)
    if (
        not is_new
        and bundle is not None
        and _is_good(bundle.certificate, authorities[0], names, now)
    ):
        return None
    # One authority before is kept: replicas that have not looked yet serve what it signed.
    if key is None or is_new:
        key = ec.generate_private_key(ec.SECP256R1())
        authorities = [_sign_authority(key, now), *authorities[:1]]
    # A new key with each certificate: an old one that leaked ends with its certificate.
    serving_key = ec.generate_private_key(ec.SECP256R1())
    certificate = _sign_serving(serving_key, key, authorities[0], names, now)
    return Bundle(
        authority=b"".join(_pem(one) for one in authorities),
        authority_key=_private_pem(key),
        certificate=_pem(certificate),
        key=_private_pem(serving_key),
    )


def _read_authority(
    bundle: Bundle | None,
) -> tuple[list[x509.Certificate], CertificateIssuerPrivateKeyTypes | None]:
    if bundle is None:
        return [], None
    try:
        key = serialization.load_pem_private_key(bundle.authority_key, None)
        authorities = x509.load_pem_x509_certificates(bundle.authority)
        is_its_own = authorities[0].public_key() == key.public_key()
    except Exception:  # noqa: BLE001 - whatever is wrong with it: another one is made
        return [], None
    # A certificate that a foreign key signs is never trusted, and would be made anew at each look.
    return (
        (authorities, key)
        if is_its_own and isinstance(key, ec.EllipticCurvePrivateKey)
        else ([], None)
    )


def _is_good(
    pem: bytes, authority: x509.Certificate, names: Sequence[str], now: datetime
) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        certificate.verify_directly_issued_by(authority)
        found = certificate.extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        ).value
    except Exception:  # noqa: BLE001 - whatever is wrong with it: another one is made
        return False
    return found.get_values_for_type(x509.DNSName) == list(names) and not _is_due(
        certificate, now
    )


def _is_due(certificate: x509.Certificate, now: datetime) -> bool:
    end, life = (
        certificate.not_valid_after_utc,
        certificate.not_valid_after_utc - certificate.not_valid_before_utc,
    )
    return end - now < life * _RENEWED_AT


def _sign_authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    # Its name is new each time, or a client could take one authority for the other.
    name = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"evergrad-webhook-ca-{now:%Y%m%d%H%M%S}")]
    )
    usage = x509.KeyUsage(
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
    builder = _builder(name, name, key, now, days=AUTHORITY_DAYS)
    builder = builder.add_extension(
        x509.BasicConstraints(ca=True, path_length=0), critical=True
    )
    return builder.add_extension(usage, critical=True).sign(key, hashes.SHA256())


def _sign_serving(
    key: ec.EllipticCurvePrivateKey,
    authority_key: CertificateIssuerPrivateKeyTypes,
    authority: x509.Certificate,
    names: Sequence[str],
    now: datetime,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0][:64])])
    builder = _builder(subject, authority.subject, key, now, days=SERVING_DAYS)
    for extension, is_critical in (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.SubjectAlternativeName([x509.DNSName(name) for name in names]), False),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
    ):
        builder = builder.add_extension(extension, critical=is_critical)
    return builder.sign(authority_key, hashes.SHA256())


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
    )
    builder = builder.serial_number(x509.random_serial_number())
    return builder.not_valid_before(now - _SKEW).not_valid_after(now + timedelta(days=days))


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
    """This moment."""
    return datetime.now(UTC)

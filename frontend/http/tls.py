"""Checks the TLS files at startup, and reloads the certificate when its files change."""

import logging
import ssl
from pathlib import Path

from octavo.protocol.config import ServerConfig
from octavo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


def check_tls(config: ServerConfig) -> bool:
    """Return whether the server uses TLS. Invalid files are reported at startup instead of at the first connection.

    Raises:
        ConfigError: a file is missing or invalid.
    """
    if config.ssl_certfile is None:
        if (
            config.ssl_keyfile
            or config.ssl_ca_certs
            or config.ssl_cert_reqs
            or config.enable_ssl_refresh
            or config.ssl_ciphers
        ):
            raise ConfigError("TLS needs a certificate", hint="give --ssl-certfile, or no --ssl flag")
        return False
    if config.ssl_cert_reqs and config.ssl_ca_certs is None:
        raise ConfigError(
            "client certificates are requested, but there is no CA to verify them",
            hint="give --ssl-ca-certs, or --ssl-cert-reqs 0",
        )
    for path in filter(None, (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)):
        if not Path(path).is_file():
            raise ConfigError(f"there is no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"{config.ssl_ciphers!r} names no cipher that OpenSSL knows", hint="`openssl ciphers` lists them"
            ) from None
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (ssl.SSLError, OSError) as error:
        keyfile = config.ssl_keyfile or config.ssl_certfile
        raise ConfigError(
            f"{config.ssl_certfile} and the key in {keyfile} cannot be used: {_reason(error)}",
            hint="both must be PEM files that belong together, the key without a password",
        ) from None
    try:
        if config.ssl_ca_certs:
            context.load_verify_locations(config.ssl_ca_certs)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"{config.ssl_ca_certs} cannot be used: {_reason(error)}") from None
    return True


class CertificateRefresh:
    """Reloads the certificate for new connections when its files change.

    Args:
        context: the server's TLS context.
        config: names the files.
    """

    def __init__(self, context: ssl.SSLContext, config: ServerConfig) -> None:
        assert config.ssl_certfile is not None
        self._context = context
        self._certfile = config.ssl_certfile
        self._keyfile = config.ssl_keyfile
        self._seen = self._times()

    def check(self) -> None:
        """Reload the files if they have changed; an invalid pair leaves the old certificate in use."""
        if (times := self._times()) == self._seen:
            return
        self._seen = times
        try:
            # Try an unused context first: a failed load leaves a context with a certificate but without its key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self._certfile, self._keyfile)
            self._context.load_cert_chain(self._certfile, self._keyfile)
        except (ssl.SSLError, OSError) as error:
            logger.warning("kept the old TLS certificate: %s cannot be used: %s", self._certfile, _reason(error))
        else:
            logger.info("reloaded the TLS certificate %s", self._certfile)

    def _times(self) -> list[int]:
        """Return the modification time of each file; 0 if it is missing, for example while it is replaced."""
        paths = [Path(path) for path in (self._certfile, self._keyfile) if path]
        return [path.stat().st_mtime_ns if path.is_file() else 0 for path in paths]


def _reason(error: OSError) -> str:
    return (error.reason if isinstance(error, ssl.SSLError) else error.strerror) or str(error)

"""Finds the connection to the API server: the pod's service account or a kubeconfig.

Our own client and kopf use the same connection.
"""

import datetime
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException
from kubernetes.aio.config.incluster_config import InClusterConfigLoader
from kubernetes.aio.config.kube_config import load_kube_config

from evergrad_operator.core.objects.errors import SettingsError
from evergrad_operator.edge.api.transport import build_trace

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass
class Connection:
    """The configuration of clients.

    In a pod, the token is read from its file again every minute, and after the API server has refused it.
    """

    configuration: Configuration
    _loader: InClusterConfigLoader | None = field(default=None, repr=False)

    def build_client(self) -> ApiClient:
        """Build a client. The caller must close it."""
        client = ApiClient(self.configuration)
        client.user_agent = "evergrad-operator"
        return client

    def expire_token(self) -> None:
        """Read the token from its file again before the next request, because the API server refused it."""
        if self._loader is not None:
            self._loader.token_expires_at = datetime.datetime.now()

    async def describe(self) -> Mapping[str, Any]:
        """Return the arguments of kopf's ConnectionInfo, with the current token of the file."""
        self.expire_token()
        header = await self.configuration.get_api_key_with_prefix("BearerToken") or ""
        found = self.configuration
        return {
            "server": found.host,
            "ca_path": found.ssl_ca_cert,
            "insecure": not found.verify_ssl,
            "token": header.partition(" ")[2].strip() or None,
            "username": found.username or None,
            "password": found.password or None,
            "certificate_path": found.cert_file,
            "private_key_path": found.key_file,
        }


async def connect(
    environ: Mapping[str, str], *, service_account: Path = SERVICE_ACCOUNT
) -> Connection:
    """Return the connection of ``$KUBECONFIG``, else of the pod's service account, else of ~/.kube/config.

    Raises SettingsError if there is no valid configuration.
    """
    configuration = Configuration()
    configuration.trace_configs = [build_trace()]
    # Otherwise each request would use a thread to read proxies and ~/.netrc. The proxy of a kubeconfig is
    # still used.
    configuration.client_session_kwargs = {"trust_env": False}
    loader = None
    try:
        # $KUBECONFIG takes precedence in a pod, too, as in kubectl.
        if environ.get("KUBERNETES_SERVICE_HOST") and not environ.get("KUBECONFIG"):
            loader = InClusterConfigLoader(
                str(service_account / "token"),
                str(service_account / "ca.crt"),
                environ=dict(environ),
            )
            loader.load_and_set(configuration)
        else:
            path = environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
            await load_kube_config(
                config_file=path, client_configuration=configuration, persist_config=False
            )
    except (ConfigException, OSError, ValueError) as error:
        raise SettingsError(
            f"no API server is known: {error}. Run in a pod with a service account, or name a "
            "kubeconfig in $KUBECONFIG."
        ) from error
    return Connection(configuration, loader)

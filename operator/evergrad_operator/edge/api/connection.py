"""How to reach the API server: the pod's service account, or a kubeconfig.

One source for our own client and for kopf's.
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
    """The client's configuration.

    Its token is read again from its file every minute, and when the API server refuses it.
    """

    configuration: Configuration
    _loader: InClusterConfigLoader | None = field(default=None, repr=False)

    def build_client(self) -> ApiClient:
        """Build a client, which is to be closed."""
        client = ApiClient(self.configuration)
        client.user_agent = "evergrad-operator"
        return client

    def expire_token(self) -> None:
        """Have the token read from its file again before the next request: the API server has refused it."""
        if self._loader is not None:
            self._loader.token_expires_at = datetime.datetime.now()

    async def describe(self) -> Mapping[str, Any]:
        """Return the arguments of kopf's ConnectionInfo, with the token as its file has it now."""
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
    """Return the connection of a pod, or, outside a cluster, of ``$KUBECONFIG`` or ~/.kube/config.

    Raises SettingsError.
    """
    configuration = Configuration()
    configuration.trace_configs = [build_trace()]
    # Otherwise each request would ask a thread for proxies and ~/.netrc. A kubeconfig's own proxy is used all
    # the same.
    configuration.client_session_kwargs = {"trust_env": False}
    loader = None
    try:
        # $KUBECONFIG wins also in a pod, as for kubectl.
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

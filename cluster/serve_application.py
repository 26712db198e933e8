"""The application on Ray Serve as its operator sees it: deployed, waited for, deleted. Declarative only.

Ray's and Serve's errors become ConfigurationError here; nothing of Ray leaves this file.
"""

import time
from collections.abc import Callable

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema, ServeStatus

from cluster.config import APPLICATION_NAME, ClusterConfig
from pronghorn.errors import ConfigurationError

POLL_S = 0.2
IMPORT_PATH = "cluster.build:app"


class ServeApplication:
    """One driver of one Ray cluster. Its methods block."""

    def __init__(self, config: ClusterConfig, service_args: dict[str, object]) -> None:
        self._config = config
        self._service_args = service_args
        self._started_serve = False

    def connect(self, address: str) -> str | None:
        """Join the Ray cluster; returns the URL of its dashboard. Raises ConfigurationError."""
        try:
            context = ray.init(
                address=address,
                namespace="serve",
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except ConnectionError as error:
            raise ConfigurationError(f"no Ray cluster answers at {address}: {_first_line(error)}") from None
        except (RuntimeError, ValueError, RayError) as error:
            raise ConfigurationError(f"the Ray cluster at {address} cannot be joined: {_one_line(error)}") from None
        dashboard = context.dashboard_url
        return f"http://{dashboard}" if dashboard else None

    def deploy(self) -> None:
        """Ask Serve for the application, starting Serve where it does not run."""
        config = self._config
        http = {"host": config.host, "port": config.port}
        try:
            if _get_global_client(raise_if_no_controller_running=False) is None:
                self._started_serve = True
                serve.start(proxy_location="EveryNode", http_options=HTTPOptions.model_validate(http))
            wanted = ServeDeploySchema.model_validate(
                {
                    "proxy_location": "EveryNode",
                    "http_options": http,
                    "applications": [
                        {
                            "name": APPLICATION_NAME,
                            "route_prefix": "/",
                            "import_path": IMPORT_PATH,
                            "args": self._service_args,
                        }
                    ],
                }
            )
            client = _get_global_client()
            assert client is not None
            client.deploy_apps(wanted)
        except (RayError, RuntimeError, TimeoutError) as error:
            raise ConfigurationError(f"Serve did not take the application: {_one_line(error)}") from None

    def wait_until_running(self, deadline_s: float, progress: Callable[[str], None]) -> None:
        """`deadline_s` on the monotonic clock. Raises ConfigurationError with the reason that Serve gives."""
        while True:
            status = self.status()
            application = status.applications.get(APPLICATION_NAME)
            if application is not None:
                if application.status == ApplicationStatus.RUNNING:
                    return
                progress(_counts(status))
                if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
                    raise ConfigurationError(f"the application does not start: {_reason(status)}")
            if time.monotonic() > deadline_s:
                raise ConfigurationError(f"the application did not start in time: {_reason(status)}")
            time.sleep(POLL_S)

    def status(self) -> ServeStatus:
        return serve.status()

    def delete(self, timeout_s: float) -> None:
        """Drain and delete the application; returns when it has gone, or after `timeout_s`."""
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is None:
            return
        client.delete_apps([APPLICATION_NAME], blocking=False)
        give_up_s = time.monotonic() + timeout_s
        while APPLICATION_NAME in self.status().applications and time.monotonic() < give_up_s:
            time.sleep(POLL_S)

    def disconnect(self) -> None:
        """End Serve, if it was started here, and leave the Ray cluster."""
        if self._started_serve:
            serve.shutdown()
        ray.shutdown()


def _counts(status: ServeStatus) -> str:
    """For example "decode 1/2, orchestrator 1/1"."""
    parts = []
    for name, deployment in sorted(status.applications[APPLICATION_NAME].deployments.items()):
        states = {str(getattr(state, "value", state)): count for state, count in deployment.replica_states.items()}
        parts.append(f"{name} {states.get('RUNNING', 0)}/{sum(states.values())}")
    return ", ".join(parts)


def _reason(status: ServeStatus) -> str:
    """The most telling sentence that Serve has about why it does not run."""
    application = status.applications.get(APPLICATION_NAME)
    if application is None:
        return "Serve does not know it"
    said = [deployment.message for deployment in application.deployments.values()] + [application.message]
    lines = [line.strip() for message in said for line in message.splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line and not line.startswith(("File ", "Traceback"))]
    return str((telling or lines or ["it gave no reason"])[-1])


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[-4:]) or type(error).__name__


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

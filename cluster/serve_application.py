"""The application on Ray Serve as its operator sees it: deployed, waited for, deleted. Declarative only.

Ray's and Serve's errors become ConfigurationError here; nothing of Ray leaves this file.
"""

import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.client import ServeControllerClient
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, ServeDeploySchema, ServeStatus

from cluster import rollout
from cluster.config import APPLICATION_NAME, ClusterConfig
from cluster.driver import Change, Deployed
from cluster.serve_schema import deploy_schema
from pronghorn.errors import ConfigurationError

POLL_S = 0.2
PACKING_VARIABLE = "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY"
"""Read by Serve's controller when it starts, for every application that it will ever have."""


class ServeApplication:
    """Joins the Ray cluster at `address` when it is made. Its methods block; each raises ConfigurationError."""

    def __init__(self, address: str, config: ClusterConfig) -> None:
        self._address = address
        self._config = config
        self.dashboard_url = _join(address, {PACKING_VARIABLE: "1"} if config.scheduling == "pack" else {})

    def deploy(self) -> Deployed:
        """Ask Serve for the application, starting Serve where it does not run."""
        config = self._config
        wanted = deploy_schema(config, self._args(), {})
        try:
            client = _get_global_client(raise_if_no_controller_running=False)
            serve_is_ours = client is None
            if client is not None:
                require_room(self._address, config, client.http_config, list(self.status().applications))
            else:
                http = HTTPOptions.model_validate(wanted["http_options"])
                serve.start(proxy_location=config.proxy_location, http_options=http)
                client = _get_global_client()
            assert client is not None
            client.deploy_apps(ServeDeploySchema.model_validate(wanted))
        except (RayError, RuntimeError, TimeoutError) as error:
            raise ConfigurationError(f"Serve did not take the application: {_one_line(error)}") from None
        return Deployed(serve_is_ours)

    def wait_until_running(self, deadline_s: float, progress: Callable[[str], None]) -> None:
        """`deadline_s` on the monotonic clock. Raises with the reason that Serve gives."""
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

    def change(self, change: Change, progress: Callable[[str], None]) -> None:
        """Raises with what Serve says where it cannot, or has not done so within the limit."""
        give_up_s = time.monotonic() + change.limit_s
        try:
            client = _get_global_client()
            assert client is not None
            before = rollout.deployed(client.get_serve_details(), APPLICATION_NAME)
            if before.args.get("key_prefix") != self._config.service.key_prefix:
                raise ConfigurationError(f"Serve at {self._address} runs no application of this cluster")
            while change.without is not None and before.has_running(change.without):
                _require_time(give_up_s, f"Serve still counts on {change.without}")
                time.sleep(POLL_S)
                before = rollout.deployed(client.get_serve_details(), APPLICATION_NAME)
            wanted = rollout.planned(before, change)
            client.deploy_apps(ServeDeploySchema.model_validate(deploy_schema(self._config, wanted.args, wanted.sizes)))
            old = before.replicas if change.redeploy else set[str]()
            while (
                missing := rollout.deployed(client.get_serve_details(), APPLICATION_NAME).missing(wanted, old)
            ) != "":
                progress(missing)
                self._require_deployable(give_up_s, missing)
                time.sleep(POLL_S)
        except (RayError, RuntimeError, TimeoutError, ValueError) as error:
            raise ConfigurationError(f"Serve did not change the application: {_one_line(error)}") from None

    def _require_deployable(self, give_up_s: float, missing: str) -> None:
        status = self.status()
        application = status.applications.get(APPLICATION_NAME)
        if application is None or application.status == ApplicationStatus.DEPLOY_FAILED:
            raise ConfigurationError(f"the change failed, what ran before runs on: {_reason(status)}")
        _require_time(give_up_s, missing)

    def status(self) -> ServeStatus:
        return serve.status()

    def withdraw(self, limit_s: float, serve_is_ours: bool) -> None:
        """Drain and delete the application, end Serve where it is ours, leave the Ray cluster. An application of the
        same name that somebody else deployed is left alone."""
        try:
            client = _get_global_client(raise_if_no_controller_running=False)
            if client is None:
                return
            give_up_s = time.monotonic() + limit_s
            if self._is_deployed(client):
                client.delete_apps([APPLICATION_NAME], blocking=False)
                while APPLICATION_NAME in self.status().applications and time.monotonic() < give_up_s:
                    time.sleep(POLL_S)
            if serve_is_ours:
                serve.shutdown()
        except (RayError, RuntimeError, TimeoutError) as error:
            raise ConfigurationError(f"Serve did not let the application go: {_one_line(error)}") from None
        finally:
            ray.shutdown()

    def _is_deployed(self, client: ServeControllerClient) -> bool:
        """Whether the application that is there was deployed with exactly our arguments, redeployed since or not."""
        found = client.get_serve_details()["applications"].get(APPLICATION_NAME, {})
        args = (found.get("deployed_app_config") or {}).get("args") or {}
        return bool({**args, "revision": 0} == {**self._args(), "revision": 0})

    def _args(self) -> dict[str, Any]:
        """Ray shows them to whoever may look at its dashboard: where every process of Ray is ours, the Redis URL is in
        their environment instead."""
        own_ray = self._config.address is None
        args: dict[str, Any] = msgspec.to_builtins(self._config.service)
        return args | ({"redis_url": ""} if own_ray else {})


def _join(address: str, variables: dict[str, str]) -> str | None:
    """The URL of the Ray cluster's dashboard. `variables`: of the environment of what this process starts there."""
    try:
        context = ray.init(
            address=address,
            namespace="serve",
            runtime_env={"env_vars": variables} if variables else None,
            log_to_driver=False,
            logging_level="ERROR",
            configure_logging=False,
        )
    except ConnectionError:
        raise ConfigurationError(
            f"no Ray cluster answers at {address}; where it asks for a token, say which with RAY_AUTH_MODE=token and "
            "RAY_AUTH_TOKEN_PATH",
            param="address",
        ) from None
    except (RuntimeError, ValueError, RayError) as error:
        raise ConfigurationError(f"the Ray cluster at {address} cannot be joined: {_one_line(error)}") from None
    dashboard = context.dashboard_url
    return f"http://{dashboard}" if dashboard else None


def require_room(address: str, config: ClusterConfig, http: HTTPOptions, applications: list[str]) -> None:
    """Raises ConfigurationError where the Serve that runs there is somebody else's: what it serves would be deleted,
    since asking it for one application is asking it to have no other."""
    if config.scheduling == "pack":
        raise ConfigurationError(
            f"Serve on the Ray cluster at {address} runs already, and whether it packs was settled when it started "
            f"({PACKING_VARIABLE} in its environment); leave --scheduling to spread",
            param="scheduling",
        )
    if applications:
        raise ConfigurationError(
            f"Serve on the Ray cluster at {address} already has {', '.join(sorted(applications))}; it takes one "
            "Pronghorn and nothing beside it",
            param="address",
        )
    if (http.host, http.port) != (config.host, config.port):
        raise ConfigurationError(
            f"Serve on the Ray cluster at {address} takes HTTP on {http.host}:{http.port} and not on "
            f"{config.host}:{config.port}; give --host {http.host} --port {http.port}",
            param="port",
        )


def _require_time(give_up_s: float, missing: str) -> None:
    if time.monotonic() > give_up_s:
        raise ConfigurationError(f"the change is not through in time, and goes on: {missing}")


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
    return " ".join(lines[-8:]) or type(error).__name__

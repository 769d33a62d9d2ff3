"""The gRPC server: its services, each within limits of its own, and the ports that it listens on."""

from __future__ import annotations

from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from router.auth.call_gate import CallGate
from router.auth.grpc_gate import GrpcGate
from router.edge.controller_api import TracesEdge
from router.edge.grpc import SERVICE, InferenceEdge
from router.edge.keyed_grpc import KeyedCalls
from router.edge.limits.bodies import BodyBudget
from router.edge.limits.grpc import MAX_IDLE_S, GuardedServer
from router.edge.limits.grpc_arrivals import Arrivals, MessageBudget
from router.edge.limits.grpc_calls import CallLimit
from router.edge.oip import SERVICE as OIP_SERVICE
from router.edge.oip import OipEdge, StatisticsOf
from router.edge.tls import EdgeTls
from router.edge.vllm_inference import SERVICE as VLLM_SERVICE
from router.edge.vllm_inference import VllmEdge
from router.edge.write_pauses import WritePauses
from router.idempotency.keyed_answers import KeyedAnswers
from router.service import RouterService
from tandem.errors import PortInUse
from tandem.oip.grpc_predict_v2_pb2_grpc import add_GRPCInferenceServiceServicer_to_server
from tandem.rpc.grpc_tls import ClusterTls
from tandem.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from tandem.v1.trace_pb2_grpc import add_TracesServicer_to_server
from tandem.vllm_api.inference_pb2_grpc import add_InferenceServicer_to_server as add_VllmServicer_to_server

GENERATING = (SERVICE, OIP_SERVICE, VLLM_SERVICE)
MAX_GENERATE_CALLS = 256  # with more, grpc.aio was seen to cancel calls itself
MAX_CALLS = 512
MAX_STREAMS = 256  # that take several messages, mostly idle; each may hold one that is unfinished
MAX_PUBLIC_STREAMS = 256  # health watches and reflection
SHARE_OF_ONE = 4  # one key, or one address without keys, may hold a quarter of either kind of stream
CALLS_OF_ONE = 0.75  # and that share of the calls, of those that generate too: a gateway may be all that calls
MAX_PUBLIC_WAITS = 64
PUBLIC_MESSAGE_S = 1.0  # a probe sends its few bytes with its headers
MAX_OPEN_CALLS = 8192  # a finished call counts until its client has read the end
SHUTDOWN_GRACE_S = 5.0


class GrpcServer:
    def __init__(
        self,
        service: RouterService,
        traces: TracesEdge,
        keyed: KeyedAnswers,
        statistics: StatisticsOf,
        *,
        host: str,
        port: int,
        max_message_bytes: int,
        bodies: BodyBudget,
        max_connections: int,
        client_timeout_s: float,
        pauses: WritePauses | None = None,
        tls: EdgeTls | None = None,
        controller_socket: str | None = None,
        control_address: str | None = None,
        cluster_tls: ClusterTls | None = None,
    ) -> None:
        """`controller_socket`: path of a socket for the controller, without TLS. `control_address`: host:port for it,
        with `cluster_tls`. Raises PortInUse."""
        calls = service.calls
        self._server = grpc.aio.server(
            interceptors=[GrpcGate(calls)] if calls.is_watching else [],
            options=(
                ("grpc.so_reuseport", 0),  # else two servers on one port would share its traffic
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_concurrent_streams", MAX_CALLS),  # per connection
                ("grpc.max_allowed_incoming_connections", max_connections),
                ("grpc.server_handshake_timeout_ms", round(client_timeout_s * 1000)),
                ("grpc.max_connection_idle_ms", round(MAX_IDLE_S * 1000)),  # a client's channel reconnects itself
            ),
            maximum_concurrent_rpcs=MAX_OPEN_CALLS,
        )
        self._health = health_aio.HealthServicer()
        budget = MessageBudget(bodies, max_message_bytes)
        self._add_services(service, traces, keyed, statistics, pauses or WritePauses(), budget, client_timeout_s)
        self.port: int = self._listen(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", "router.grpc_port", tls)
        if controller_socket is not None:
            self._server.add_insecure_port(f"unix:{controller_socket}")
        self.control_port = 0
        if control_address is not None:
            self.control_port = self._listen(control_address, "--control-port", cluster_tls)

    def _add_services(
        self,
        service: RouterService,
        traces: TracesEdge,
        keyed: KeyedAnswers,
        statistics: StatisticsOf,
        pauses: WritePauses,
        budget: MessageBudget,
        client_timeout_s: float,
    ) -> None:
        def guard(max_calls: int, gate: CallGate | None = None, **limits: Any) -> grpc.aio.Server:
            return cast(grpc.aio.Server, GuardedServer(self._server, max_calls, client_timeout_s, gate, **limits))

        limit = CallLimit(MAX_GENERATE_CALLS, int(MAX_GENERATE_CALLS * CALLS_OF_ONE))
        guarded = guard(
            MAX_CALLS,
            service.calls,
            max_of_one=int(MAX_CALLS * CALLS_OF_ONE),
            arrivals=Arrivals(MAX_CALLS, client_timeout_s, setting="router.client_timeout_s", budget=budget),
            streams=_streams(MAX_STREAMS),
        )
        keyed_calls = KeyedCalls(keyed, service)
        add_InferenceServicer_to_server(InferenceEdge(service, limit, keyed_calls, pauses), guarded)
        add_GRPCInferenceServiceServicer_to_server(OipEdge(service, limit, keyed_calls, statistics), guarded)
        add_VllmServicer_to_server(VllmEdge(service, limit, keyed_calls, pauses), guarded)
        # With limits of their own, so that requests cannot displace probes and the controller.
        separate = guard(MAX_OPEN_CALLS, admit=traces.check)
        add_TracesServicer_to_server(traces, separate)
        # Needs no key, and its streams have no end.
        streams = _streams(MAX_PUBLIC_STREAMS)
        arrivals = Arrivals(MAX_PUBLIC_WAITS, PUBLIC_MESSAGE_S)
        public = guard(MAX_CALLS, arrivals=arrivals, streams=streams, answers=streams)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, public)
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        names = (*GENERATING, health_name, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(reflection.aio.ReflectionServicer(names), public)

    def _listen(self, address: str, field: str, tls: EdgeTls | ClusterTls | None) -> int:
        """Returns the port. Raises PortInUse."""
        try:
            if tls is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, tls.server_credentials())
        except RuntimeError:
            raise PortInUse(
                f"{field}: cannot listen on {address}; free it or choose another port", field=field
            ) from None

    async def start(self) -> None:
        await self.set_ready(False)
        await self._server.start()

    async def set_ready(self, ready: bool) -> None:
        """Sets the health status of the whole server and of each service that generates."""
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", *GENERATING):
            await self._health.set(name, status)

    async def close(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self._server.stop(SHUTDOWN_GRACE_S)


def _streams(most: int) -> CallLimit:
    return CallLimit(most, most // SHARE_OF_ONE, "open streams")

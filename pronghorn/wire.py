"""What every pair of processes agrees on before it says anything else: protocol version and channel settings.

Pure data: nothing here imports grpc.
"""

PROTOCOL_VERSION = 1
OLDEST_PROTOCOL_VERSION = 1
"""Versions N and N-1 speak to each other; 1 is the first."""

KEEPALIVE_PERIOD_MS = 500
KEEPALIVE_TIMEOUT_MS = 1500

# A silent peer (SIGSTOP, a cut link) sends no RST. Keepalive pings alone saw nothing in 30 s on gRPC 1.85;
# with http2.ping_timeout_ms the stream breaks with UNAVAILABLE within period + timeout.
CLIENT_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_PERIOD_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

# Servers refuse pings closer than 5 minutes by default and answer GOAWAY too_many_pings.
SERVER_CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", KEEPALIVE_PERIOD_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 100),
    ("grpc.http2.min_ping_interval_without_data_ms", 100),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
]

GRPC_ENVIRONMENT = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
"""What the environment of a process says in which gRPC moves blocks, from its start: gRPC reads it when imported. The
thread that waits for a frame then reads it as well, and is not woken by another that does: 5 switches of threads to a
frame of 1 MiB in place of 12 (`docs/transfer.md`). A gRPC that does not know a name logs it and goes its own way."""

SESSION_METHOD = "/pronghorn.Node/Session"
PREFILL_METHOD = "/pronghorn.Prefill/Prefill"
FETCH_METHOD = "/pronghorn.Cache/FetchBlocks"
STATUS_METHOD = "/pronghorn.Node/Status"
DRAIN_METHOD = "/pronghorn.Node/Drain"

"""What users of other serving systems have reported, one row a kind of suffering, in our words.

`ISSUES` names the public issues, any of which a test may name in its `field` mark; `shown` is what our tests must show.
Sections: A transferred KV, B peers that die or stall, C leaks, D stale locations, E cancellation, F memory, G speed,
H streams and API, I tenants, J lifecycle, K observability.
"""

from typing import NamedTuple


class Row(NamedTuple):
    section: str
    issues: tuple[str, ...]
    shown: str
    later: str | None = None
    """What no test shows yet; None: all of it is shown."""


NOT_YET = "all of it"

ROWS: tuple[Row, ...] = (
    Row("A", ("vllm#48633",), "with any number of leading blocks cached at decode the tokens are the same"),
    Row("A", ("vllm#55470",), "a write that comes after its blocks were given back reaches nobody"),
    Row("A", ("vllm#21570",), "what has expired at its holder is refused, never read"),
    Row("A", ("sglang#23020",), "thousands of answers in a row stay right"),
    Row("A", ("sglang#30233",), "a prompt one token too long is refused before any node works on it"),
    Row("A", ("sglang#12157",), "disaggregated tokens are the aggregated ones, for each dtype and layout"),
    Row("A", ("ROCm/ATOM#2154",), "state that has no transfer is refused at start, not left behind"),
    Row("A", ("vllm#42895", "vllm#26744", "vllm#28925"), "nodes of another layout are refused by name; nobody hangs"),
    Row("A", ("Mooncake#4239",), "every way to read goes through one check of expiry"),
    Row("B", ("vllm#50754",), "a hand-over that fails at any block is a typed failure, and the prompt is recomputed"),
    Row("B", ("sglang#36033", "sglang#30329", "sglang#36108"), "every transport tells of a failure; none lets it wait"),
    Row("B", ("sglang#28651",), "nine of ten prefills cancelled at once: all slots free, the next requests succeed"),
    Row("B", ("aibrix#2289",), "prefill fails after decode was asked: another prefill node, or here, or a typed error"),
    Row("B", ("sglang#31206",), "no half dispatch to nodes that are known to fail; they come back by a probe"),
    Row("B", ("dynamo#13088",), "nodes come and go by the hundred, and every request ends"),
    Row("B", ("dynamo#13095",), "a node that is stopped, and continued later, costs no token and repeats none"),
    Row("B", ("sglang#10110",), "offered load of four times the capacity is shed, not stalled"),
    Row("B", ("production-stack#749",), "a node in a black hole holds up nobody else's requests"),
    Row("B", ("vllm#49238",), "a node that is killed and restarted again and again serves each time"),
    Row("B", ("sglang#12779", "sglang#13657"), "the death of all prefill nodes leaves decode serving"),
    Row("B", ("sglang#35189",), "no process dies under steady load"),
    Row("B", ("dynamo#11068",), "the loss of the store makes no zombie, and whoever is cut off lets go"),
    Row("C", ("vllm#46289",), "requests that are aborted on both sides at any moment leak no block"),
    Row("C", ("vllm#29906",), "deadlines around the end of a prefill keep no block"),
    Row("C", ("vllm#38027", "vllm#41383"), "a dead decode node's blocks come back; a slow one's are not taken away"),
    Row("C", ("vllm#58188",), "prefill lets go when decode has taken over, not when a lease ends"),
    Row("C", ("TensorRT-LLM#12313",), "a pool full of dead requests empties without a new one"),
    Row(
        "C",
        ("TensorRT-LLM#5820", "TensorRT-LLM#11715", "TensorRT-LLM#13713"),
        "load that is cancelled again and again leaves a cluster that answers, and that says it is ready",
    ),
    Row("C", ("dynamo#7489", "dynamo#13855", "dynamo#14507"), "who leaves, in whatever phase, leaves nothing held"),
    Row("C", ("llm-d#1138",), "an orchestrator that dies between prefill and decode leaves nothing held"),
    Row("D", ("kthena#1223", "kthena#1428", "kthena#1463"), "a restart under the same name inherits no hit"),
    Row("D", ("llm-d-router#2853",), "a sequence that goes backwards clears its source"),
    Row("D", ("aibrix#2287", "llm-d-kv-cache#593", "llm-d-kv-cache#563"), "a reset cache gets no hit"),
    Row("D", ("llm-d-router#1737", "llm-d-router#1887"), "lost events are noticed, and made good"),
    Row("D", ("Mooncake#4159",), "events in any order end in the truth"),
    Row("D", ("production-stack#1091",), "a missed departure is made good by listing again"),
    Row(
        "D",
        ("production-stack#1008", "production-stack#420", "production-stack#668", "production-stack#15"),
        "nobody is sent to a node that has gone",
    ),
    Row("D", ("dynamo#1056",), "a new orchestrator knows what is cached without new traffic"),
    Row("D", ("llm-d-kv-cache#544",), "events that stop are told from a node at rest"),
    Row("E", ("dynamo#13691", "dynamo#14775"), "a short request does not wait behind a prompt that nobody wants"),
    Row("E", ("ray#52533",), "a thousand requests cancelled at random moments: none runs on"),
    Row("E", ("llm-d-router#1206",), "a prefill node that is full or fails: the next one, then here, each counted"),
    Row("F", ("dynamo#4429",), "the index has a bound in bytes"),
    Row("F", ("production-stack#707",), "memory does not grow under steady load"),
    Row("F", ("LMCache#2017", "LMCache#2020"), "Redis holds locations only, and its delays stall nobody"),
    Row("G", ("dynamo#3774", "dynamo#2552", "dynamo#825"), "apart is never slower than together by much"),
    Row("G", ("dynamo#4425",), "time to the first token, by part"),
    Row("G", ("sglang#6411",), "the transfer is a small part of the time to the first token"),
    Row(
        "G",
        ("sglang#5450",),
        "small blocks leave in large pieces, of 64 transfers at once too; their rates: `bench.transfer`",
    ),
    Row("G", ("dynamo#589", "llm-d-router#1598", "llm-d-router#2515", "vllm-project/router#178"), "no herds"),
    Row("G", ("production-stack#884", "production-stack#1035"), "a hot prefix does not overload its holder"),
    Row("G", ("Mooncake#3688",), "a node that joins or leaves disturbs nobody"),
    Row("G", ("production-stack#448",), "thousands of streams at once: none lost, nobody restarted"),
    Row("G", ("LMCache#1640",), "fetched only where that is sooner than computed"),
    Row(
        "G",
        ("tensorflow#6256", "tensorflow#6116"),
        "gRPC carries blocks as raw bytes, copied once into a frame and once out of it; the rates: `bench.transfer`",
    ),
    Row("H", ("vllm#30671",), "the pieces of a stream are the whole answer, reasoning and tools included"),
    Row("H", ("vllm#44607",), "cached tokens are those that were cached at the node"),
    Row(
        "H",
        ("vllm-ascend#13165",),
        "before the first byte a failure is an HTTP error, after it an error event and no [DONE]",
    ),
    Row("H", ("gpustack#5939", "tinfoilsh#469"), "a break in mid-stream never looks like its end"),
    Row(
        "I",
        ("TensorRT-LLM#18156",),
        "router and engine hash alike, salts and names of adapters included; an adapter itself is refused by name",
    ),
    Row("I", ("sglang#37160", "LMCache#4825"), "another tenant's salt finds nothing"),
    Row("J", ("dynamo#13559",), "scaling down, SIGTERM and a drain end no stream, and prefill serves to the end"),
    Row("J", ("dynamo#13565", "dynamo#6985", "dynamo#14251", "dynamo#4420"), "scaling never gets stuck", NOT_YET),
    Row(
        "J",
        ("dynamo#5038", "dynamo#8592", "dynamo#13675"),
        "probes tell the truth: a node is there once it is healthy, and unready for as long as it is frozen",
    ),
    Row("J", ("production-stack#619",), "no request before the weights are there"),
    Row("J", ("vllm#29688",), "a deployment that cannot be placed says why", NOT_YET),
    Row("J", ("llm-d-router#1934", "llm-d-router#2066", "llm-d-router#412"), "what may be shed is shed"),
    Row("K", ("dynamo#7030", "llm-d.github.io#469"), "one trace over every hop", NOT_YET),
    Row(
        "K", ("dynamo#8483", "inference-sim#821", "inference-sim#1510"), "transfers and requests are counted once each"
    ),
)

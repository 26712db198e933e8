"""docs/break-even.md, made from the model that decides: `python -m orchestrator.routing.break_even_page`.

Pure but for `main`, which writes the page. A test holds the page to what this makes.
"""

from pathlib import Path

from orchestrator.routing.break_even import (
    MARGIN_S,
    MARGIN_SHARE,
    STREAM_SHARE,
    Speeds,
    apart_s,
    here_s,
    here_wins,
    task,
    transfer_s,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "break-even.md"
PROMPTS = (64, 256, 1024, 4096, 16_384, 65_536)
LINKS = {"10 Mb/s": 1.25e6, "100 Mb/s": 1.25e7, "1 Gb/s": 1.25e8, "10 Gb/s": 1.25e9, "100 Gb/s": 1.25e10}
CASES = (
    ("A small model on a CPU: 2,000 prompt tokens/s, 45 KiB of KV a token", 2000.0, 45 * 1024.0),
    ("An 8 B model on a GPU: 20,000 prompt tokens/s, 128 KiB of KV a token", 20_000.0, 128 * 1024.0),
)
STREAMS = (0, 8, 32)
QUEUES_S = (0.0, 1.0)


def page() -> str:
    lines = [
        "# When a prompt is computed apart",
        "",
        "Made from the model that the router decides with (`orchestrator/routing/break_even.py`); speeds are learned",
        "while the cluster runs, so that these tables show shapes, not promises. Nothing is cached anywhere.",
        "",
        "Here (on the decode node): wait + compute, and each running stream stands still meanwhile, which weighs",
        f"{STREAM_SHARE:g} of the time. Apart (on a prefill node): wait + compute + hops + what is left of the",
        "transfer, which runs beside the computing. Here must win by "
        f"{1e3 * MARGIN_S:g} ms and {100 * MARGIN_SHARE:g} % of the time apart:",
        "streams that will come speak for apart.",
        "",
        "Each cell: seconds here / seconds apart, and which way the router takes.",
    ]
    for title, rate, kv_bytes in CASES:
        for streams in STREAMS:
            for queue_s in QUEUES_S if streams == 8 else QUEUES_S[:1]:
                wait = f", {queue_s:g} s of prompts before it on the prefill node" if queue_s else ""
                lines += ["", f"## {title}; {streams} streams run{wait}", ""]
                lines += _table(rate, kv_bytes, streams, queue_s)
    return "\n".join(lines) + "\n"


def _table(rate: float, kv_bytes: float, streams: int, queue_s: float) -> list[str]:
    rows = ["| prompt tokens | " + " | ".join(LINKS) + " |", "|---:" * (len(LINKS) + 1) + "|"]
    speeds = Speeds(prefill_tokens_per_s=rate)
    for tokens in PROMPTS:
        here = here_s(task(tokens, 0, speeds), streams)
        cells = []
        for link in LINKS.values():
            apart = apart_s(task(tokens, int(queue_s * rate), speeds), transfer_s(tokens * kv_bytes, link))
            cells.append(f"{here:.3g} / {apart:.3g} {'here' if here_wins(here, apart) else 'apart'}")
        rows.append(f"| {tokens} | " + " | ".join(cells) + " |")
    return rows


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
